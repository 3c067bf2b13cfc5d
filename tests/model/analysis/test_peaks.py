"""Peaks from the moments of a graph, walked once on symbols, against a walk with the bytes themselves."""

from __future__ import annotations

import itertools

import pytest

from pipefit.model.analysis.passing import _GraphWalk, transient_bytes
from pipefit.model.analysis.peaks import GraphSizes
from pipefit.model.analysis.saved import Recompute
from pipefit.model.registry import open_model

CHOICES: tuple[Recompute, ...] = ("none", "selective", "full")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-mixtral"])
def test_peaks_are_those_of_a_walk_with_bytes(name: str) -> None:
    for graph in open_model(name).graphs.values():
        for recompute, widens, sliced in itertools.product(CHOICES, (False, True), (False, True)):
            for rows, tokens, width in ((1, 64, 2), (3, 8, 4), (1, 1, 2)):
                symbols = {"B": rows, "T": tokens, "P": tokens, "S": tokens, "R": rows}
                peaks = transient_bytes(graph, symbols, width, recompute, widens, sliced)
                sizes = GraphSizes(graph, symbols, width, widens)
                walk = _GraphWalk(sizes, recompute, sliced)
                assert peaks.forward == walk.forward_peak()
                assert peaks.fused == walk.backward_peak(deferred=False, lasting=False)
                assert peaks.input_gradient == walk.backward_peak(deferred=True, lasting=False)
                assert peaks.fused_last == walk.backward_peak(deferred=False, lasting=True)
                assert peaks.input_gradient_last == walk.backward_peak(deferred=True, lasting=True)
                weights = [sizes.widening_bytes(i) + sizes.gathered_bytes(i, True) for i in range(len(sizes.calls))]
                assert peaks.weight == max(weights)
