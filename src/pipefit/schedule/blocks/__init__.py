"""Building blocks of pipeline schedules and the passes that turn them into schedules."""
