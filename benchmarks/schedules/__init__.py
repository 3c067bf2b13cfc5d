"""Schedules under memory limits: the fitting search beside a published search and all families."""
