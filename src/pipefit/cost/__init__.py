"""Costs of work in a pipeline: compute time, transfers, collectives, memory."""
