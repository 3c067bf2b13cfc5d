"""Schedules as text: the CSV format of PyTorch pipelining, and a grid over time."""
