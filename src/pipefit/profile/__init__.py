"""profile/: measuring the real machines: links, collectives, layers, memory; the cluster file is made from it."""
