"""Constructions of `fit` and models of links, each left out in turn."""
