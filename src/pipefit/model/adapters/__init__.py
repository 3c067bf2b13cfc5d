"""Fine-tuning of a model's graphs: low-rank adapters (LoRA) and frozen parameters.

The options are part of the model's configuration (`options.py`), so plans, runs and checkpoints know them. `targets.py`
finds the linear layers, `adapt.py` writes the graphs, and `peft.py` gives the names and the configuration of PEFT's
files. Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""
