"""Display of predictions beside measurements: the HTML report, Perfetto traces, comparisons."""
