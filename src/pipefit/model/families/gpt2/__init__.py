"""The GPT-2 family (Radford et al., 2019)."""
