"""Schedules fitted to true times and to the memory of every lane."""
