"""Cuts of a sequence into slices: equal-cost cuts, the number of slices, TeraPipe's dynamic program, a local search.

A slicing is the lengths of its slices, in tokens and in order. The cost of a slice is a function of its tokens and the
tokens before it, `TimeOf`; the caller supplies it (measured curves, a roofline, a toy).
"""
