"""Configurations of the model families: reading a Hugging Face config.json, and how its weights are named in files.

One folder a family, registered by walking this package: `config.py` without torch, and `layers.py`, the modules
themselves, which import torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from pipefit.model.families.family import Family, Initial, ModelConfig, Stored

__all__ = ["FAMILIES", "Family", "Initial", "ModelConfig", "Stored"]


def _discover() -> Mapping[str, Family]:
    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.ispkg:
            family: Family = importlib.import_module(f"{__name__}.{info.name}.config").FAMILY
            found[family.name] = family
    return MappingProxyType(found)


FAMILIES: Mapping[str, Family] = _discover()
