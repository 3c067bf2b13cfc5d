"""Local search over orders."""
