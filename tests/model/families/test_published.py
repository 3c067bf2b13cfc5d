"""Published models by their config.json alone: the number of parameters is the published one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.published_models import ALL_MODELS, PUBLISHED_MODELS

from benchmarks.models.published import TOLERANCE
from pipefit.model.any_class import build_class, empty_parameters
from pipefit.model.registry import build_layers, describe_config


def count_parameters(config: dict[str, Any], name: str) -> int:
    """Count the elements of all parameters of the modules, on the meta device; tied ones once."""
    described = describe_config(config, name, name)
    sizes = {
        layer.parameter_names[local]: parameter.numel()
        for layer in build_layers(described.family, described.config)
        for local, parameter in layer.named_parameters()
    }
    return sum(sizes.values())


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_a_published_model_has_its_published_number_of_parameters(name: str) -> None:
    published, largest = PUBLISHED_MODELS[name]["parameters"], PUBLISHED_MODELS[name].get("tolerance", TOLERANCE)
    assert abs(count_parameters(PUBLISHED_MODELS[name]["config"], name) - published) <= largest * published


@pytest.mark.parametrize("name", [name for name in ALL_MODELS if name not in PUBLISHED_MODELS])
def test_a_class_has_its_published_number_of_parameters(name: str) -> None:
    entry = ALL_MODELS[name]
    with empty_parameters():
        module = build_class(entry["config"])
    count = sum(parameter.numel() for parameter in module.parameters())
    assert abs(count - entry["parameters"]) <= entry["tolerance"] * entry["parameters"]


def test_the_table_has_models_of_every_size() -> None:
    sizes = [entry["parameters"] for entry in PUBLISHED_MODELS.values()]
    assert len(sizes) >= 20 and min(sizes) < 10**9 and max(sizes) > 10**11
