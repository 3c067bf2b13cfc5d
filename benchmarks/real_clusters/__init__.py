"""The planner's plans beside even plans, run in labs of unlike devices."""
