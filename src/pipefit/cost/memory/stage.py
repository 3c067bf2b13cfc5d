"""The memory of the actions of a stage, from those of its layers: what stays, and the worst moment of each action.

While one layer runs forward, the layers before it hold what they keep; while one runs backward, the layers before it
still do, and the layers behind it hold what their pending weight gradients need. The gradient that a stage is given
lives as long as the action that uses it. With slices, the layers before a running backward hold what later slices owe
to keys and values; those behind it, what is still owed to earlier slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipefit.cost.compute.roofline import LayerCost


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage, microbatch and slice."""

    saved_bytes: float
    "Held from F to B or I."
    pending_bytes: float
    "Held from I to W."
    passing: Mapping[str, float]
    "Of F, I, W and B: what they need beside the larger of what is held before and after, inputs and outputs among it."


def stage_memory(layers: Sequence[LayerCost]) -> StageMemory:
    """Of a stage of these layers. Without `LayerCost.passing` nothing passes."""
    saved = sum(layer.saved_bytes for layer in layers)
    pending = sum(layer.pending_bytes for layer in layers)
    first, last = layers[0].passing, layers[-1].passing
    if first is None or last is None:
        return StageMemory(saved, pending, {"F": 0.0, "I": 0.0, "W": 0.0, "B": 0.0})
    tables = max(layer.passing.tables for layer in layers if layer.passing)
    input_bytes = 0 if first.keeps_input else first.input
    output_gradient = {"B": last.output, "I": 0 if last.holds_output_gradient else last.output}
    peak = {"F": 0.0, "I": 0.0, "W": 0.0, "B": 0.0}
    before, behind = float(tables), pending
    owed = sum(layer.owed_behind for layer in layers)
    for index, layer in enumerate(layers):
        worst = layer.passing
        assert worst is not None, "all layers of a stage are costed alike"
        behind -= layer.pending_bytes
        peak["W"] = max(peak["W"], pending - behind + worst.weight)
        end = index == len(layers) - 1
        peak["F"] = max(peak["F"], before + worst.forward + (input_bytes if index else 0))
        owed += layer.owed_before - layer.owed_behind
        peak["B"] = max(peak["B"], before + owed + (worst.fused_last if end else worst.fused + output_gradient["B"]))
        at_once = worst.input_gradient_last if end else worst.input_gradient + output_gradient["I"]
        peak["I"] = max(peak["I"], before + behind + owed + at_once)
        before += layer.saved_bytes
    held = {"F": before, "B": before, "I": max(before, pending), "W": pending}
    return StageMemory(before, pending, {kind: max(0.0, peak[kind] - held[kind]) for kind in peak})
