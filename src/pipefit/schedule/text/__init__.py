"""Schedules as text: the CSV of PyTorch pipelining, and a grid in time."""
