"""Benchmarks, one folder a topic: `python -m benchmarks.TOPIC.NAME` from the root of the repository.

Every program describes itself with `--help` and writes its result with `--json`; `results/` holds the recorded ones. A
new benchmark is a module in the folder of its topic that uses `harness.py`. Its tests are in `tests/benchmarks/TOPIC`.
"""
