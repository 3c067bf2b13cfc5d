"""Placement of devices: the search beside annealing, fixed orders and exhaustive search."""
