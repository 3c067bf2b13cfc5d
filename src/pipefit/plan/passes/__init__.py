"""The passes of the planner, one file each, in the order of `plan/make.py`."""
