"""constant, expand, sum, einsum: PyTorch's own functions with attributes bound."""

from __future__ import annotations

from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.run.ops import Context, Step
from pipefit.run.ops.elementwise import type_of
from pipefit.run.ops.shape import late_size


def build_constant(operator: Operator, context: Context) -> Step:
    shape, dtype = list(operator.attributes["shape"]), type_of(operator.attributes["dtype"], context)
    values = operator.attributes["values"]
    if values == "causal":
        numbers = torch.ones(shape, dtype=torch.bool, device=context.device).tril().to(dtype)
    else:
        numbers = torch.tensor(values, dtype=torch.float64).to(dtype).reshape(shape).to(context.device)
    return Step(lambda: numbers)


def build_expand(operator: Operator, context: Context) -> Step:
    parts = [late_size(size, context.shard) for size in operator.attributes["shape"]]
    return Step(lambda x, *shape: x.expand(shape), prepare=lambda record: tuple(part(record) for part in parts))


def build_sum(operator: Operator, context: Context) -> Step:
    dims, keepdim = tuple(operator.attributes["dims"]), bool(operator.attributes["keepdim"])

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(dims, keepdim=keepdim) if dims else x

    return Step(total)


def build_einsum(operator: Operator, context: Context) -> Step:
    equation = str(operator.attributes["equation"])

    def product(*operands: Any) -> Any:
        return torch.einsum(equation, *(operand for operand in operands if operand is not None))

    return Step(product)


BUILDERS = {"constant": build_constant, "expand": build_expand, "sum": build_sum, "einsum": build_einsum}
