"""Published models by their config.json alone: the number of parameters is the published one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.published_models import PUBLISHED_MODELS

from pipefit.model.registry import build_layers, describe_config

LARGEST_ERROR = 1e-3


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
    published = PUBLISHED_MODELS[name]["parameters"]
    assert abs(count_parameters(PUBLISHED_MODELS[name]["config"], name) - published) <= LARGEST_ERROR * published


def test_the_table_has_models_of_every_size() -> None:
    sizes = [entry["parameters"] for entry in PUBLISHED_MODELS.values()]
    assert len(sizes) >= 20 and min(sizes) < 10**9 and max(sizes) > 10**11
