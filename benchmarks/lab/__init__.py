"""Labs of other benchmarks: clusters, profiles and runs of plans; how well a lab keeps to its numbers."""
