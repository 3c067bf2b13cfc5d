"""Schedules fitted to measured times and to the memory limit of every lane."""
