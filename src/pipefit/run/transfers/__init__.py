"""Transfers between stages: wires, pieces, channels, packed token runs."""
