"""Models to train: operator graphs, their capture from PyTorch modules, and the model families."""
