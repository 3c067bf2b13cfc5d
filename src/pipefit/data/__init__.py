"""What is fed: corpora, tokens, packing, the step plan."""
