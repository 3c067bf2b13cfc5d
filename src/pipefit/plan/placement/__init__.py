"""Which device does what: a search over permutations of the devices, decided by the simulator (docs/placement.md)."""
