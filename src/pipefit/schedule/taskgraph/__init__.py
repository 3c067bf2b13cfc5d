"""The task graph of a schedule, its times and its memory."""
