"""Plans of several modules: each with its own devices, replicas, shards and stages (method: DistTrain)."""
