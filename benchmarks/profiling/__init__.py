"""Accuracy of what a profile measures: compute curves and links."""
