"""Constructions of initial orders for the fitted search."""
