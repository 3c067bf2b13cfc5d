"""The protocol of optimizers. One file holds all facts of an optimizer: options, state, memory traffic, update.

The planner reads the state and the traffic, which need no torch. The runtime makes an `OptimizerState` for every flat
piece that a rank updates. The classes here allocate the state that the optimizer declares, so the planned bytes are the
bytes of the run. `register_optimizer` adds an optimizer, also from outside the package
(docs/how-to/add-an-optimizer.md).
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipefit.errors import PlanError, RunError, suggest_name
from pipefit.layout import Box, Run
from pipefit.plugins import NamedRegistry, missing_plugin_advice

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TensorShape = tuple[int, ...]

DEFAULT = "adamw"
"""The optimizer of a job that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """The options that every optimizer has. A subclass adds its options, with their defaults and limits."""

    lr: float = 1e-3
    "Peak learning rate."
    weight_decay: float = 0.0
    "Parameters with one dimension (norms, biases) are not decayed."

    def option_limits(self) -> Mapping[str, tuple[bool, str]]:
        """Return option -> (True if its value is allowed, the allowed values in words)."""
        return {
            "lr": (self.lr > 0, "a number above 0"),
            "weight_decay": (self.weight_decay >= 0, "a number, 0 or more"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """The facts of one optimizer, from which memory, times and runs follow."""

    name: str
    "The name that users type, and that plans contain."
    summary: str
    "One line for the help and the report."
    options: type[OptimizerOptions]
    state: Callable[[OptimizerKind, FlatPiece, Any], OptimizerState]
    "Builds the state of one flat piece: a subclass of `ElementwiseState` or `OptimizerState`."
    moments: tuple[str, ...] = ()
    "Names of the state tensors with one element per parameter element. ZeRO-1 shards them evenly over the replicas."
    shared_state: Callable[[TensorShape], Mapping[str, TensorShape]] = lambda shape: {}
    """Global shape of a parameter -> shapes of its other state tensors. Every device that holds a part of the parameter
    keeps all of them."""
    gradient_reads: int = 1
    "Times that the update reads the gradient."
    temporaries: int = 1
    "Tensors of an update's run of elements that exist at once beside the state."

    @property
    def title(self) -> str:
        """The name as the field spells it: `AdamW`."""
        return self.summary.partition(":")[0]

    def element_state_bytes(self, width: int, has_master: bool) -> int:
        """Return the bytes of state per parameter element that ZeRO-1 shards.

        `width` is the size of a state element in bytes. With a master, the parameter has a copy of this width.
        """
        return width * (len(self.moments) + has_master)

    def shared_state_bytes(self, shape: TensorShape, width: int) -> int:
        """Return the bytes of state of a parameter of this global shape that every device keeps."""
        return width * sum(math.prod(size) for size in self.shared_state(shape).values())


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """The elements of one parameter in a flat piece."""

    name: str
    shape: TensorShape
    "Global shape."
    box: Box
    "The part of the parameter on this device."
    local: Run
    "The run of the box's elements (row-major) that the piece contains."
    place: Run
    "The same run, within the piece."


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPiece:
    """The flat run of parameter elements that one rank updates together, and its place among all ranks."""

    parameter: Tensor
    "The elements, one-dimensional and contiguous: a view into the parameters of the stage."
    master_dtype: torch.dtype
    decays: bool
    "True if weight decay applies."
    shapes: Mapping[str, TensorShape]
    "Global shapes of all parameters of the bucket, also of those without elements in this piece."
    parts: tuple[ParameterPart, ...] = ()
    sum_parts: Callable[[Tensor], None] = lambda values: None
    "Sums a tensor, in place, over all pieces that together hold these parameters once. All ranks call it together."


class OptimizerState(ABC):
    """The state of one flat piece, and its update in place.

    If `piece.master_dtype` differs from the parameter's dtype, `master` is a separate copy in that dtype; else `master`
    is the piece itself.
    """

    def __init__(self, optimizer: OptimizerKind, piece: FlatPiece, options: Any) -> None:
        assert piece.parameter.dim() == 1 and piece.parameter.is_contiguous()
        self.options = options
        self.decay = options.weight_decay if piece.decays else 0.0
        self.parameter = piece.parameter.detach()
        self.master = self.parameter.to(piece.master_dtype)  # the same tensor if the dtype is the same
        empty = self.master.new_zeros
        self.moments = {name: empty(self.master.shape) for name in optimizer.moments}
        "Flat, with the elements of the piece."
        self.shared = {
            (state, name): empty(size)
            for name, shape in piece.shapes.items()
            for state, size in optimizer.shared_state(shape).items()
        }
        "(name of the state tensor, name of the parameter) -> the tensor, of its global shape."

    @property
    def has_master(self) -> bool:
        """True if the master copy is separate from the parameter."""
        return self.master is not self.parameter

    @abstractmethod
    def step(self, gradient: Tensor, lr: float, count: int) -> None:
        """Update with `gradient` (flat, of the master's dtype or a narrower one) and the learning rate of this step.

        `count` is the number of updates, including this one. The gradient is not changed.
        """

    def round_master(self) -> None:
        """Round the master copy into the parameter."""
        if self.has_master:
            self.parameter.copy_(self.master)


class ElementwiseState(OptimizerState):
    """The state of an optimizer that updates each element by itself: runs of elements, one after the other."""

    def step(self, gradient: Tensor, lr: float, count: int) -> None:
        size = self.run_elements(gradient)
        for start in range(0, self.master.numel(), size):
            run = slice(start, start + size)
            moments = {name: tensor[run] for name, tensor in self.moments.items()}
            self.update_run(self.master[run], gradient[run].to(self.master.dtype), moments, lr, count)
        self.round_master()

    def run_elements(self, gradient: Tensor) -> int:
        """Return the number of elements to update at a time: all, if an update has no temporary tensors."""
        return update_elements(self.master.device)

    @abstractmethod
    def update_run(self, value: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], lr: float, count: int) -> None:
        """Update a run of elements in place, with the same run of the gradient and of each moment."""


def update_elements(device: torch.device) -> int:
    """Return the number of elements that the norm and an update process at a time. It bounds their temporary memory:
    128 MiB on CUDA, with few kernels; 2 MiB on a CPU, which stay in the cache."""
    return 1 << (24 if device.type == "cuda" else 18)


OPTIMIZERS: NamedRegistry[OptimizerKind] = NamedRegistry("optimizers", error=PlanError)
"""Every registered optimizer by its name."""


def register_optimizer(optimizer: OptimizerKind) -> OptimizerKind:
    """Add an optimizer to `OPTIMIZERS`, and return it. Raises PlanError if another one has its name."""
    return OPTIMIZERS.add_entry(optimizer.name, optimizer)


def find_optimizer(name: str, where: str = "job.optimizer") -> OptimizerKind:
    """Return the optimizer of this name. Raises PlanError that lists the known names."""
    if name not in OPTIMIZERS:
        typed = where != "job.optimizer"
        raise PlanError(
            "The optimizer is unknown.",
            where=where,
            seen=repr(name),
            allowed=", ".join(sorted(OPTIMIZERS)),
            next_step=(suggest_name(name, OPTIMIZERS) if typed else None)
            or f"{missing_plugin_advice()}; a script calls `register_optimizer` in every process",
        )
    return OPTIMIZERS[name]


def read_options(optimizer: OptimizerKind, values: Mapping[str, float]) -> OptimizerOptions:
    """Return the optimizer's options with these values in place of the defaults. A switch takes 0 or 1.

    Raises RunError for an option that the optimizer does not have, and for a value outside its limits.
    """
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(optimizer.options)}
    for name in values:
        if name not in defaults:
            raise RunError(
                f"The optimizer {optimizer.name} has no such option.",
                where="--optimizer-option",
                seen=name,
                allowed=", ".join(f"{key}={value}" for key, value in defaults.items()),
                next_step=suggest_name(name, defaults),
            )
    typed = {name: type(defaults[name])(value) for name, value in values.items()}
    options = optimizer.options(**typed)
    for name, (good, allowed) in options.option_limits().items():
        value = getattr(options, name)
        if not good or not math.isfinite(value):
            raise RunError("The optimizer cannot run with this.", where=option_text(name), seen=value, allowed=allowed)
    return options


def option_text(name: str) -> str:
    """Return the spelling of an option on the command line."""
    common = {field.name for field in dataclasses.fields(OptimizerOptions)}
    return f"--{name.replace('_', '-')}" if name in common else f"--optimizer-option {name}"
