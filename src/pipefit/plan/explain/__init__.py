"""Explanation of a plan: tables, reasons, notes on slices and unused device kinds, the nearest plan that fits."""
