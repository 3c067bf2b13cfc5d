"""A plan in words: tables, reasons, notes on slices and unused device kinds, the nearest plan that fits."""
