"""The cost table of a whole pipeline: stages, edges, turns, contention, overlapped reductions."""
