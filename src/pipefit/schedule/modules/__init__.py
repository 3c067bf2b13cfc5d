"""Orders of stages of several modules: in line with the first and last lane, or taking turns on lanes."""
