"""From decisions to a plan: structure, pipeline work, order, shard programs, predictions."""
