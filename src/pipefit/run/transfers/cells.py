"""Where tensors wait between the action that makes them and the action that uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Operation = Callable[[], None]


class TensorCell:
    """A place for one tensor on its way. `work` is the message that fills it, until somebody has waited for it."""

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
        """The tensor, once it has arrived; the cell lets go of it."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        tensor, self.tensor = self.tensor, None
        assert tensor is not None, "a tensor was used before it was made"
        return tensor


class JointMessage:
    """Several messages that make up one tensor, or that one tensor is cut into; `kept` is what they send."""

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
