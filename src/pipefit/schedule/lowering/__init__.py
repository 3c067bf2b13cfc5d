"""Lowering of computed schedules to lane programs with all their communication."""
