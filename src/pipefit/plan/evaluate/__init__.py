"""One candidate, assembled, costed and simulated: the planner context and its outcome."""
