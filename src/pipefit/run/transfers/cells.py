"""Cells for tensors between the action that makes them and the action that uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Operation = Callable[[], None]


class TensorCell:
    """A cell for one tensor in transit. `work` is the message that fills it, until it has been waited for."""

    __slots__ = ("tensor", "work")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.work: Any = None

    def await_message(self) -> None:
        """Wait for the message, if there is one."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def take_tensor(self) -> Tensor:
        """Return the tensor once it has arrived, and empty the cell."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        tensor, self.tensor = self.tensor, None
        assert tensor is not None, "a tensor was used before it was made"
        return tensor


class JointMessage:
    """Several messages that form one tensor, or into which one tensor is split; `kept` are the sent parts."""

    __slots__ = ("copies", "kept", "works")

    def __init__(
        self, works: list[Any], copies: Sequence[tuple[Tensor, Tensor]] = (), kept: Sequence[Tensor] = ()
    ) -> None:
        self.works = works
        self.copies = copies
        self.kept = kept

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for target, scratch in self.copies:
            target.copy_(scratch)
