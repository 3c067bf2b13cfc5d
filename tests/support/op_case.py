"""One example of an operator kind for the conformance tests: `op_cases.py` and `image_cases.py` have them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pipefit.model.graph import Graph, Operator, ParameterSpec, TensorSpec
from pipefit.model.ops import KINDS

ROWS, TOKENS = 2, 6
SYMBOLS = {"B": ROWS, "T": TOKENS}


@dataclass(frozen=True)
class OpCase:
    """Inputs by name in the operator's order: shapes with the symbols B and T. `plain` takes them in that order."""

    kind: str
    inputs: Mapping[str, tuple[Any, ...] | None]
    plain: Callable[..., torch.Tensor]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    integers: Mapping[str, int] = field(default_factory=dict)
    "Inputs from the step plan: role -> exclusive upper bound of their numbers."

    @property
    def id(self) -> str:
        extra = "-".join(
            f"{k}={v}"
            for k, v in self.attributes.items()
            if k not in ("shape", "dims", "scaling", "arguments", "keywords")
        )
        return f"{self.kind}-{extra}" if extra else self.kind

    def graph(self) -> Graph:
        shapes = tuple(self.inputs.values())
        outputs = KINDS[self.kind].shapes(shapes, self.attributes)
        values = [
            TensorSpec(
                name=name,
                shape=shape,
                dtype="int64" if name in self.integers else "compute",
                role=name if name in self.integers else "activation",
            )
            for name, shape in self.inputs.items()
            if shape is not None and name not in self.parameters
        ]
        operator = Operator(
            kind=self.kind,
            inputs=tuple(name if shape is not None else "" for name, shape in self.inputs.items()),
            outputs=("y",),
            attributes=self.attributes,
        )
        return Graph(
            inputs=tuple(values),
            outputs=("y",),
            operators=(operator,),
            parameters=tuple(ParameterSpec(name=n, shape=self.inputs[n]) for n in self.inputs if n in self.parameters),
            tensors=(TensorSpec(name="y", shape=outputs[0]),),
        )

    def values(self, seed: int = 0) -> dict[str, torch.Tensor | None]:
        """Random numbers for all inputs, float64 or int64."""
        generator = torch.Generator().manual_seed(seed)
        result: dict[str, torch.Tensor | None] = {}
        for name, shape in self.inputs.items():
            if shape is None:
                result[name] = None
                continue
            numbers = [SYMBOLS.get(size, size) for size in shape]
            if name == "positions" and self.kind == "rotary":
                result[name] = torch.arange(3, 3 + TOKENS).expand(*numbers).contiguous()
            elif name in self.integers:
                result[name] = torch.randint(0, self.integers[name], numbers, generator=generator)
            else:
                value = torch.randn(numbers, generator=generator, dtype=torch.float64)
                result[name] = value.abs() + 0.5 if self.kind in ("rsqrt", "div") else value
        return result
