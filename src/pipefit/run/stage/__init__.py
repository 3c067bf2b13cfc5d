"""The stage program of one device: parameters, compiled forward, recomputation, memory audit."""
