"""BERT-Base of transformers, unmodified, from its configuration with random weights."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForMaskedLM

from pipefit.model.example import Example


def example(config: BertConfig, tokens: int) -> Example:
    """Masked language modelling over rows of so many tokens."""
    ids = torch.zeros(2, tokens, dtype=torch.int64)
    return Example(module=BertForMaskedLM(config), inputs={"input_ids": ids, "labels": ids})


def bert_base() -> Example:
    """12 layers of width 768, 110 million parameters, rows of 128 tokens."""
    return example(BertConfig(), 128)
