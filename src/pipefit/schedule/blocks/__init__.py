"""Building blocks of pipeline schedules and the passes that make schedules of them."""
