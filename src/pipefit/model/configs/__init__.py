"""Configurations of the model families: reading a Hugging Face config.json, and how its weights are named in files.

One file a family, found by walking this package; no torch here. The modules themselves stand in `model/families/`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from pipefit.model.configs.family import Family, Initial, ModelConfig, Stored

__all__ = ["FAMILIES", "Family", "Initial", "ModelConfig", "Stored"]

_MACHINERY = {"diffusion", "family", "reading", "vision"}


def _discover() -> Mapping[str, Family]:
    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name not in _MACHINERY:
            family: Family = importlib.import_module(f"{__name__}.{info.name}").FAMILY
            found[family.name] = family
    return MappingProxyType(found)


FAMILIES: Mapping[str, Family] = _discover()
