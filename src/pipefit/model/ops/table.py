"""The registry of operator kinds: every `OPERATORS` tuple in the modules of this package."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from pipefit.model.ops.kind import OperatorKind

_MACHINERY = {"kind", "table"}


def _discover_kinds() -> Mapping[str, OperatorKind]:
    package = importlib.import_module(__package__)
    kinds: dict[str, OperatorKind] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name in _MACHINERY:
            continue
        for kind in importlib.import_module(f"{__package__}.{info.name}").OPERATORS:
            assert kind.kind not in kinds, f"operator kind {kind.kind} is defined twice"
            kinds[kind.kind] = kind
    return MappingProxyType(kinds)


KINDS: Mapping[str, OperatorKind] = _discover_kinds()
