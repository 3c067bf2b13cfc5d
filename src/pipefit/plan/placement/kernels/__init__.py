"""The inner loops of the placement search, plain Python or compiled by numba."""
