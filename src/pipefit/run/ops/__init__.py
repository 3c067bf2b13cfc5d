"""How each operator kind is executed. One file a kind (or a family of kinds); adding one is adding a file.

Every module of this package has a table `BUILDERS`: operator kind -> builder. A builder is called once per operator
of a layer, when the stage is made, and returns a `OperatorStep`: a plain callable over tensors, with everything that is
known beforehand (parameters, attributes, the share of the device) already bound in it. So a forward pays for no
lookups: `stage_compile` writes one Python function per layer that calls the steps in order.
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


class OperatorStep(NamedTuple):
    """One executable operator: `call(*inputs)`, or `call(record, *inputs)` where `wants_record`.

    Inputs come in the order of the operator's inputs; parameters are passed as `torch.nn.Parameter`, absent
    optional inputs as None. Returns a tensor, or a tuple where the operator has several outputs. Operators that may
    stand in a pointwise region (all but the boundaries of `model.ops`) never want the record: what they need of it
    `prepare(record)` fetches, outside of the region, as a tuple that is passed behind the inputs.
    """

    call: Callable[..., Any]
    wants_record: bool = False
    prepare: Callable[[Any], tuple[Any, ...]] | None = None
    traced: Callable[..., Any] | None = None
    "What a compiler sees instead of `call`: plain PyTorch, where `call` has a derivative of its own."


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorContext:
    """What a builder may know about the place of its operator."""

    graph: Graph
    layer: int
    "Place of the layer in the stage."
    model_layer: int
    "Place of the layer in the model: part of the key of dropout."
    operator: int
    "Place of the operator in the graph."
    dtype: torch.dtype
    device: torch.device
    seed: int
    slices: int
    shard: Any = None
    "The stage's ShardContext, or None."
    modules: Mapping[str, torch.nn.Module] | None = None
    "The user's modules that could not be captured, by the key of their opaque operator."


Builder = Callable[[Operator, OperatorContext], OperatorStep]


@cache
def find_builders() -> dict[str, Builder]:
    """All operator kinds that can be executed, found by walking this package."""
    found: dict[str, Builder] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for kind, builder in module.BUILDERS.items():
            assert kind not in found, f"two modules execute {kind!r}"
            found[kind] = builder
    return found


def build_step(operator: Operator, context: OperatorContext) -> OperatorStep:
    """The step of one operator. Raises ModelError for a kind that nothing here executes."""
    known = find_builders()
    if operator.kind not in known:
        raise ModelError(
            f"The runtime cannot execute the operator {operator.kind!r}.",
            where=operator.source or f"operator {context.operator} of the layer",
            seen=operator.kind,
            allowed=", ".join(sorted(known)),
            next_step="capture the model again with this version of pipefit, or make the part an opaque operator",
        )
    return known[operator.kind](operator, context)
