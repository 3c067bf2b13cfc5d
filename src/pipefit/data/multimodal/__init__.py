"""Samples of text and images: manifest, index, the step's samples, balance and order, and the arrays of one action.

A `manifest` (jsonl, parquet or a `folder`) says what every sample consists of; `index` turns it once into metadata that
every rank maps; `step` says from metadata alone which samples a step has and, after `balance` and `order`, who takes
which; `feeds` cuts out the arrays of one (stage, microbatch, replica). Decoding stands in `images`.
"""
