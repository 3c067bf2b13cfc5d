"""Bytes of every precision: what a parameter takes with AdamW, and what an update of it moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.plan_toys import toy_model

from pipefit.cluster import open_cluster
from pipefit.cost.static_memory import (
    COMPUTE_BYTES,
    GRADIENT_BYTES,
    has_master,
    optimizer_traffic_bytes,
    state_bytes,
    static_parts,
)
from pipefit.errors import ClusterError
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Model
from pipefit.model.registry import describe_config
from pipefit.optimizers import find_optimizer
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job, Plan
from pipefit.precision import COMPUTE_TYPE, PRODUCT_TYPE, Precision

BYTES: dict[Precision, tuple[int, int, int]] = {
    "float64": (8, 8, 16), "float32": (4, 4, 8), "tf32": (4, 4, 8),
    "float16": (2, 4, 12), "bfloat16": (2, 4, 12), "bfloat16-gradients": (2, 2, 12),
    "fp8": (2, 4, 12), "fp8-bfloat16-gradients": (2, 2, 12),
}  # fmt: skip
"""Precision -> bytes of a parameter, of its gradient and of AdamW's state, master weights included."""


@pytest.mark.parametrize("precision", COMPUTE_TYPE)
def test_bytes_of_a_parameter(precision: Precision) -> None:
    optimizer = find_optimizer("adamw")
    compute, gradient, state = BYTES[precision]
    assert (COMPUTE_BYTES[precision], GRADIENT_BYTES[precision]) == (compute, gradient)
    assert state_bytes(optimizer, precision) == state
    assert has_master(precision) == (compute == 2)
    parts = static_parts(1000.0, 0.0, 1.0, precision, optimizer)
    assert [parts[name] / 1000 for name in ("parameters", "gradients", "optimizer")] == [compute, gradient, state]


@pytest.mark.parametrize("precision", COMPUTE_TYPE)
def test_bytes_of_an_update(precision: Precision) -> None:
    """The norm and the update read the gradient; the state is read and written, the parameter written."""
    compute, gradient, state = BYTES[precision]
    moved = optimizer_traffic_bytes(1000.0, 1.0, precision, find_optimizer("adamw"))
    assert moved == 1000 * (2 * gradient + 2 * state + compute)


def planned_in(precision: Precision) -> Plan:
    """Return a pinned plan on A100, whose TF32 units are eight times as fast as float32 ones."""
    job = Job(batch=8, sequence=512, precision=precision)
    fixed = Constraints(stages=1, replicas=(1, 1), microbatches=1)
    return make_plan(toy_model(3), open_cluster("2xA100-80"), job, fixed)


def test_tf32_changes_the_time_of_products_alone() -> None:
    plans = {precision: planned_in(precision).prediction for precision in ("float32", "tf32", "bfloat16")}
    steps = {precision: plan.step_s for precision, plan in plans.items() if plan is not None}
    assert steps["float32"] > steps["tf32"] > steps["bfloat16"]
    assert plans["float32"] is not None and plans["tf32"] is not None
    peaks = [[lane.peak_bytes for lane in plans[name].lanes] for name in ("float32", "tf32")]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("precision", PRODUCT_TYPE)
def test_a_device_needs_a_peak_for_the_precision(precision: Precision) -> None:
    cluster = open_cluster("2xH100")
    kind = cluster.kinds["H100"]
    peaks = {name: peak for name, peak in kind.peak_flops_per_s.items() if name != PRODUCT_TYPE[precision]}
    bare = replace(cluster, kinds={"H100": replace(kind, peak_flops_per_s=peaks)})
    with pytest.raises(ClusterError, match=f"The H100 has no peak for {PRODUCT_TYPE[precision]}") as error:
        make_plan(toy_model(3), bare, Job(batch=8, sequence=16, precision=precision))
    assert error.value.where == "--precision" and precision not in str(error.value.allowed).split(", ")


def wide_model() -> Model:
    """Return blocks whose products are large enough for FP8 to gain."""
    config = {
        "model_type": "llama", "vocab_size": 1024, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 32,
    }  # fmt: skip
    described = describe_config(config, "wide", "wide")
    return capture_family(described.family, described.config)


def test_fp8_shortens_the_step_and_keeps_the_memory() -> None:
    model, fixed = wide_model(), Constraints(stages=1, replicas=(1, 1), microbatches=1)
    plans = {}
    for precision in ("bfloat16", "fp8", "fp8-bfloat16-gradients"):
        job = Job(batch=4, sequence=4096, precision=precision)  # type: ignore[arg-type]
        plans[precision] = make_plan(model, open_cluster("2xH100"), job, fixed).prediction
    wide, narrow, leaner = plans.values()
    assert wide is not None and narrow is not None and leaner is not None
    assert 0.5 * wide.step_s < narrow.step_s < 0.9 * wide.step_s, "products take half the time, the rest all of it"
    assert narrow.lanes[0].peak_bytes == wide.lanes[0].peak_bytes > leaner.lanes[0].peak_bytes
    with pytest.raises(ClusterError, match="The A100-80 has no peak for fp8"):
        make_plan(model, open_cluster("2xA100-80"), Job(batch=4, sequence=64, precision="fp8"), fixed)
