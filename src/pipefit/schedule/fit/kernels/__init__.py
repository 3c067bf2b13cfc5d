"""The inner loops of the fitted search, plain Python or compiled by numba with equal results."""
