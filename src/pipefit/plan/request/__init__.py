"""The user's request: constraints, decisions, sequence length, slices, samples of several modules."""
