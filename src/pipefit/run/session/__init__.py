"""One training run from start to exit: launch, rendezvous, run folder, faults, metrics."""
