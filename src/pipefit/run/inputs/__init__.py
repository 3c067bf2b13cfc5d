"""Inputs of a step: text, user data sets and images as the arrays of one action."""
