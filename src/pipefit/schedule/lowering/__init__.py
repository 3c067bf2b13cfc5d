"""Lowering of computed schedules to lane programs with all communication."""
