"""Schedules for models of several modules: inline on the first and last lane, or multiplexed on all lanes."""
