"""The model types of the decoder: every file of `types/`."""

from __future__ import annotations

import importlib
import pkgutil

from pipefit.model.families.decoder import types
from pipefit.model.families.family import ModelFamily

FAMILIES: tuple[ModelFamily, ...] = tuple(
    importlib.import_module(f"{types.__name__}.{info.name}").FAMILY for info in pkgutil.iter_modules(types.__path__)
)
