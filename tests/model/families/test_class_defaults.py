"""Configurations with absent fields have the values of the library's class, and the padding token has no gradient."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.support.worker_plans import LLAMA

from benchmarks.models.coverage import EXACT, all_types, is_native
from benchmarks.models.native_types import measure_native
from pipefit.errors import ModelError
from pipefit.model.families.build import build_layers
from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.registry import describe_config

NATIVE = [kind for kind in all_types() if is_native(kind)]
NOT_USED = ("max_position_embeddings", "bos_token_id", "eos_token_id")
"""Fields that no graph depends on."""


def class_fields(kind: str) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    fields: dict[str, Any] = CONFIG_MAPPING[kind]().to_dict()
    return fields | ({"head_dim": 128} if kind == "glm4_moe" else {})  # 96 heads of 4,096 features by default


def read_fields(fields: dict[str, Any], kind: str) -> tuple[str, dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        described = describe_config(fields, kind, kind)
    config = described.config.items()
    return described.family, {name: value for name, value in config if value is not None and name not in NOT_USED}


@pytest.mark.parametrize("kind", NATIVE)
def test_an_absent_field_has_the_default_of_the_class(kind: str) -> None:
    fields = class_fields(kind)
    expected, missing = read_fields(fields, kind), []
    for name in fields:
        if name == "model_type" or (name, kind) == ("head_dim", "glm4_moe"):
            continue
        try:
            assert read_fields({key: value for key, value in fields.items() if key != name}, kind) == expected, name
        except ModelError:
            missing.append(name)
    sizes = ("vocab", "hidden", "intermediate", "layer", "head", "n_embd", "n_positions", "ffn_dim")
    assert all(any(part in name for part in sizes) for name in missing), missing


@pytest.mark.parametrize("kind", NATIVE)
def test_loss_and_gradients_of_a_tiny_configuration_are_those_of_the_class(kind: str) -> None:
    """With the padding token among the tokens."""
    assert measure_native(kind)[1] <= EXACT


@pytest.mark.parametrize(("token", "row"), [(0, 0), (95, 95), (-1, 95), (96, None), (None, None), (True, None)])
def test_the_padding_token_is_that_of_an_embedding(token: Any, row: int | None) -> None:
    assert ConfigFields({"pad_token_id": token}, "here").read_padding(96) == row
    described = describe_config({**LLAMA, "pad_token_id": token}, "llama", "here")
    assert describe_config(described.config, "llama", "here").config == described.config
    embedding = build_layers(described.family, described.config, device="cpu")[0].embed_tokens
    assert isinstance(embedding, torch.nn.Embedding) and embedding.padding_idx == row
