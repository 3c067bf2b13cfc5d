"""Cutting a sequence into slices: equal-cost cuts, how many slices, TeraPipe's dynamic program, a local search.

A slicing is the lengths of its slices, in tokens and in order. What a slice costs is a function of its own tokens and
of those before it, `TimeOf`; where it comes from (measured curves, a roofline, a toy) is the caller's business.
"""
