"""Execution of each operator kind. One file holds a kind or a family of kinds; a new kind is a new file.

Every module of this package has a table `BUILDERS`: operator kind -> builder. A builder is called once per operator of
a layer, when the stage is made. It returns an `OperatorStep`: a plain callable over tensors in which everything known
beforehand (parameters, attributes, the device's shard) is already bound. A forward therefore does no lookups:
`stage.compile` writes one Python function per layer that calls the steps in order.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from pipefit.errors import ModelError
from pipefit.model.graph import Graph, Operator
from pipefit.model.ops.table import PLUGINS
from pipefit.plugins import call_plugin


class OperatorStep(NamedTuple):
    """One executable operator: `call(*inputs)`, or `call(record, *inputs)` if `wants_record`.

    Inputs come in the order of the operator's inputs; parameters are passed as `torch.nn.Parameter`, absent optional
    inputs as None. Returns a tensor, or a tuple for an operator with several outputs. An operator inside a region (any
    but the boundaries of `model.ops` that never run again) never takes the record. Instead `prepare(record)` runs
    outside of the region and returns the needed values as a tuple, which is passed after the inputs.
    """

    call: Callable[..., Any]
    wants_record: bool = False
    prepare: Callable[[Any], tuple[Any, ...]] | None = None
    traced: Callable[..., Any] | None = None
    "Replacement of `call` for a compiler: plain PyTorch, for a `call` with a derivative of its own."


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorContext:
    """Facts about an operator's position and device that its builder may use."""

    graph: Graph
    layer: int
    "Index of the layer in the stage."
    model_layer: int
    "Index of the layer in the model: part of the key of dropout."
    operator: int
    "Index of the operator in the graph."
    dtype: torch.dtype
    device: torch.device
    seed: int
    slices: int
    shard: Any = None
    "The stage's ShardContext, or None."
    sequence: Any = None
    "The stage's ShardContext along its context axis, whose devices hold parts of each sequence; or None."
    experts: Any = None
    "The stage's ShardContext over its expert axis and its shards together, which divide experts; or None."
    products: str = ""
    "`fp8`: linear layers of blocks multiply in FP8. Any other name: in `dtype`."
    modules: Mapping[str, torch.nn.Module] | None = None
    "The user's modules that could not be captured, by the key of their opaque operator."


Builder = Callable[[Operator, OperatorContext], OperatorStep]


@cache
def find_builders() -> dict[str, Builder]:
    """Return the builders of the built-in operator kinds, found by walking this package."""
    builders: dict[str, Builder] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for kind, builder in module.BUILDERS.items():
            assert kind not in builders, f"two modules execute {kind!r}"
            builders[kind] = builder
    return builders


def _plugin_builder(operator: Operator) -> Builder:
    """Return the builder of a plug-in's operator. Raises ModelError if its module cannot be imported."""
    module = PLUGINS[operator.kind].builder
    try:
        builder: Builder = importlib.import_module(module).build
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"The operator {operator.kind!r} of a plug-in cannot be executed.",
            where=operator.source or operator.kind,
            seen=f"{type(error).__name__}: {error}",
            allowed=f"a module {module} with a function build(operator, context)",
        ) from error
    return builder


def build_step(operator: Operator, context: OperatorContext) -> OperatorStep:
    """Return the step of one operator. Raises ModelError for a kind without a builder, and PluginError if the builder
    of a plug-in fails or returns another type."""
    builder = find_builders().get(operator.kind)
    if builder is None and operator.kind in PLUGINS:
        subject = PLUGINS.describe_entry(operator.kind)
        return call_plugin(subject, _plugin_builder(operator), operator, context, returns=OperatorStep)
    if builder is None:
        raise ModelError(
            f"The runtime cannot execute the operator {operator.kind!r}.",
            where=operator.source or f"operator {context.operator} of the layer",
            seen=operator.kind,
            allowed=", ".join(sorted((*find_builders(), *PLUGINS))),
            next_step="capture the model again with this version of pipefit, or make the part an opaque operator",
        )
    return builder(operator, context)
