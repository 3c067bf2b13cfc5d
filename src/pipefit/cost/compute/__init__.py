"""Compute time of layers and operators: measured curves, roofline, corrections, packed rows."""
