"""What is fed: corpora, tokens, packing, the step plan.

Text comes from `sources`, becomes ids in `tokenizer`, lies in a memory-mapped file in `corpus`, is cut into numbered
`rows` and shuffled by `permutation`; `stepplan` says which rows go where, and `feed_arrays` cuts out one action's.
"""
