"""Token slices: published settings, peaks, the output head, two processes and a lab."""
