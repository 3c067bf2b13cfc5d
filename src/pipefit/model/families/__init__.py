"""Configurations of the model families: reading a Hugging Face config.json, and how its weights are named in files.

One folder a family, registered by walking this package: `config.py` without torch, and `layers.py`, the modules
themselves, which import torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from pipefit.model.families.family import InitialValue, ModelConfig, ModelFamily, WeightTensor

__all__ = ["FAMILIES", "InitialValue", "ModelConfig", "ModelFamily", "WeightTensor"]


def _discover_families() -> Mapping[str, ModelFamily]:
    found: dict[str, ModelFamily] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.ispkg:
            family: ModelFamily = importlib.import_module(f"{__name__}.{info.name}.config").FAMILY
            found[family.name] = family
    return MappingProxyType(found)


FAMILIES: Mapping[str, ModelFamily] = _discover_families()
