"""Speed of the planner and of the simulator."""
