"""Closed forms that prune candidates: lower bounds of the step, estimates, microbatches in flight."""
