"""Layers of models that were captured whole are measured at whole rows of their own length: images, too."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.support.whole_models import HAP

from pipefit.cost.compute.curves import action_time_s
from pipefit.model.capture.whole import capture_whole
from pipefit.plan.request.sequence_length import fixed_length
from pipefit.profile.layer_phase import layer_curve, starting_points
from pipefit.profile.layers import LayerBench, PointSamples, ProfiledLayer
from pipefit.profile.points import WorkPoint

CPU = torch.device("cpu")


def subjects(name: str) -> list[ProfiledLayer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = capture_whole(HAP[name]())
    return [ProfiledLayer(graph, name, "float32", fixed_length(model) or 0) for graph in model.graphs.values()]


@pytest.mark.parametrize(("name", "tokens"), [("vit", 1), ("bert", 11)])
def test_layers_of_whole_models_are_timed(name, tokens):
    for subject in subjects(name):
        assert starting_points(subject, 1024, 0) == [WorkPoint(rows, tokens) for rows in (1, 2, 4, 8)]
        assert starting_points(subject, 1024, 3 * tokens) == [WorkPoint(rows, tokens) for rows in (1, 2)]
        visit = LayerBench(subject, CPU).visit_point(WorkPoint(3, tokens), window_s=0.0)
        assert {action: len(calls) for action, calls in visit.items()} == {"F": 2, "B": 1, "I": 1, "W": 1}


def test_their_curves_go_by_rows_alone():
    block = subjects("bert")[1]
    assert any(operator.kind == "attention" for operator in block.graph.operators)
    samples = [
        PointSamples(0, WorkPoint(rows, 11), [{action: [(took(rows), took(rows))] for action in "FBIW"}])
        for rows in (1, 4, 8)
    ]
    curve = layer_curve(block, samples, "cpu", {}, 1)
    for action in "FBIW":
        assert curve.actions[action].attention_s == ()
        assert action_time_s(curve.actions[action], 6, 11) == pytest.approx(took(6))
        assert action_time_s(curve.actions[action], 16, 11) == pytest.approx(took(16))


def took(rows: int) -> float:
    return 1e-3 + 2e-4 * rows
