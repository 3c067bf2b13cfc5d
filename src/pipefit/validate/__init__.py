"""Predicting runs that others published: their plans become cost tables, the project's own simulator gives the time.

Nothing here plans or simulates. `gpt.py` writes the operator graphs, `kernels.py` costs them, `megatron.py` lays them
out, and one file a data set reads the published rows, fits what it may on some and predicts the others.
"""
