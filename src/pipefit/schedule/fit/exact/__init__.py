"""CP-SAT models of orders: windows of an order, complete instances, steady states."""
