"""Constructions of first orders for the fitted search."""
