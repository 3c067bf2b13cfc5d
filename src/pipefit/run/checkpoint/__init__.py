"""Checkpoints under global names: pieces, manifest, storage, planner."""
