"""Assignment of devices to a plan's slots: a search over permutations, decided by the simulator
(docs/design/placement.md)."""
