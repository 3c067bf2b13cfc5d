"""Graphs with adapters: their work and their state by formulas, and plans without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.model.families.test_written_graphs import pipefit_without
from tests.support import adapter_cases as adapters
from tests.support import worker_plans as plans

from benchmarks.models.coverage import tiny_example
from pipefit.cluster import local_cluster
from pipefit.cost.memory.lanes import lane_parts
from pipefit.model.adapters.adapt import count_elements, freeze_parameters
from pipefit.model.adapters.options import AdapterConfig, tuned_config
from pipefit.model.adapters.targets import find_linear_modules
from pipefit.model.analysis.totals import graph_flops
from pipefit.model.capture.whole import capture_whole
from pipefit.model.registry import describe_config, open_family
from pipefit.plan.assemble.predict import simulate_plan, step_flops
from pipefit.plan.check.rules import load_plan
from pipefit.plan.types import Job
from pipefit.run.session.train import model_flops

RANK = 4
OPTIONS = AdapterConfig(rank=RANK, alpha=8.0)
SIZES = {"B": 3, "T": 10}


def test_only_adapters_have_weight_gradients() -> None:
    base, model = plans.model("llama"), adapters.adapted_model(plans.LLAMA, OPTIONS)
    before, after = (graph_flops(one.layer_graph(one.layers[1]), SIZES) for one in (base, model))
    graph = base.layer_graph(base.layers[1])
    widths = [sum(graph.find_parameter(op.inputs[1]).shape) for op in graph.operators if op.kind == "linear"]
    change = 2 * 3 * 10 * RANK * sum(widths)
    assert after.forward == before.forward + change
    assert after.input_gradient == before.input_gradient + change
    assert after.weight_gradient == change
    head = model.layer_graph(model.layers[-2])
    assert graph_flops(head, SIZES).weight_gradient == 0


def test_state_is_proportional_to_trained_parameters() -> None:
    model = adapters.adapted_model(plans.LLAMA, OPTIONS)
    trained, total = count_elements(model)
    job = Job(batch=4, sequence=12, precision="bfloat16", seed=5)
    plan = adapters.plan_of(model, job, microbatches=2)
    (parts,) = lane_parts(simulate_plan(plan, model, local_cluster(8)).work)
    assert (parts["parameters"], parts["gradients"], parts["optimizer"]) == (2 * total, 4 * trained, 12 * trained)
    assert trained == 4 * RANK * (2 * 64 + 2 * 48 + 3 * 80) and trained < total / 4


@pytest.mark.parametrize("patterns", [(), ("model.embed_tokens.*", "*.layers.0.*", "*.layers.1.*")])
def test_planner_and_run_count_the_same_flops(patterns: tuple[str, ...]) -> None:
    model = (
        freeze_parameters(plans.model("llama"), patterns) if patterns else adapters.adapted_model(plans.LLAMA, OPTIONS)
    )
    plan = adapters.plan_of(model, microbatches=2)
    rows: Any = None
    assert model_flops(model, plan, rows) == step_flops(plan, model)


def test_frozen_parameters_share_graphs_where_layers_are_equal() -> None:
    model = freeze_parameters(plans.model("llama"), ["*.mlp.*", "model.embed_tokens.weight"])
    assert len(model.graphs) == len(plans.model("llama").graphs)
    frozen = {
        layer.parameters[spec.name]
        for layer in model.layers
        for spec in model.layer_graph(layer).parameters
        if not spec.trainable
    }
    assert len(frozen) == 4 * 3 + 1 and all("mlp" in name or "embed" in name for name in frozen)


def test_a_configuration_gives_the_same_model_again() -> None:
    described = describe_config(plans.LLAMA, "m", "m")
    config = tuned_config(described.config, OPTIONS, ["*.layers.0.*"])
    model = open_family(described.family, config)
    assert model.config == config and open_family(described.family, json.loads(json.dumps(config))) == model
    assert model.hash != adapters.adapted_model(plans.LLAMA, OPTIONS).hash


def test_fused_and_tied_layers_are_told_apart() -> None:
    modules = {module.leaf: module for module in find_linear_modules(plans.model("phi3"))}
    assert modules["qkv_proj"].is_fused and len(modules["qkv_proj"].operators) == 3 and not modules["o_proj"].is_fused
    tied = next(module for module in find_linear_modules(plans.model("tied")) if module.leaf == "embed_tokens")
    assert tied.is_left_out and tied.reason == "its weight is used several times"


def test_plans_with_adapters_are_made_without_torch(tmp_path: Path) -> None:
    config, plan = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps(plans.LLAMA))
    request = ("--cluster", "2xH100", "--batch", "8", "--seq", "64", "--quiet", "-o", str(plan))
    done = pipefit_without(tmp_path, "plan", "--model", str(config), "--lora", str(RANK), *request)
    assert done.returncode == 0, done.stderr
    assert load_plan(plan).hashes.model == adapters.adapted_model(plans.LLAMA, OPTIONS).hash
    done = pipefit_without(tmp_path, "simulate", str(plan))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("kind", "has_experts"), [("falcon_h1", False), ("dots1", True)])
def test_only_experts_hide_the_names_that_peft_reads_as_theirs(kind: str, has_experts: bool) -> None:
    """A convolution's weight has three dimensions, too."""
    modules = find_linear_modules(capture_whole(tiny_example(kind, dropout=False), kind))
    assert any(module.leaf == "up_proj" for module in modules)
    assert all(module.is_left_out == has_experts for module in modules if module.leaf == "up_proj")
