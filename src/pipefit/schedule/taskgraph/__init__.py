"""The task graph of a schedule and the inner loops that time it."""
