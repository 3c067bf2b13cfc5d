"""Benchmarks, one folder a topic: `python -m benchmarks.TOPIC.NAME` from the root of the repository."""
