"""The worker of one rank: built from the plan, it interprets its lane of the schedule."""
