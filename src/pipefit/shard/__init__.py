"""The SPMD program of one stage: forms, rules, programs."""
