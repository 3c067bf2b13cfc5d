"""From plain modules to operator graphs by torch.export."""
