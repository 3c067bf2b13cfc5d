"""Configurations of the model families: they read a Hugging Face config.json and know the names of its stored weights.

Each family is a folder, registered by walking this package: `config.py` without torch, and `layers.py` with the
modules, which imports torch. A plug-in calls `register_model_family`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from pipefit.errors import ModelError, PluginError
from pipefit.model.families.family import (
    InitialValue,
    ModelConfig,
    ModelFamily,
    RowParts,
    WeightTensor,
    without_tuning,
)
from pipefit.plugins import NamedRegistry, call_name, call_plugin

__all__ = [
    "FAMILIES",
    "InitialValue",
    "ModelConfig",
    "ModelFamily",
    "RowParts",
    "WeightTensor",
    "family_of_type",
    "read_family_config",
    "register_model_family",
    "without_tuning",
]

FAMILIES: NamedRegistry[ModelFamily] = NamedRegistry("model families")
"""Every family by its name."""


def register_model_family(family: ModelFamily) -> ModelFamily:
    """Add a family, and return it. Raises PipefitError for a name, ModelError for a model type, that another family
    has."""
    for model_type in family.model_types:
        known = family_of_type(model_type)
        if known is not None and known.name != family.name:
            raise ModelError(
                "Two model families read one model type.",
                where=f"model families {known.name} and {family.name}",
                seen=repr(model_type),
                allowed="a model_type of its own for each family",
            )
    return FAMILIES.add_entry(family.name, family)


def read_family_config(family: ModelFamily, config: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the typed configuration of a family. Raises ModelError for bad fields, and PluginError if the `read` of a
    plug-in fails or returns an object without the methods of `ModelConfig`."""
    subject = FAMILIES.describe_entry(family.name)
    typed = call_plugin(subject, family.read, config, where)
    missing = [name for name in ("to_config", "stored_tensors", "initial") if not callable(getattr(typed, name, None))]
    if missing:
        raise PluginError(
            f"The {subject} returned a configuration of a wrong type.",
            where=call_name(family.read),
            seen=f"{type(typed).__name__} without {', '.join(missing)}",
            allowed="an object with the methods to_config, stored_tensors and initial",
        )
    return typed


def family_of_type(model_type: object) -> ModelFamily | None:
    """Return the family that reads a config.json with this `model_type`, None if there is none."""
    return next((family for family in FAMILIES.values() if model_type in family.model_types), None)


for _info in pkgutil.iter_modules(__path__):
    if _info.ispkg:
        for _family in importlib.import_module(f"{__name__}.{_info.name}.config").FAMILIES:
            register_model_family(_family)
