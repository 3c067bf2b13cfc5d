"""The end of a step: gradient buckets, reductions, tied weights, the norm, the optimizer."""
