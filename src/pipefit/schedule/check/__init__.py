"""Validity of schedules: the rules, the deadlock check, and a drawing of the first fault."""
