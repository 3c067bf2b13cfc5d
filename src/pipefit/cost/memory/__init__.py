"""Memory of lanes and stages, memory limits of orders, and the learned correction."""
