"""The devices of a cluster by kind, and patterns of kinds on a grid of lanes and replicas."""
