"""Memory of a plan measured on one device, one rank at a time."""
