"""Collectives, tensor parts and stored weights along the shard axis of a stage."""
