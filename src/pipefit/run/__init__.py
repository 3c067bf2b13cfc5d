"""Execution of a plan: launch, worker, stage program, operators, transfers, optimizer, checkpoint, faults."""
