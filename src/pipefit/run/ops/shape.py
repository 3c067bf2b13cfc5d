"""reshape, transpose, slice, concat: views and copies. Sizes are bound once; B and T are read at run time."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from pipefit.model.graph import LOCAL, Operator, Size
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.sharded.parts import ShardContext


def build_reshape(operator: Operator, context: OperatorContext) -> OperatorStep:
    sizes = list(operator.attributes["shape"])
    if all(isinstance(size, int) for size in sizes):
        fixed = tuple(sizes)
        return OperatorStep(lambda x: x.reshape(fixed))
    if sizes[:2] == ["B", "T"] and all(isinstance(size, int) for size in sizes[2:]):
        rest = tuple(sizes[2:])
        prepare = attrgetter("rows", "tokens")
        return OperatorStep(lambda x, rows, tokens: x.reshape((rows, tokens, *rest)), prepare=prepare)
    parts = [deferred_size(size, context.shard) for size in sizes]
    return OperatorStep(
        lambda x, *shape: x.reshape(shape), prepare=lambda record: tuple(part(record) for part in parts)
    )


_WHOLE = {"B": "rows", "T": "tokens", "I": "image_tokens", "L": "condition_tokens"}
_NAMES = {**_WHOLE, **{part: _WHOLE[str(symbol)] for symbol, part in LOCAL.items()}}
"""Symbol -> attribute of the record with its global size."""


def deferred_size(size: Size, shard: ShardContext | None) -> Callable[[SavedForward], int]:
    """Return a function that evaluates a size for a record. A size is a product of integers, of symbols in `_NAMES`,
    and of local parts of those by the shares of this device's layer."""
    factors = str(size).split("*")
    fixed = math.prod(int(factor) for factor in factors if factor.isdigit())
    late = [(_NAMES[factor], factor in LOCAL.values()) for factor in factors if not factor.isdigit()]

    def evaluate_size(record: SavedForward) -> int:
        result = fixed
        for name, part in late:
            length = getattr(record, name)
            result *= shard.length(length) if part and shard is not None else length
        return result

    return evaluate_size


def build_transpose(operator: Operator, context: OperatorContext) -> OperatorStep:
    dims = tuple(operator.attributes["dims"])
    return OperatorStep(lambda x: x.permute(dims))


def build_slice(operator: Operator, context: OperatorContext) -> OperatorStep:
    dim = int(operator.attributes["dim"])
    start = deferred_size(operator.attributes["start"], context.shard)
    stop = deferred_size(operator.attributes["stop"], context.shard)

    def take_slice(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return x.narrow(dim, first, last - first)

    return OperatorStep(take_slice, prepare=lambda record: (start(record), stop(record)))


def build_concat(operator: Operator, context: OperatorContext) -> OperatorStep:
    dim = int(operator.attributes["dim"])

    def concat_tensors(*tensors: Any) -> torch.Tensor:
        return torch.cat(tensors, dim)

    return OperatorStep(concat_tensors)


BUILDERS = {
    "reshape": build_reshape,
    "transpose": build_transpose,
    "slice": build_slice,
    "concat": build_concat,
}
