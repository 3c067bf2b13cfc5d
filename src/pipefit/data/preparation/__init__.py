"""Preparing what is fed elsewhere than in the trainer: stateless tasks, a pool that runs them, steps in order.

`dispatch` decides (a state machine without clock or processes), `pool` drives it, `processes` and `ray_workers` are
two kinds of workers behind one interface (`executor`), `ahead` keeps the next steps of a run in preparation, and
`cores` says how many cores that needs.
"""
