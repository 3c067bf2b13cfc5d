"""Predict published training runs: their plans become cost tables, and the project's own simulator gives the time.

This package neither plans nor simulates. `gpt.py` writes the operator graphs, `kernels.py` costs them, `megatron.py`
builds the pipeline work. In `sets/`, one file per data set reads the published rows, fits on a part of them and
predicts the rest.
"""
