"""The registry of operator kinds: every `OPERATORS` tuple in the modules of this package, and operators of plug-ins."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pipefit.errors import ModelError
from pipefit.model.ops.kind import OperatorKind
from pipefit.plugins import NamedRegistry

_MACHINERY = {"kind", "table"}


class OperatorPlugin(NamedTuple):
    """An operator that is defined outside of pipefit."""

    kind: OperatorKind
    rule: Callable[..., Any]
    "The splits of the operator: a `pipefit.shard.rules.Rule`."
    builder: str
    "The module whose function `build` is a `pipefit.run.ops.Builder`. It may import torch."


def register_operator(kind: OperatorKind, *, rule: Callable[..., Any], builder: str) -> OperatorKind:
    """Add an operator kind with its splits and its execution, and return the kind.

    `rule` is a `pipefit.shard.rules.Rule`. `builder` names a module whose function `build(operator, context)` is a
    `pipefit.run.ops.Builder`; the module is imported only to run the operator. Raises ModelError for a name that
    another kind has.
    """
    if kind.kind in _KINDS and kind.kind not in PLUGINS:
        raise ModelError(
            "An operator kind has the name of a built-in one.",
            seen=repr(kind.kind),
            allowed=f"a name other than {', '.join(sorted(_KINDS))}",
        )
    PLUGINS.add_entry(kind.kind, OperatorPlugin(kind, rule, builder))
    _KINDS[kind.kind] = kind
    return kind


def remove_operator(name: str) -> None:
    """Remove an operator of a plug-in, for tests."""
    PLUGINS.remove_entry(name)
    del _KINDS[name]


def _discover_kinds() -> dict[str, OperatorKind]:
    package = importlib.import_module(__package__)
    kinds: dict[str, OperatorKind] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name in _MACHINERY:
            continue
        for kind in importlib.import_module(f"{__package__}.{info.name}").OPERATORS:
            assert kind.kind not in kinds, f"operator kind {kind.kind} is defined twice"
            kinds[kind.kind] = kind
    return kinds


_KINDS = _discover_kinds()

KINDS: Mapping[str, OperatorKind] = MappingProxyType(_KINDS)
"""Every operator kind by its name."""

PLUGINS: NamedRegistry[OperatorPlugin] = NamedRegistry("operator kinds", error=ModelError)
"""The operators of plug-ins by name."""
