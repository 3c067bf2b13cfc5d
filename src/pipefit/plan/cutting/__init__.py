"""Cuts of a chain of layers into stages: costs and memory of layers per stage, the exact partition, cuts that balance
lanes with several stages, and a local search with the order of the schedule.
"""
