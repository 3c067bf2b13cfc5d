"""Local search over orders and its compiled loops."""
