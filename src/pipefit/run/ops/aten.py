"""aten(values...) {target, arguments, keywords, result}: one function of PyTorch, called as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipefit.errors import ModelError
from pipefit.model.graph import Operator
from pipefit.run.autograd.saved_forward import Record
from pipefit.run.ops import Context, Step
from pipefit.run.ops.elementwise import type_of
from pipefit.run.ops.shape import late_size


def function_of(target: str, where: str) -> Callable[..., Any]:
    """`aten.topk.default` -> torch.ops.aten.topk.default. Raises ModelError where this PyTorch has no such function."""
    found: Any = torch.ops
    for name in target.split("."):
        try:
            found = getattr(found, name)
        except (AttributeError, RuntimeError):
            raise ModelError(
                "PyTorch has no such function here.",
                where=where,
                seen=target,
                next_step="import the library that defines it before the run, or use the PyTorch it was captured with",
            ) from None
    return found  # type: ignore[no-any-return]


def build(operator: Operator, context: Context) -> Step:
    at = operator.attributes
    function = function_of(str(at["target"]), operator.source or "captured operator")
    result = at["result"]

    def call(record: Record, *values: Any) -> Any:
        def real(item: Any) -> Any:
            if isinstance(item, (list, tuple)):
                return [real(each) for each in item]
            if not isinstance(item, dict):
                return item
            if "input" in item:
                return values[item["input"]]
            if "size" in item:
                return late_size(item["size"], context.shard)(record)
            if "float" in item:
                return float(item["float"])
            return context.device if "device" in item else type_of(item["type"], context)

        found = function(*map(real, at["arguments"]), **{name: real(item) for name, item in at["keywords"].items()})
        return found if result is None else found[result]

    return Step(call, wants_record=True)


BUILDERS = {"aten": build}
