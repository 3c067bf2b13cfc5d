"""Prepare training data outside the trainer process: stateless tasks, a pool that runs them, and steps in order.

`dispatch` decides (a state machine without clock or processes) and `pool` drives it. `processes` and `ray_workers` are
two kinds of workers behind one interface (`executor`). `ahead` prefetches the next steps of a run, and `cores`
estimates the number of cores needed.
"""
