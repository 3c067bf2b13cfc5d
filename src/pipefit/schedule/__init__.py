"""In which order: actions, schedule families, lowering, checks, CSV."""
