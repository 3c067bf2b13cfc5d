"""Layers with gradients (ZeRO-2), or also parameters (ZeRO-3), that are sharded over the replicas.

A layer's parameters are all-gathered while the layer before it runs, and released after its run. Its backward starts
with complete gradients of zeros. They are reduce-scattered while the next layer runs, and the result is added to this
rank's owned run. So at most two layers have complete parameters, and two complete gradients. Nothing is in flight
between two actions. Sources: Rajbhandari et al., 2020; Zhao et al., "PyTorch FSDP", 2023.

The flat tensor of released parameters keeps its identity, with a storage of size 0. Its views, also those saved by
autograd, are valid again after the next gather.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pipefit.lab.pace import pace_wait
from pipefit.model.graph import Graph
from pipefit.model.ops import KINDS
from pipefit.run.stage.parameters import bind_buffer, drop_buffer
from pipefit.run.transfers.comms import all_gather, reduce_scatter
from pipefit.run.update.buckets import GradientBucket

BackwardKind = Literal["B", "I", "W"]


class ShardedBucket:
    """The collectives of one bucket in a layer's passes. `group` are the ranks that share its state; `kinds` are the
    passes that add to its gradients: B, and I, W or both."""

    def __init__(self, bucket: GradientBucket, group: Any, kinds: Collection[str]) -> None:
        self.bucket, self.kinds = bucket, kinds
        self._group = group
        self._work: Any = None
        self._complete = False
        self._gradients: Tensor | None = None
        self._reduction: tuple[Any, Tensor, Tensor] | None = None

    def start_gather(self) -> None:
        """Start to gather the parameters, unless they are complete or on their way."""
        if self.bucket.shards_parameters and not self._complete:
            self._complete = True
            self.bucket.allocate_parameters()
            self._work = all_gather(self.bucket.parameters, self.bucket.owned_parameters, self._group)

    def finish_gather(self) -> None:
        """Wait for the gather."""
        if self._work is not None:
            pace_wait(self._work.wait)
            self._work = None

    def release_parameters(self) -> None:
        """Free the complete parameters, once their gather has ended."""
        if self._complete:
            self.finish_gather()
            self.bucket.release_parameters()
            self._complete = False

    def begin_gradients(self) -> None:
        """Bind complete gradients of zeros to the parameters."""
        bucket = self.bucket
        assert self._gradients is None and self._reduction is None, "a layer's backward within its own backward"
        self._gradients = bucket.gradients.new_zeros(bucket.parameters.numel())
        for entry, view in zip(bucket.entries, bucket.split_flat(self._gradients), strict=True):
            bind_buffer(entry.tensor, view)

    def start_reduction(self) -> None:
        """Take the gradients from the parameters, and start to reduce-scatter them."""
        flat, self._gradients = self._gradients, None
        if flat is None:
            self._check_gradients()
            return
        for entry in self.bucket.entries:
            drop_buffer(entry.tensor)
        part = torch.empty_like(self.bucket.gradients)
        self._reduction = reduce_scatter(part, flat, self._group), part, flat

    def finish_reduction(self) -> None:
        """Wait for the reduction and add its result to the owned gradients; the complete ones are freed."""
        if self._reduction is not None:
            work, part, flat = self._reduction
            pace_wait(work.wait)
            self.bucket.gradients.add_(part)
            flat.untyped_storage().resize_(0)  # a thread of gloo may still hold the tensor
            self._reduction = None

    def _check_gradients(self) -> None:
        """Assert that a pass without gradients of this bucket has left none."""
        for entry in self.bucket.entries:
            assert entry.tensor.grad is None, f"an unexpected gradient of {entry.name}"


class ShardedLayers:
    """The sharded buckets of one stage, by the index of the layer within the stage.

    The stage program calls `enter_layer` and `leave_layer` around each run of a layer. It calls `begin_gradients` and
    `end_gradients` around each computation of weight gradients, and `finish_action` at the end of an action.
    """

    def __init__(self, buckets: Iterable[tuple[int, ShardedBucket]]) -> None:
        self._layers: dict[int, list[ShardedBucket]] = {}
        for index, bucket in buckets:
            self._layers.setdefault(index, []).append(bucket)
        self.names = frozenset(
            entry.name for layer in self._layers.values() for bucket in layer for entry in bucket.bucket.entries
        )
        "Global names of the parameters."
        self.frozen = 0
        "Number of leading layers without a backward, which needs none of their parameters."
        self.on_layer_end: Callable[[int], None] | None = None
        "If set, called with each layer at the end of its run, before any communication (the lab)."
        self._gathered: set[int] = set()
        self._reducing: list[ShardedBucket] = []

    def enter_layer(self, index: int, following: int) -> None:
        """Wait until the parameters of a layer are complete, and start to gather those of the layer that follows."""
        self._start_gather(index)
        for bucket in self._layers.get(index, ()):
            bucket.finish_gather()
        self._start_gather(following)

    def leave_layer(self, index: int) -> None:
        """Release the parameters of a layer whose run has ended: its forward, backward or weight gradients."""
        if self.on_layer_end is not None:
            self.on_layer_end(index)
        self._release_layer(index)

    def begin_gradients(self, index: int, kind: BackwardKind) -> None:
        """Bind complete gradients of a layer, for the buckets with a gradient in this kind of pass."""
        for bucket in self._layers.get(index, ()):
            if kind in bucket.kinds:
                bucket.begin_gradients()

    def end_gradients(self, index: int) -> None:
        """Start to reduce the gradients of a layer; wait for those of the layer before it."""
        self._finish_reductions()
        for bucket in self._layers.get(index, ()):
            bucket.start_reduction()
            self._reducing.append(bucket)

    def finish_action(self) -> None:
        """Wait for everything in flight and release all complete parameters."""
        self._finish_reductions()
        for index in sorted(self._gathered):
            self._release_layer(index)

    def _release_layer(self, index: int) -> None:
        self._gathered.discard(index)
        for bucket in self._layers.get(index, ()):
            bucket.release_parameters()

    def _start_gather(self, index: int) -> None:
        if index in self._layers:
            self._gathered.add(index)
            for bucket in self._layers[index]:
                bucket.start_gather()

    def _finish_reductions(self) -> None:
        for bucket in self._reducing:
            bucket.finish_reduction()
        self._reducing = []


class BackwardWalk:
    """The layers of one autograd segment in the order of its backward. The last is prepared before it runs, the others
    when the backward reaches the input of the layer above."""

    def __init__(
        self,
        layers: Sequence[int],
        kind: BackwardKind,
        sharded: ShardedLayers | None,
        done: Callable[[int], None] | None,
    ) -> None:
        """`done` is called with each layer when its gradients are complete."""
        self._pending = list(layers)
        self._marks: list[int] = []
        self._kind, self._sharded, self._done = kind, sharded, done

    def gather_parameters(self) -> None:
        """Make the parameters of the last layer complete."""
        if self._sharded is not None:
            self._enter_layer(self._pending[-1])

    def follow_marks(self, marks: Sequence[tuple[int, Any]]) -> None:
        """Prepare the last layer, and follow the backward by hooks at the `marks`: (layer, the node that made its
        input). Layers without a mark run together with the layer above them."""
        if self._sharded is None and self._done is None:
            return
        for layer, node in marks:
            self._marks.append(layer)
            node.register_prehook(self._reach_hook(layer))
        self._enter_layers()

    def finish_walk(self) -> None:
        """Finish the remaining layers, at the end of the segment's backward."""
        if self._sharded is not None or self._done is not None:
            self._finish_layers(0)

    def _reach_hook(self, index: int) -> Callable[..., None]:
        def reach_input(*_: Any) -> None:
            if self._finish_layers(index):
                self._enter_layers()

        return reach_input

    def _enter_layers(self) -> None:
        if self._sharded is None or not self._pending:
            return
        top = self._pending[-1]
        low = max((index for index in self._marks if index <= top), default=self._pending[0])
        for index in range(top, low - 1, -1):
            self._enter_layer(index)
            self._sharded.begin_gradients(index, self._kind)

    def _enter_layer(self, index: int) -> None:
        """Wait for the parameters of a layer, and start to gather those of the layer before it, if it has a
        backward."""
        assert self._sharded is not None
        self._sharded.enter_layer(index, index - 1 if index > self._sharded.frozen else index)

    def _finish_layers(self, index: int) -> bool:
        """Finish the layers from `index` on whose gradients are complete. Returns True if there were any."""
        count = len(self._pending)
        while self._pending and self._pending[-1] >= index:
            layer = self._pending.pop()
            if self._done is not None:
                self._done(layer)
            if self._sharded is not None:
                self._sharded.leave_layer(layer)
                self._sharded.end_gradients(layer)
        return len(self._pending) < count


def gradient_passes(graph: Graph) -> Mapping[str, frozenset[str]]:
    """Return local name -> the passes with a gradient of this parameter: B, and I or W. W is for operators with
    deferred weight gradients."""
    passes: dict[str, set[str]] = {}
    for operator in graph.operators:
        kind = KINDS[operator.kind]
        deferred = bool(kind.pending_values or kind.pending_gradients)
        for name in operator.inputs:
            passes.setdefault(name, {"B"}).add("W" if deferred else "I")
    return {spec.name: frozenset(passes.get(spec.name, {"B"})) for spec in graph.parameters}
