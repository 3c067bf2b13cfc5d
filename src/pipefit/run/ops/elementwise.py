"""Pointwise operators and products of plain tensors: PyTorch's own functions, with attributes bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from pipefit.model.graph import Operator
from pipefit.run.ops import OperatorContext, OperatorStep


def build_binary(function: Callable[..., Any]) -> Callable[[Operator, OperatorContext], OperatorStep]:
    """Return a builder for function(a, b), where b may be the attribute `scalar`."""

    def build_call(operator: Operator, context: OperatorContext) -> OperatorStep:
        if operator.inputs[1:] in ((), ("",)):
            scalar = operator.attributes["scalar"]
            return OperatorStep(lambda a, b=None: function(a, scalar))
        return OperatorStep(function)

    return build_call


def build_unary(function: Callable[..., Any]) -> Callable[[Operator, OperatorContext], OperatorStep]:
    """Return a builder for function(x)."""
    return lambda operator, context: OperatorStep(function)


def build_gelu(operator: Operator, context: OperatorContext) -> OperatorStep:
    approximate = operator.attributes.get("approximate", "none")
    return OperatorStep(lambda x: functional.gelu(x, approximate=approximate))


def build_softmax(operator: Operator, context: OperatorContext) -> OperatorStep:
    dim = int(operator.attributes["dim"])
    return OperatorStep(lambda x: torch.softmax(x, dim))


def build_cast(operator: Operator, context: OperatorContext) -> OperatorStep:
    dtype = torch_dtype(operator.attributes["dtype"], context)
    return OperatorStep(lambda x: x.to(dtype))


def torch_dtype(name: str, context: OperatorContext) -> torch.dtype:
    """Return the torch dtype of a graph's number type: `float32` is float32 or wider."""
    dtype: torch.dtype = context.dtype if name == "compute" else getattr(torch, name)
    return torch.float64 if dtype == torch.float32 and context.dtype == torch.float64 else dtype


BUILDERS = {
    "add": build_binary(torch.add),
    "sub": build_binary(torch.sub),
    "mul": build_binary(torch.mul),
    "div": build_binary(torch.div),
    "matmul": build_unary(torch.matmul),
    "silu": build_unary(functional.silu),
    "relu": build_unary(torch.relu),
    "sigmoid": build_unary(torch.sigmoid),
    "tanh": build_unary(torch.tanh),
    "neg": build_unary(torch.neg),
    "rsqrt": build_unary(torch.rsqrt),
    "exp": build_unary(torch.exp),
    "gelu": build_gelu,
    "softmax": build_softmax,
    "cast": build_cast,
}
