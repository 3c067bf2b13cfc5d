"""Evaluation of one candidate, assembled, costed and simulated: the planner context and the outcome."""
