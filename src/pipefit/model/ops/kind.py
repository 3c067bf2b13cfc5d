"""What an operator kind is: its inputs, attributes, shapes, FLOPs, and what it keeps for the backward pass.

Each file of this package defines one kind (or a few alike) in a module-level tuple `OPERATORS`; the registry in
`__init__.py` finds them by walking the package. `docs/operators.md` states the same facts for people.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipefit.model.graph import Operator, Shape

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations, a multiply-add counted as two, as PyTorch's FlopCounterMode counts them:
    matrix products only, and attention without a discount for the causal mask."""

    forward: int = 0
    input_gradient: int = 0
    "The part of the backward pass that an I action does."
    weight_gradient: int = 0
    "The part that a W action does."

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )

    @property
    def total_flops(self) -> int:
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator with numbers for its sizes: what the FLOP and byte formulas read."""

    inputs: tuple[Sizes | None, ...]
    "Shapes of the inputs; None for an absent optional one."
    outputs: tuple[Sizes, ...]
    attributes: Mapping[str, Any]
    symbols: Mapping[str, int]
    compute_bytes: int
    "Bytes of one number of the run's floating type."

    @property
    def wide_bytes(self) -> int:
        """Bytes of a statistic: float32, or float64 where the run computes in float64."""
        return max(4, self.compute_bytes)


Said = tuple[str, float, str, tuple[int, ...]]
"""A collective: (kind, bytes of the whole tensor, how uneven parts are moved, units of the split dimensions), as
`cost.roofline.CollectiveTime` takes them."""


@dataclass(frozen=True, slots=True)
class InternalCollectives:
    """The collectives that an operator of which every device computes a part does inside."""

    forward: tuple[Said, ...] = ()
    input_gradient: tuple[Said, ...] = ()
    weight_gradient: tuple[Said, ...] = ()


def all_reduces(size: float, times: int) -> tuple[Said, ...]:
    """So many all-reduces, as a Talk has them."""
    return (("all_reduce", size, "padded", ()),) * times


def _no_flops(call: OperatorCall) -> Flops:
    return Flops()


def _save_nothing(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return ()


def _no_bytes(call: OperatorCall) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorKind:
    """One kind of operator. All functions are pure."""

    kind: str
    summary: str
    inputs: tuple[str, ...]
    "Names in order; a trailing `?` marks an optional one (absent: ''), a trailing `*` any number."
    attributes: Mapping[str, str] = field(default_factory=dict)
    "Name -> meaning."
    shapes: Callable[[tuple[Shape | None, ...], Mapping[str, Any]], tuple[Shape, ...]]
    "Output shapes from input shapes and attributes."
    flops: Callable[[OperatorCall], Flops] = _no_flops
    saves: Callable[[Operator, Callable[[str], bool]], tuple[str, ...]] = _save_nothing
    "Names of the inputs and outputs that the forward keeps for the backward. Parameters may be named; they are free."
    own_bytes: Callable[[OperatorCall], int] = _no_bytes
    "Bytes kept beside those: statistics, keys."
    read_later: tuple[int, ...] = ()
    "Indices of inputs that later slices of the microbatch read: kept whatever is recomputed, where there are slices."
    own_bytes_stay: bool = False
    "Whether these stay under selective recomputation although the kind is no boundary."
    gathers: Mapping[int, int] = field(default_factory=dict)
    "Weights (indices of inputs) that the operator gathers for itself where they are stored split: once, in the"
    " forward, or twice, for the input gradient again. It lets go of them at once; others are gathered once and kept."
    talks: Callable[[OperatorCall], InternalCollectives] | None = None
    "What the devices of a shard axis say to each other inside the operator."
    pending_values: tuple[int, ...] = ()
    "Indices of inputs that a pending W holds."
    pending_gradients: bool = False
    "Whether a pending W holds the gradient of output 0."
    pending_bytes: Callable[[OperatorCall], int] = _no_bytes
    "Bytes that a pending W holds beside those."
    forward_extra: Callable[[OperatorCall], int] = _no_bytes
    "Bytes that the forward allocates for itself: alive at its worst moment beside inputs, outputs and own bytes."
    backward_extra: Callable[[OperatorCall], int] = _no_bytes
    "The same of the backward, beside the gradients of outputs and inputs."
    widened_bytes: Callable[[OperatorCall], int] = _no_bytes
    "What adding the weight gradient allocates where its factors are made wider first: on processors, which do not sum"
    " products in a wider type than theirs."
    deferred_extra: Callable[[OperatorCall], int] = _no_bytes
    "What is added to that where weight gradients are put off."
    boundary: bool = False
    "Under selective recomputation the outputs and own bytes of a boundary stay; all else is made again."
    heavy: bool = False
    "Does the work of a matrix product: a layer with fewer than two such operators is never fully recomputed."
    view: bool = False
    "Output 0 shares the storage of input 0."
    output_dtype: str | None = None
    "None: the dtype of input 0; else a fixed dtype; `attribute` reads the attribute `dtype`."

    def check_inputs(self, operator: Operator) -> None:
        """Assert that `operator` has as many inputs as the kind allows: a graph of ours that does not is our bug."""
        if any(name.endswith("*") for name in self.inputs):
            return
        assert len(operator.inputs) == len(self.inputs), f"{self.kind} takes {self.inputs}, not {operator.inputs}"
        for name, value in zip(self.inputs, operator.inputs, strict=True):
            assert value or name.endswith("?"), f"input {name} of {self.kind} is absent ({operator})"


def same_shape(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    """Output 0 has the shape of input 0."""
    assert inputs[0] is not None
    return (inputs[0],)


def save_input(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    """Keep input 0 where a gradient flows through it."""
    return operator.inputs[:1] if needs_gradient(operator.inputs[0]) else ()


def save_output(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    """Keep output 0 where a gradient flows through it."""
    return operator.outputs[:1] if needs_gradient(operator.inputs[0]) else ()
