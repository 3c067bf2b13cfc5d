"""Recomputation of whole layers, and the stretches of layers that autograd sees as one piece.

A stage without full recomputation is one stretch: one autograd graph from its input to its output. Under full
recomputation every layer that does real work (two matrix products or more: transformer blocks, not the embedding,
the head or the loss) is a stretch of its own that keeps its input only and runs again before its backward (reference:
Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from pipefit.model.analysis.saved import effective_recompute
from pipefit.run.autograd.engine import gradient_edge, run_backward
from pipefit.run.autograd.saved_forward import SavedForward, SavedSegment
from pipefit.run.stage.compile import LayerFunction

Done = Callable[[int], None] | None


class AutogradSegment:
    """Consecutive layers between two cuts of the autograd graph. `first` is the place of the first in the stage."""

    def __init__(self, first: int, functions: Sequence[LayerFunction], again: bool) -> None:
        self.first = first
        self.calls = [function.call for function in functions]
        self.again = again
        self.trained = True
        "Whether a gradient flows back through it."
        produced = [name for function in functions for name in function.extra_outputs]
        used = [name for function in functions for name in function.extra_inputs]
        self.produced = tuple(produced)
        self.consumed = tuple(dict.fromkeys(name for name in used if name not in produced))

    def forward(self, record: SavedForward, x: torch.Tensor | None, wanted: bool = True) -> torch.Tensor:
        """Run the layers on the hidden state (or None); keep in the record what the backward needs. `wanted`: whether
        somebody before asks for the gradient of the hidden state."""
        leaf = None if x is None else x.detach().requires_grad_(wanted)
        extras = {name: record.extras[name].detach().requires_grad_() for name in self.consumed}
        if self.again:
            with torch.no_grad():
                record.extras.update(extras)
                out = self._run_layers(record, leaf, [])
            record.pieces.append(SavedSegment(leaf, extras, (), []))
            return out
        piece, out = self._run_graph(record, leaf, extras)
        record.pieces.append(piece)
        return out

    def backward(
        self, record: SavedForward, dy: torch.Tensor | None, extra: dict[str, torch.Tensor], done: Done
    ) -> torch.Tensor | None:
        """The gradient of the hidden state that came in, from that of the one that went out.

        `extra` holds gradients of the other activations: those made here are taken out, those used here added to.
        """
        piece = record.pieces.pop()
        if self.again:
            record.extras.update(piece.extras)
            piece = self._run_graph(record, piece.leaf, piece.extras)[0]  # not the output: nobody needs it again
        roots, gradients = [], []
        for root, gradient in zip(piece.roots, (dy, *(extra.pop(n, None) for n in self.produced)), strict=True):
            if gradient is not None and root is not None:
                roots.append(root)
                gradients.append(gradient)
        pending = list(range(self.first, self.first + len(self.calls)))
        if done is not None:
            for place, node in piece.marks:
                node.register_prehook(_gradient_hook(pending, place, done))
        run_backward(roots, gradients)
        while done is not None and pending:
            done(pending.pop())
        for name, leaf in piece.extras.items():
            if leaf.grad is not None:
                extra[name] = extra[name] + leaf.grad if name in extra else leaf.grad
        return None if piece.leaf is None else piece.leaf.grad

    def _run_graph(
        self, record: SavedForward, leaf: torch.Tensor | None, extras: dict[str, torch.Tensor]
    ) -> tuple[SavedSegment, torch.Tensor]:
        marks: list[tuple[int, Any]] = []
        if extras:
            record.extras.update(extras)
        outputs = [self._run_layers(record, leaf, marks)]
        for name in self.produced:
            outputs.append(record.extras[name])
            record.extras[name] = record.extras[name].detach()
        roots = tuple(map(gradient_edge, outputs))
        return SavedSegment(leaf, extras, roots, marks), outputs[0].detach()

    def _run_layers(self, record: SavedForward, x: Any, marks: list[tuple[int, Any]]) -> Any:
        place = self.first
        for call in self.calls:
            if place > self.first and x.grad_fn is not None:
                marks.append((place, x.grad_fn))
            x = call(record, x)
            place += 1
        return x


class FrozenSegment(AutogradSegment):
    """Layers at the beginning of a stage that have no backward: neither they nor anything before them is trained."""

    def __init__(self, functions: Sequence[LayerFunction]) -> None:
        super().__init__(0, functions, again=False)
        self.trained = False

    def forward(self, record: SavedForward, x: torch.Tensor | None, wanted: bool = True) -> torch.Tensor:
        """Run the layers; nothing is kept."""
        with torch.no_grad():
            out: torch.Tensor = self._run_layers(record, x, [])
        return out

    def backward(
        self, record: SavedForward, dy: torch.Tensor | None, extra: dict[str, torch.Tensor], done: Done
    ) -> torch.Tensor | None:
        """Drop the gradients of what the layers made."""
        for name in self.produced:
            extra.pop(name, None)
        for place in reversed(range(len(self.calls))):
            if done is not None:
                done(place)
        return None


def _gradient_hook(pending: list[int], place: int, done: Callable[[int], None]) -> Callable[..., None]:
    """A hook for the node that made the input of layer `place`: when it runs, that layer's gradients are complete."""

    def announce_gradients(*_: Any) -> None:
        while pending and pending[-1] >= place:
            done(pending.pop())

    return announce_gradients


def split_segments(
    layers: Sequence[Any],
    functions: Sequence[LayerFunction],
    recompute: Literal["none", "selective", "full"],
    frozen: int = 0,
) -> list[AutogradSegment]:
    """Cut the layers of a stage into stretches; every recomputed layer is one of its own. The first `frozen` have no
    backward."""
    result: list[AutogradSegment] = [FrozenSegment(functions[:frozen])] if frozen else []
    open_since = frozen
    for place, layer in enumerate(layers):
        if place >= frozen and effective_recompute(layer.graph, recompute) == "full":
            if open_since < place:
                result.append(AutogradSegment(open_since, functions[open_since:place], again=False))
            result.append(AutogradSegment(place, functions[place : place + 1], again=True))
            open_since = place + 1
    if open_since < len(layers):
        result.append(AutogradSegment(open_since, functions[open_since:], again=False))
    return result
