"""Memory of plans: estimates beside measured bytes, schedule families, and the price of a limit."""
