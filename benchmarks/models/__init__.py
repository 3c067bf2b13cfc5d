"""Published and tiny models of every type: read, counted, planned, trained, and their weight files."""
