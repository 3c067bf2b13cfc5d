"""A complete model as its user trains it: the module, example inputs, the loss and the data set. A function named by
`FILE.py:FUNCTION` may return an `Example`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Example:
    """A user's model with the example inputs that `capture_whole` exports it with."""

    module: Any
    "An nn.Module, unmodified."
    inputs: Mapping[str, Any]
    "Arguments of forward by name. Tensors have rows in front, at least two; any other value is passed unchanged."
    loss: Callable[[Any, Any], Any] | None = None
    "loss(result of forward, labels), a sum or a mean over rows; None: forward returns the loss (or has it as `.loss`)."
    labels: str = "labels"
    "With `loss`: the input that is passed to the loss instead of to forward."
    dataset: Any = None
    """The training data for `pipefit train`: any object with a length and items by index, like
    torch.utils.data.Dataset, or a function without arguments that makes one. An item is one row without the row
    dimension: a mapping by the names of `inputs`, or a tuple in their order. Equal indices must give equal items on
    every rank."""
    roles: Mapping[str, str] = field(default_factory=dict)
    "Role (tokens, positions, labels) of an input by name. By default an input has the role that its name says."
