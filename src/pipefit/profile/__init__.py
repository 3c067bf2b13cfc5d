"""profile/: measure links, collectives, layers and memory of the real machines, and write the cluster file from
them."""
