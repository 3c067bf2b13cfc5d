"""Slices in the search: which models can have them, which slicings of a layout are worth a look, bounds of candidates
that cut sequences, and why a plan does or does not. How a sequence is cut at all stands in `plan/slicing/`.
"""
