"""Operator kinds: inputs, attributes, shapes, FLOPs, and the tensors saved for the backward pass.

Each file of this package defines one kind (or a few similar ones) in a module-level tuple `OPERATORS`; `table.py` finds
them by walking the package. `docs/reference/operators.md` states the same facts in prose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipefit.model.graph import Operator, Shape

Sizes = tuple[int, ...]

InitialKind = Literal["normal", "uniform", "ones", "zeros", "constant"]
"""How the initial value of a parameter is drawn."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of matrix products; a multiply-add is two.

    The figures reported as model FLOPs are those of PyTorch's FlopCounterMode: attention has no discount for the causal
    mask. Times are computed from `OperatorKind.executed_flops`.
    """

    forward: int = 0
    input_gradient: int = 0
    "Backward FLOPs of an I action."
    weight_gradient: int = 0
    "Backward FLOPs of a W action."

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
    """One operator with numeric sizes: the argument of the FLOP and byte formulas."""

    inputs: tuple[Sizes | None, ...]
    "Shapes of the inputs; None for an absent optional one."
    outputs: tuple[Sizes, ...]
    attributes: Mapping[str, Any]
    symbols: Mapping[str, int]
    compute_bytes: int
    "Bytes per element of the run's floating dtype."

    @property
    def wide_bytes(self) -> int:
        """Bytes of one statistic: float32, or float64 in a float64 run."""
        return max(4, self.compute_bytes)


Said = tuple[str, float, str, tuple[int, ...]]
"""A collective: (kind, bytes of the full tensor, lowering of uneven parts, units of the split dimensions), as
`cost.roofline.CollectiveTime` takes them."""


@dataclass(frozen=True, slots=True)
class InternalCollectives:
    """The collectives inside an operator that is split over the shard axis."""

    forward: tuple[Said, ...] = ()
    input_gradient: tuple[Said, ...] = ()
    weight_gradient: tuple[Said, ...] = ()


def all_reduces(size: float, times: int) -> tuple[Said, ...]:
    """Return `times` equal all-reduces of `size` bytes for an `InternalCollectives`."""
    return (("all_reduce", size, "padded", ()),) * times


def _no_flops(call: OperatorCall) -> Flops:
    return Flops()


def _save_nothing(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return ()


def _no_bytes(call: OperatorCall) -> int:
    return 0


def _no_mixing(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Shape) -> str:
    return ""


def _unknown_number(attributes: Mapping[str, Any]) -> float | None:
    return None


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
    executed_flops: Callable[[OperatorCall], Flops] | None = None
    """FLOPs that the runtime's kernels execute, from which times are predicted; None: `flops`. Fewer queries than keys
    are the last queries, unless a symbol says otherwise."""
    kernel_traffic: Callable[[OperatorCall], tuple[int, int]] | None = None
    """Bytes of intermediate results that the kernels read and write in (forward, backward), beside inputs and outputs;
    None: none."""
    kernels: Callable[[OperatorCall], tuple[int, int]] | None = None
    "Kernels issued in (forward, backward), for an operator whose many small kernels take time to issue; None: one."
    saves: Callable[[Operator, Callable[[str], bool]], tuple[str, ...]] = _save_nothing
    """Names of the inputs and outputs that the forward saves for the backward. Parameters may be named; they cost
    nothing."""
    own_bytes: Callable[[OperatorCall], int] = _no_bytes
    "Further saved bytes: statistics, keys."
    read_later: tuple[int, ...] = ()
    """Indices of inputs that later slices of the microbatch read. With slices they are kept under every recomputation
    choice."""
    own_bytes_stay: bool = False
    "Whether the own bytes are kept under selective recomputation although the kind is not a boundary."
    gathers: Mapping[int, int] = field(default_factory=dict)
    """Input index of a weight -> number of all-gathers that the operator does itself if the weight is stored sharded: 1
    (in the forward) or 2 (again for the input gradient). The gathered weight is freed at once. Weights not listed here
    are gathered once and kept."""
    named_gathers: Mapping[str, int] = field(default_factory=dict)
    "The same of further inputs, by their names in the attribute `more`."
    talks: Callable[[OperatorCall], InternalCollectives] | None = None
    "The collectives that the devices of a shard axis run inside the operator."
    pending_values: tuple[int, ...] = ()
    "Indices of inputs that a deferred weight gradient (W) holds."
    pending_gradients: bool = False
    "Whether a deferred weight gradient holds the gradient of output 0."
    pending_bytes: Callable[[OperatorCall], int] = _no_bytes
    "Further bytes that a deferred weight gradient holds."
    forward_extra: Callable[[OperatorCall], int] = _no_bytes
    "Transient bytes of the forward: alive at its peak, beside inputs, outputs and own bytes."
    backward_extra: Callable[[OperatorCall], int] = _no_bytes
    "Transient bytes of the backward, beside the gradients of outputs and inputs."
    widened_bytes: Callable[[OperatorCall], int] = _no_bytes
    """Bytes allocated to add the weight gradient if its factors are first converted to a wider dtype. CPUs do this,
    because they do not accumulate products in a wider dtype than their inputs."""
    deferred_extra: Callable[[OperatorCall], int] = _no_bytes
    "Addition to `backward_extra` if weight gradients are deferred."
    boundary: bool = False
    "Under selective recomputation the outputs and own bytes of a boundary are kept; all other values are recomputed."
    reruns: bool = False
    "Selective recomputation runs this boundary again, in a region of its own, to keep its smaller input (a gather)."
    heavy: bool = False
    "Does the work of a matrix product. A layer with fewer than two heavy operators is never fully recomputed."
    view: bool = False
    "Output 0 shares the storage of input 0."
    output_dtype: str | None = None
    "None: the dtype of input 0; else a fixed dtype; `attribute` reads the attribute `dtype`."
    is_attention: bool = False
    """Relates queries to keys and values: Megatron splits its heads (label `heads`), and its time grows with the square
    of the tokens."""
    packs_rows: bool = False
    "Attention among the tokens of one document of a packed row, so no earlier slice of the sequence is read."
    is_product: bool = False
    "A plain matrix product; with a stored weight (input 1) it may run in FP8."
    is_linear: bool = False
    "The linear layer of models: its weight (input 1) is (out, in). Adapters can be added to it."
    is_convolution: bool = False
    "A convolution: its weight has a further dimension for each dimension of its kernel."
    is_norm: bool = False
    "Normalises the last dimension, so its output is replicated wherever its input is."
    is_lookup: bool = False
    "Reads rows of a parameter (input 1) by the indices in input 0."
    scores_classes: bool = False
    "The last dimension of input 0 has a score for each class, and input 1 is the class of each row."
    multiplies: bool = False
    "Multiplies two inputs element by element; without the second, input 0 by the attribute `scalar`."
    added_number: Callable[[Mapping[str, Any]], float | None] = _unknown_number
    "Attributes -> the number added to all values of input 0, which keep their order; None: unknown."
    is_module: bool = False
    "Calls a user's module of unknown computation."
    makes_features: bool = False
    "Makes new features, which can be split although the input is replicated."
    mixes_features: bool = False
    "Combines the elements of the last dimension of input 0."
    moves_tokens: bool = False
    "Moves tokens between the rows of a sequence and a packed row."
    mixes_tokens: Callable[[Mapping[str, Any], Sequence[Shape], Shape], str] = _no_mixing
    """(attributes, shapes of the present inputs, shape of output 0) -> how an operator whose input 0 has tokens mixes
    them, in words; empty: it computes each token separately. For an operator of a plug-in, its rule says so."""
    column_label: str = ""
    "The label of the output features along which Megatron splits the columns of the weight; empty: it splits none."
    factors_kind: str = ""
    "The kind that computes the same product with gathered factors of the weight gradient; empty: none does."
    measured_as: str = ""
    "The kind with the same product on a whole layer, whose measurements apply; empty: this kind itself."
    merging_kernels: tuple[int, int] = (0, 0)
    "Additional kernels per earlier slice of the microbatch, (forward, backward)."
    initial_values: tuple[InitialKind, ...] = ()
    "The initial value of a parameter at each input; `normal` beyond the end."
    position_table: Callable[[Mapping[str, Any]], tuple[str, int]] | None = None
    """Attributes -> (key, features) of values that depend on the position alone. Operators with one key share them;
    they stay in memory during a step."""

    def count_gathers(self, operator: Operator, place: int) -> int:
        """Return the number of all-gathers that `operator` does itself of the weight at this input."""
        further = place - len(self.inputs) + 1
        if self.named_gathers and further >= 0:
            return self.named_gathers.get(operator.attributes["more"][further], 0)
        return self.gathers.get(place, 0)

    def check_inputs(self, operator: Operator) -> None:
        """Assert that `operator` has the number of inputs that the kind requires. A captured graph that fails this is a
        bug."""
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
    """Save input 0 if it needs a gradient."""
    return operator.inputs[:1] if needs_gradient(operator.inputs[0]) else ()


def save_output(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    """Save output 0 if input 0 needs a gradient."""
    return operator.outputs[:1] if needs_gradient(operator.inputs[0]) else ()
