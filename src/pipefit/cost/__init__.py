"""What a piece costs: compute time, transfers, collectives, memory."""
