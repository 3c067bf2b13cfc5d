"""Training data: text corpora, tokenizers, packing into rows, the step plan, and samples with images.

`sources` reads text, `tokenizer` turns it into ids, `corpus` stores the ids in a memory-mapped file. `chat`
reads conversations and marks their answers. `rows` numbers the rows of the corpus and `permutation` shuffles them.
`stepplan` assigns rows to microbatches and replicas, and `feed_arrays` cuts out the arrays of one action.
"""
