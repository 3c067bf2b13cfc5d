"""Doing it: launch, worker, stage program, operators, transfers, optimizer, checkpoint, faults."""
