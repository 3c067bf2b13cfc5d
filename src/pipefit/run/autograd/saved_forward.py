"""State that one forward saves for its backward: autograd segments, deferred weight gradients, earlier slices.

One `SavedForward` lives from F until B, or from F until W. A deferred weight gradient holds only the input and the
output gradient of one linear layer, and releases them as soon as W has used them (zero bubble pipelines split the
backward into input and weight gradients).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pipefit.run.stage_inputs import StageInputs


class DeferredGradient(NamedTuple):
    """One weight gradient that W will compute: `accumulate(*tensors)` adds it to its buffer."""

    layer: int
    accumulate: Callable[..., None]
    tensors: tuple[Any, ...]


class SavedSegment(NamedTuple):
    """One autograd segment: its input leaf and the graph edges from which its backward starts.

    `leaf` is None if the segment starts from tokens. `roots` is empty for a recomputed segment.
    """

    leaf: torch.Tensor | None
    extras: dict[str, torch.Tensor]
    roots: tuple[Any, ...]
    "Gradient edges of the outputs; the outputs' storages may be freed. None for an output without gradient."
    marks: list[tuple[int, Any]]
    "(layer, autograd node that made this layer's input): where the layer's gradients are complete."


class SavedForward:
    """The state of one (microbatch, slice) of one stage. Operators read it; only the stage program writes it."""

    __slots__ = (
        "__weakref__",
        "cache",
        "deferred",
        "extras",
        "feed",
        "masks",
        "microbatch",
        "past",
        "pieces",
        "rows",
        "slice",
        "tokens",
        "train",
    )

    def __init__(self, microbatch: int, slice_: int, feed: StageInputs, train: bool) -> None:
        self.microbatch = microbatch
        self.slice = slice_
        self.feed = feed
        self.train = train
        self.rows = 0
        self.tokens = 0
        self.deferred: list[DeferredGradient] | None = None
        self.pieces: list[SavedSegment] = []
        self.cache: dict[Any, Any] = {}
        self.masks: dict[Any, Any] = {}
        self.extras: dict[str, torch.Tensor] = {}
        self.past: Any = None

    @property
    def image_tokens(self) -> int:
        """Number of packed-row tokens that enter the sequence."""
        return int(self.feed.data["image_places"].shape[1])

    @property
    def condition_tokens(self) -> int:
        """Number of sequence tokens that go to a packed row."""
        return int(self.feed.data["condition_places"].shape[1])

    def finish_weights(self, layers: int, done: Callable[[int], None] | None, sharded: Any = None) -> None:
        """Run the deferred weight gradients, last layer first, releasing each one's tensors at once.

        `done(layer)` is called for every layer of the stage, in reverse order, when its gradients are complete.
        `sharded` (`run.stage.sharded_layers`) provides the buffers of layers whose gradients are sharded.
        """
        queue = self.deferred
        assert queue is not None, "W before I"
        queue.reverse()
        for layer in range(layers - 1, -1, -1):
            if sharded is not None:
                sharded.begin_gradients(layer, "W")
            while queue and queue[-1].layer == layer:
                item = queue.pop()
                item.accumulate(*item.tensors)
            if done is not None:
                done(layer)
            if sharded is not None:
                sharded.leave_layer(layer)
                sharded.end_gradients(layer)
        assert not queue, "a deferred weight gradient out of layer order"
        self.deferred = None
