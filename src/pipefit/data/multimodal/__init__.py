"""Samples of text and images: manifest, index, the samples of a step, their balance and order, and the arrays of one
action.

A `manifest` (jsonl, parquet, or a `folder`) lists the parts of every sample. `index` converts it once into metadata
that every rank maps. `step` chooses the samples of a step from metadata alone; `balance` and `ordering` assign them to
replicas and microbatches. `feeds` builds the arrays of one (stage, microbatch, replica), and `images` decodes.
"""
