"""A whole model as its user trains it: the module, example inputs, the loss, the data. What `FILE.py:FUNCTION` may
return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Example:
    """What `capture_whole` needs to know of a model."""

    module: Any
    "An nn.Module, unmodified."
    inputs: Mapping[str, Any]
    "Arguments of forward by name. Tensors have rows in front, at least two; anything else is passed as it is."
    loss: Callable[[Any, Any], Any] | None = None
    "loss(what forward returns, labels), a sum or a mean over rows; None: forward returns it (or has it as `.loss`)."
    labels: str = "labels"
    "With `loss`: which of the inputs is for it, and not for forward."
    dataset: Any = None
    """What `pipefit train` feeds: anything with a length and items by number, as torch.utils.data.Dataset has them, or
    a function without arguments that makes it. An item is one row, without the dimension of rows: a mapping by the
    names of `inputs`, or a tuple in their order. Equal numbers must give equal items on every rank."""
    roles: Mapping[str, str] = field(default_factory=dict)
    "Inputs that the step plan gives (tokens, positions, labels); by default those that are called so."
