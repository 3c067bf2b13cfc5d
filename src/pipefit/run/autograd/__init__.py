"""Autograd pieces: saved forwards, the backward engine, pointwise regions, attention kernels and masks."""
