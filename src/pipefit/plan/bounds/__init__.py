"""Closed forms that prune candidates: lower bounds of the step, estimates, units in flight."""
