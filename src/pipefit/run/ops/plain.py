"""constant, expand, sum, einsum: PyTorch's own functions with attributes bound."""

from __future__ import annotations

from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.model.ops.constant import unpack_numbers
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.elementwise import torch_dtype
from pipefit.run.ops.shape import deferred_size


def build_constant(operator: Operator, context: OperatorContext) -> OperatorStep:
    shape, dtype = list(operator.attributes["shape"]), torch_dtype(operator.attributes["dtype"], context)
    values = operator.attributes["values"]
    if values == "causal":
        numbers = torch.ones(shape, dtype=torch.bool, device=context.device).tril().to(dtype)
    else:
        numbers = torch.from_numpy(unpack_numbers(values)).to(dtype).reshape(shape).to(context.device)
    return OperatorStep(lambda: numbers)


def build_expand(operator: Operator, context: OperatorContext) -> OperatorStep:
    parts = [deferred_size(size, context.shard) for size in operator.attributes["shape"]]
    return OperatorStep(lambda x, *shape: x.expand(shape), prepare=lambda record: tuple(part(record) for part in parts))


def build_sum(operator: Operator, context: OperatorContext) -> OperatorStep:
    dims, keepdim = tuple(operator.attributes["dims"]), bool(operator.attributes["keepdim"])

    def sum_dims(x: torch.Tensor) -> torch.Tensor:
        return x.sum(dims, keepdim=keepdim) if dims else x

    return OperatorStep(sum_dims)


def build_einsum(operator: Operator, context: OperatorContext) -> OperatorStep:
    equation = str(operator.attributes["equation"])

    def multiply_operands(*operands: Any) -> Any:
        return torch.einsum(equation, *(operand for operand in operands if operand is not None))

    return OperatorStep(multiply_operands)


BUILDERS = {"constant": build_constant, "expand": build_expand, "sum": build_sum, "einsum": build_einsum}
