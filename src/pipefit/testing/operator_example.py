"""One use of an operator, with the same computation in plain PyTorch: the subject of the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipefit.errors import ModelError
from pipefit.model.families.common import OperatorModule
from pipefit.model.graph import Graph, Operator, ParameterSpec, Shape, TensorSpec
from pipefit.model.ops import KINDS, OperatorKind
from pipefit.shard.rules import OperatorLabels, labels_of

ROWS, TOKENS = 2, 6
SYMBOLS: Mapping[str, int] = {"B": ROWS, "T": TOKENS}
"""Sizes of the examples."""

INTEGER_ROLES = ("tokens", "positions", "labels", "documents")
"""Integer inputs that the step plan names; other integers are data."""

Values = Mapping[str, Tensor | None]
"""The operands by input name; None for an absent one."""


@dataclass(frozen=True, kw_only=True)
class OperatorExample:
    """One use of an operator, with the same computation in plain PyTorch."""

    kind: str
    inputs: Mapping[str, Shape | None]
    "Shapes in the operator's input order, with the symbols B and T; None for an absent input."
    reference: Callable[..., Any]
    "The computation: takes the tensors in the order of `inputs`, returns output 0."
    attributes: Mapping[str, Any] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    "The inputs that are parameters."
    integers: Mapping[str, int] = field(default_factory=dict)
    "Integer inputs -> exclusive upper bound of their numbers."
    fixed_values: Mapping[str, Any] = field(default_factory=dict)
    "Inputs -> their numbers, where random ones are not allowed."
    positive: bool = False
    "Whether floating-point inputs are 0.5 or more."
    module: OperatorModule | None = None
    "The module that layers use, if it is to be checked. Its parameters get the values of the example."

    def __post_init__(self) -> None:
        for name in ("parameters", "integers", "fixed_values"):
            unknown = [key for key in getattr(self, name) if key not in self.inputs]
            if unknown:
                raise ModelError(
                    "An operator example names an input that it does not have.",
                    where=f"OperatorExample.{name}",
                    seen=", ".join(unknown),
                    allowed=", ".join(self.inputs),
                    next_step="give the shape of every input, parameters included, in `inputs`",
                )
        if self.module is not None and not isinstance(self.module, OperatorModule):
            name = getattr(self.module, "__name__", type(self.module).__name__)
            raise ModelError(
                "The module of an operator example is an instance of OperatorModule.",
                where="OperatorExample.module",
                seen=self.module,
                allowed=f"an instance such as {name}(...)",
            )

    @property
    def id(self) -> str:
        """A short name: the kind and its plain attributes."""
        plain = [f"{name}={value}" for name, value in self.attributes.items() if not isinstance(value, (list, Mapping))]
        return "-".join([self.kind, *plain])

    def find_kind(self) -> OperatorKind:
        """Return the kind. Raises ModelError if it is not registered."""
        if self.kind not in KINDS:
            raise ModelError(
                "The operator kind is not registered.",
                where="OperatorExample",
                seen=repr(self.kind),
                next_step="import the module that calls register_operator, or call pipefit.plugins.load_plugins()",
            )
        return KINDS[self.kind]

    def make_graph(self) -> Graph:
        """Return a layer with this operator alone. Raises ModelError for a kind that is not registered."""
        (shape,) = self.find_kind().shapes(tuple(self.inputs.values()), self.attributes)
        values = [
            TensorSpec(
                name=name,
                shape=shape,
                dtype="int64" if name in self.integers else "compute",
                role=self._role_of(name),
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
        parameters = {name: self.inputs[name] for name in self.inputs if name in self.parameters}
        return Graph(
            inputs=tuple(values),
            outputs=("y",),
            operators=(operator,),
            parameters=tuple(ParameterSpec(name=name, shape=tuple(numeric_sizes(s))) for name, s in parameters.items()),
            tensors=(TensorSpec(name="y", shape=shape),),
        )

    def _role_of(self, name: str) -> Any:
        if name not in self.integers:
            return "activation"
        return name if name in INTEGER_ROLES else "data"

    def draw_values(self, seed: int = 0) -> dict[str, Tensor | None]:
        """Return float64 or int64 numbers for all inputs."""
        generator = torch.Generator().manual_seed(seed)
        values: dict[str, Tensor | None] = {}
        for name, shape in self.inputs.items():
            if shape is None:
                values[name] = None
            elif name in self.integers:
                values[name] = torch.randint(0, self.integers[name], numeric_sizes(shape), generator=generator)
            else:
                value = torch.randn(numeric_sizes(shape), generator=generator, dtype=torch.float64)
                values[name] = value.abs() + 0.5 if self.positive else value
        return values | {name: torch.tensor(numbers) for name, numbers in self.fixed_values.items()}

    def find_labels(self) -> tuple[Operator, OperatorLabels, tuple[Shape, ...]]:
        """Return the operator, its labels and the shapes of its outputs."""
        operator, shapes = self.make_graph().operators[0], tuple(self.inputs.values())
        outputs = KINDS[self.kind].shapes(shapes, self.attributes)
        return operator, labels_of(operator, shapes, outputs), outputs

    def split_labels(self) -> list[str]:
        """Return the labels along which the operator can be split, sorted."""
        _, labelled, _ = self.find_labels()
        labels = {label for labels in labelled.inputs for label in labels or () if label}
        return sorted(labels | set(labelled.joint))


def numeric_sizes(shape: Sequence[int | str] | None) -> list[int]:
    """Return a shape with the sizes of the examples."""
    return [SYMBOLS[size] if isinstance(size, str) else size for size in shape or ()]


def as_leaves(values: Values) -> dict[str, Tensor | None]:
    """Return copies of the operands; those of floating type require a gradient."""
    return {
        name: value.clone().requires_grad_() if value is not None and value.is_floating_point() else value
        for name, value in values.items()
    }


def draw_output_gradient(shape: Sequence[int]) -> Tensor:
    """Return a float64 gradient of the result: random numbers, 1 for a loss."""
    if not shape:
        return torch.ones((), dtype=torch.float64)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
