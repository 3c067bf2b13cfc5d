"""show/: what was predicted beside what was measured: the HTML report, Perfetto traces, comparisons."""
