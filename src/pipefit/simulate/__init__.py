"""What would happen: a timeline and a memory curve from a schedule and costs."""
