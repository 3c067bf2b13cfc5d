"""Configurations of the model families: they read a Hugging Face config.json and know the names of its stored weights.

Each family is a folder, registered by walking this package: `config.py` without torch, and `layers.py` with the
modules, which imports torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from pipefit.model.families.family import InitialValue, ModelConfig, ModelFamily, WeightTensor

__all__ = ["FAMILIES", "InitialValue", "ModelConfig", "ModelFamily", "WeightTensor"]


def _discover_families() -> Mapping[str, ModelFamily]:
    families: dict[str, ModelFamily] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.ispkg:
            family: ModelFamily = importlib.import_module(f"{__name__}.{info.name}.config").FAMILY
            families[family.name] = family
    return MappingProxyType(families)


FAMILIES: Mapping[str, ModelFamily] = _discover_families()
