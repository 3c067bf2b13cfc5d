"""The candidates of a search: the space, grids of candidates, their bounds, the queue."""
