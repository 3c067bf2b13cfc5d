"""Full recomputation of layers, and the segments of layers that form one autograd graph.

A stage without full recomputation is one segment: one autograd graph from its input to its output. Under full
recomputation every layer with two matrix products or more (transformer blocks, not the embedding, the head or the loss)
is a segment of its own that saves only its input and runs again before its backward (Chen et al., 2016, "Training Deep
Nets with Sublinear Memory Cost").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from pipefit.model.analysis.saved import effective_recompute
from pipefit.run.autograd.engine import gradient_edge, run_backward
from pipefit.run.autograd.saved_forward import SavedForward, SavedSegment
from pipefit.run.stage.compile import LayerFunction
from pipefit.run.stage.sharded_layers import BackwardWalk, ShardedLayers

Done = Callable[[int], None] | None


class AutogradSegment:
    """Consecutive layers between two cuts of the autograd graph. `first` is the index of the first layer in the
    stage."""

    def __init__(self, first: int, functions: Sequence[LayerFunction], again: bool) -> None:
        self.first = first
        self.calls = [function.call for function in functions]
        self.again = again
        self.trained = True
        "True if a gradient flows back through it."
        self.sharded: ShardedLayers | None = None
        "The layers of the stage with sharded gradients or parameters; None if it has none."
        produced = [name for function in functions for name in function.extra_outputs]
        used = [name for function in functions for name in function.extra_inputs]
        self.produced = tuple(produced)
        self.consumed = tuple(dict.fromkeys(name for name in used if name not in produced))

    def forward(self, record: SavedForward, x: torch.Tensor | None, wanted: bool = True) -> torch.Tensor:
        """Run the layers on the hidden state (or None); save in the record the tensors for the backward. `wanted` is
        True if earlier layers need the gradient of the hidden state."""
        leaf = None if x is None else x.detach().requires_grad_(wanted)
        extras = {name: record.extras[name].detach().requires_grad_() for name in self.consumed}
        if self.again:
            with torch.no_grad():
                record.extras.update(extras)
                out = self._run_layers(record, leaf, [], self.sharded)
            record.pieces.append(SavedSegment(leaf, extras, (), []))
            return out
        piece, out = self._run_graph(record, leaf, extras, self.sharded)
        record.pieces.append(piece)
        return out

    def backward(
        self, record: SavedForward, dy: torch.Tensor | None, extra: dict[str, torch.Tensor], done: Done
    ) -> torch.Tensor | None:
        """Return the gradient of the incoming hidden state, from that of the outgoing one.

        `extra` holds gradients of the other activations: those produced here are removed, those consumed here are added
        to.
        """
        piece = record.pieces.pop()
        layers = range(self.first, self.first + len(self.calls))
        walk = BackwardWalk(layers, "B" if record.deferred is None else "I", self.sharded, done)
        if self.again:
            walk.gather_parameters()
            record.extras.update(piece.extras)
            piece = self._run_graph(record, piece.leaf, piece.extras, None)[0]  # the output is not needed again
        roots, gradients = [], []
        for root, gradient in zip(piece.roots, (dy, *(extra.pop(n, None) for n in self.produced)), strict=True):
            if gradient is not None and root is not None:
                roots.append(root)
                gradients.append(gradient)
        walk.follow_marks(piece.marks)
        run_backward(roots, gradients)
        walk.finish_walk()
        for name, leaf in piece.extras.items():
            if leaf.grad is not None:
                extra[name] = extra[name] + leaf.grad if name in extra else leaf.grad
        return None if piece.leaf is None else piece.leaf.grad

    def _run_graph(
        self,
        record: SavedForward,
        leaf: torch.Tensor | None,
        extras: dict[str, torch.Tensor],
        sharded: ShardedLayers | None,
    ) -> tuple[SavedSegment, torch.Tensor]:
        marks: list[tuple[int, Any]] = []
        if extras:
            record.extras.update(extras)
        outputs = [self._run_layers(record, leaf, marks, sharded)]
        for name in self.produced:
            outputs.append(record.extras[name])
            record.extras[name] = record.extras[name].detach()
        roots = tuple(map(gradient_edge, outputs))
        return SavedSegment(leaf, extras, roots, marks), outputs[0].detach()

    def _run_layers(
        self, record: SavedForward, x: Any, marks: list[tuple[int, Any]], sharded: ShardedLayers | None
    ) -> Any:
        layer = self.first
        for call in self.calls:
            if layer > self.first and x.grad_fn is not None:
                marks.append((layer, x.grad_fn))
            if sharded is None:
                x = call(record, x)
            else:
                sharded.enter_layer(layer, layer + 1)
                x = call(record, x)
                sharded.leave_layer(layer)
            layer += 1
        return x


class FrozenSegment(AutogradSegment):
    """The leading layers of a stage without a backward: neither they nor any layer before them is trained."""

    def __init__(self, functions: Sequence[LayerFunction]) -> None:
        super().__init__(0, functions, again=False)
        self.trained = False

    def forward(self, record: SavedForward, x: torch.Tensor | None, wanted: bool = True) -> torch.Tensor:
        """Run the layers without saving anything."""
        with torch.no_grad():
            out: torch.Tensor = self._run_layers(record, x, [], self.sharded)
        return out

    def backward(
        self, record: SavedForward, dy: torch.Tensor | None, extra: dict[str, torch.Tensor], done: Done
    ) -> torch.Tensor | None:
        """Drop the gradients of the layers' outputs."""
        for name in self.produced:
            extra.pop(name, None)
        for layer in reversed(range(len(self.calls))):
            if done is not None:
                done(layer)
        return None


def split_segments(
    layers: Sequence[Any],
    functions: Sequence[LayerFunction],
    recompute: Literal["none", "selective", "full"],
    frozen: int = 0,
) -> list[AutogradSegment]:
    """Split the layers of a stage into segments; every recomputed layer is its own. The first `frozen` have no
    backward."""
    result: list[AutogradSegment] = [FrozenSegment(functions[:frozen])] if frozen else []
    open_since = frozen
    for index, layer in enumerate(layers):
        if index >= frozen and effective_recompute(layer.graph, recompute) == "full":
            if open_since < index:
                result.append(AutogradSegment(open_since, functions[open_since:index], again=False))
            result.append(AutogradSegment(index, functions[index : index + 1], again=True))
            open_since = index + 1
    if open_since < len(layers):
        result.append(AutogradSegment(open_since, functions[open_since:], again=False))
    return result
