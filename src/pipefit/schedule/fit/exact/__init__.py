"""CP-SAT models of orders: windows of an order, and complete instances."""
