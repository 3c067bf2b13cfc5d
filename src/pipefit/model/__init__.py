"""What is trained: operator graphs, their capture, the model families."""
