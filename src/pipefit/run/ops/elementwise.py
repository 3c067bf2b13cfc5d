"""Pointwise operators and products of plain tensors: PyTorch's own functions, with attributes bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from pipefit.model.graph import Operator
from pipefit.run.ops import Context, Step


def binary(function: Callable[..., Any]) -> Callable[[Operator, Context], Step]:
    """A builder for function(a, b), where b may be the attribute `scalar`."""

    def build(operator: Operator, context: Context) -> Step:
        if operator.inputs[1:] in ((), ("",)):
            scalar = operator.attributes["scalar"]
            return Step(lambda a, b=None: function(a, scalar))
        return Step(function)

    return build


def unary(function: Callable[..., Any]) -> Callable[[Operator, Context], Step]:
    """A builder for function(x)."""
    return lambda operator, context: Step(function)


def build_gelu(operator: Operator, context: Context) -> Step:
    approximate = operator.attributes.get("approximate", "none")
    return Step(lambda x: functional.gelu(x, approximate=approximate))


def build_softmax(operator: Operator, context: Context) -> Step:
    dim = int(operator.attributes["dim"])
    return Step(lambda x: torch.softmax(x, dim))


def build_cast(operator: Operator, context: Context) -> Step:
    dtype = type_of(operator.attributes["dtype"], context)
    return Step(lambda x: x.to(dtype))


def type_of(name: str, context: Context) -> torch.dtype:
    """The torch dtype of a graph's number type: `float32` is float32 or wider."""
    dtype: torch.dtype = context.dtype if name == "compute" else getattr(torch, name)
    return torch.float64 if dtype == torch.float32 and context.dtype == torch.float64 else dtype


BUILDERS = {
    "add": binary(torch.add),
    "sub": binary(torch.sub),
    "mul": binary(torch.mul),
    "div": binary(torch.div),
    "matmul": unary(torch.matmul),
    "silu": unary(functional.silu),
    "relu": unary(torch.relu),
    "sigmoid": unary(torch.sigmoid),
    "tanh": unary(torch.tanh),
    "neg": unary(torch.neg),
    "rsqrt": unary(torch.rsqrt),
    "exp": unary(torch.exp),
    "gelu": build_gelu,
    "softmax": build_softmax,
    "cast": build_cast,
}
