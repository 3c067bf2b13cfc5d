"""Searched sharding programs beside fixed ones: simulated, and run in labs."""
