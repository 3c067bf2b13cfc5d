"""The memory of a stage's actions from its layers: bytes held, and the peak of each action.

While a layer runs forward, the earlier layers hold their saved activations. While it runs backward, the earlier layers
still hold them, and the later layers hold the inputs of their pending weight gradients. A stage's incoming gradient
lives as long as the action that uses it. With slices, the layers before a running backward hold the key and value
gradients from later slices; the layers after it hold those still due to earlier slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from pipefit.cost.compute.roofline import LayerCost


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage, microbatch and slice."""

    saved_bytes: float
    "Bytes held from F to B or I."
    pending_bytes: float
    "Bytes held from I to W."
    passing: Mapping[str, float]
    "Per action (F, I, W, B): bytes beyond the larger of the bytes held before and after, inputs and outputs included."


def stage_memory(layers: Sequence[LayerCost]) -> StageMemory:
    """Return the memory of a stage of these layers. Without `LayerCost.passing` there is no transient memory."""
    saved = fsum(layer.saved_bytes for layer in layers)
    pending = fsum(layer.pending_bytes for layer in layers)
    first, last = layers[0].passing, layers[-1].passing
    if first is None or last is None:
        return StageMemory(saved, pending, {"F": 0.0, "I": 0.0, "W": 0.0, "B": 0.0})
    tables = max(layer.passing.tables for layer in layers if layer.passing)
    input_bytes = 0 if first.keeps_input else first.input
    output_gradient = {"B": last.output, "I": 0 if last.holds_output_gradient else last.output}
    peak = {"F": 0.0, "I": 0.0, "W": 0.0, "B": 0.0}
    before, behind = float(tables), pending
    kv_bytes = fsum(layer.kv_gradient_after_bytes for layer in layers)
    for index, layer in enumerate(layers):
        worst = layer.passing
        assert worst is not None, "all layers of a stage are costed alike"
        behind -= layer.pending_bytes
        peak["W"] = max(peak["W"], pending - behind + worst.weight)
        end = index == len(layers) - 1
        peak["F"] = max(peak["F"], before + worst.forward + (input_bytes if index else 0))
        kv_bytes += layer.kv_gradient_before_bytes - layer.kv_gradient_after_bytes
        peak["B"] = max(
            peak["B"], before + kv_bytes + (worst.fused_last if end else worst.fused + output_gradient["B"])
        )
        at_once = worst.input_gradient_last if end else worst.input_gradient + output_gradient["I"]
        peak["I"] = max(peak["I"], before + behind + kv_bytes + at_once)
        before += layer.saved_bytes
    held = {"F": before, "B": before, "I": max(before, pending), "W": pending}
    return StageMemory(before, pending, {kind: max(0.0, peak[kind] - held[kind]) for kind in peak})
