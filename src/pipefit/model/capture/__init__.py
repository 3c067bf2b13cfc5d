"""Capture of plain modules as operator graphs by torch.export."""
