"""aten(values...) {target, arguments, keywords, result}: one PyTorch function, called unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipefit.errors import ModelError
from pipefit.model.graph import Operator
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.elementwise import torch_dtype
from pipefit.run.ops.shape import deferred_size


def aten_function(target: str, where: str) -> Callable[..., Any]:
    """`aten.topk.default` -> torch.ops.aten.topk.default. Raises ModelError if this PyTorch has no such function."""
    resolved: Any = torch.ops
    for name in target.split("."):
        try:
            resolved = getattr(resolved, name)
        except (AttributeError, RuntimeError):
            raise ModelError(
                "PyTorch has no such function here.",
                where=where,
                seen=target,
                next_step="import the library that defines it before the run, or use the PyTorch it was captured with",
            ) from None
    return resolved  # type: ignore[no-any-return]


def build_aten(operator: Operator, context: OperatorContext) -> OperatorStep:
    attributes = operator.attributes
    function = aten_function(str(attributes["target"]), operator.source or "captured operator")
    result = attributes["result"]

    def call_function(record: SavedForward, *values: Any) -> Any:
        def real_value(item: Any) -> Any:
            if isinstance(item, (list, tuple)):
                return [real_value(element) for element in item]
            if not isinstance(item, dict):
                return item
            if "input" in item:
                return values[item["input"]]
            if "size" in item:
                return deferred_size(item["size"], context.shard)(record)
            if "float" in item:
                return float(item["float"])
            return context.device if "device" in item else torch_dtype(item["type"], context)

        outputs = function(
            *map(real_value, attributes["arguments"]),
            **{name: real_value(item) for name, item in attributes["keywords"].items()},
        )
        return outputs if result is None else outputs[result]

    return OperatorStep(call_function, wants_record=True)


BUILDERS = {"aten": build_aten}
