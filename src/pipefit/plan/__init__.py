"""The plan format, the search for the best plan, and its explanation."""
