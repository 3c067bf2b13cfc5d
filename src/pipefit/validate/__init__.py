"""Predictions beside runs that others published or a user made, and factors that are fitted to such runs.

All predictions are those of `pipefit plan`: a cluster from data sheets, a model, and all degrees fixed.
"""
