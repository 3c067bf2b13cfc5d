"""Sums over operator graphs: FLOPs, saved bytes, transient memory, pointwise regions, splits."""
