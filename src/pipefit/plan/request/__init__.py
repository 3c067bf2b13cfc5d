"""What the user asked for: constraints, decisions, sequence length, slices, samples of several modules."""
