"""A layer that cannot be captured runs as it is: slower choices, never a locked door."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import worker_cases as cases

from pipefit.cluster import local_cluster
from pipefit.model.capture.layers import capture_family
from pipefit.model.registry import build_layers, resolve_model
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.run.stage.initial_values import initial_values

pytestmark = pytest.mark.gloo


LAYOUTS: dict[str, dict[str, Any]] = {
    "2 stages": {"cuts": (2,), "microbatches": 8},
    "2 stages, ZeRO-2": {"cuts": (2,), "microbatches": 4, "replicas": (1, 1), "sharded_state": "gradients"},
    "2 stages, ZeRO-3": {"cuts": (2,), "microbatches": 4, "replicas": (1, 1), "sharded_state": "parameters"},
    "ZeRO-3": {"microbatches": 2, "replicas": (1, 1, 1, 1), "sharded_state": "parameters"},
}
"""A microbatch of a replica has one row: the layer's branch is taken by row."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_user_model_with_opaque_layers_trains_as_plain_pytorch(gloo_pool, layout):
    described = resolve_model(f"{Path(__file__).parents[2] / 'support' / 'opaque_model.py'}:layers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = capture_family(described.family, described.config)
    kinds = [[op.kind for op in model.layer_graph(layer).operators] for layer in model.layers]
    assert kinds[1] == kinds[2] == ["opaque"]
    job = Job(batch=8, sequence=6, precision="float64", seed=2)
    plan = build_plan(model, local_cluster(8), job, ParallelConfig(**LAYOUTS[layout]))
    gloo_pool.run(cases.prepare, [(plan, model)], ranks=8)
    found = gloo_pool.run(cases.run_steps, plan, model, 96, 1, ranks=len(plan.used_devices))[0]

    layers = build_layers(described.family, described.config, device="cpu", dtype=torch.float64)
    value = initial_values(plan, model)
    named = {layer.parameter_names[k]: p for layer in layers for k, p in layer.named_parameters()}
    for name, parameter in named.items():
        box = tuple((0, n) for n in parameter.shape)
        parameter.data.copy_(value(name, tuple(parameter.shape), box))
    torch.manual_seed(job.seed)
    fresh = build_layers(described.family, described.config, device="cpu")[1].inner.weight.detach()
    assert torch.equal(fresh.double(), layers[1].inner.weight), "a user's layer starts as it starts itself"
    tokens, labels, divisor = cases.rows_of(plan, 0, 96)
    total = 0.0
    for row in range(8):  # the branch is taken per microbatch
        x = tokens[row : row + 1]
        for layer in layers[:-1]:
            x = layer(x)
        loss = layers[-1](x, labels[row : row + 1]) / divisor
        loss.backward()
        total += float(loss.detach())
    assert found["steps"][0][0] == pytest.approx(total, rel=1e-12)
    for name, parameter in named.items():
        error = np.abs(found["gradients"][name] - parameter.grad.numpy()).max()
        assert error <= 1e-10 * float(parameter.grad.abs().max()), name
