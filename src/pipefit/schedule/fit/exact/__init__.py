"""CP-SAT models of orders: windows of an order, whole instances, steady states."""
