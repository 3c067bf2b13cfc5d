"""An optimizer from outside the package, by the code of docs/how-to/add-an-optimizer.md: planned, run and shown."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.cluster import parse_spec
from pipefit.codec import dump_text, load_text
from pipefit.errors import FormatError, PlanError
from pipefit.optimizers import OPTIMIZERS, base
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.check.rules import check_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.explain.text import plan_headline
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, LanePrediction, Plan

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "add-an-optimizer.md"
JOB = Job(batch=8, sequence=64, precision="bfloat16")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the code of the how-to defines; its optimizer is registered during the test."""
    known = dict(base.OPTIMIZERS)
    module = ModuleType("how_to_module")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = vars(module)
    for block in re.findall(r"^```python\n(.*?)^```", HOW_TO.read_text(encoding="utf-8"), flags=re.M | re.S):
        exec(block, names)
    yield names
    base.OPTIMIZERS._entries.clear()
    base.OPTIMIZERS._entries.update(known)


def lanes(optimizer: str, **decisions: Any) -> tuple[Plan, tuple[LanePrediction, ...]]:
    model, cluster = toy_model(6), toy_cluster()
    plan = build_plan(model, cluster, replace(JOB, optimizer=optimizer), ParallelConfig(**decisions))
    plan = add_prediction(plan, model, simulate_plan(plan, model, cluster))
    assert plan.prediction is not None
    return plan, plan.prediction.lanes


@pytest.mark.parametrize("state", ["none", "optimizer"])
def test_memory_follows_the_optimizer(named: dict[str, Any], state: str) -> None:
    """Under bfloat16 AdamW keeps 12 bytes an element, SGD and sign SGD 8, Adafactor 4 and the means of its matrices."""
    layout = {"stages": 2, "microbatches": 2, "replicas": (1, 1), "sharded_state": state}
    plans = {name: lanes(name, **layout) for name in ("adamw", "sgd", "sign", "adafactor")}
    for lane in range(2):
        parts = {name: predicted[lane].parts for name, (_, predicted) in plans.items()}
        elements = parts["adamw"]["parameters"] / 2 / (2 if state == "optimizer" else 1)
        assert parts["adamw"]["optimizer"] == 12 * elements
        assert parts["sgd"]["optimizer"] == parts["sign"]["optimizer"] == 8 * elements
        shapes = [p.shape for p in plans["adafactor"][0].parameters if lane in p.uses]
        kept = sum(4 * (sum(shape) if len(shape) > 1 else shape[0]) for shape in shapes)
        assert parts["adafactor"]["optimizer"] == 4 * elements + kept
        for name in ("sgd", "sign"):
            saved = plans["adamw"][1][lane].static_bytes - plans[name][1][lane].static_bytes
            assert saved == 4 * elements
            assert plans[name][1][lane].peak_bytes <= plans["adamw"][1][lane].peak_bytes


def test_the_time_of_the_update_follows_the_optimizer(named: dict[str, Any]) -> None:
    steps_s = {name: lanes(name, stages=2, microbatches=2)[0].prediction for name in ("adamw", "sgd", "sign")}
    assert all(steps_s.values())
    assert steps_s["sgd"].step_s == steps_s["sign"].step_s < steps_s["adamw"].step_s  # type: ignore[union-attr]


def test_a_search_plans_for_the_optimizer() -> None:
    model, cluster = toy_model(6), parse_spec("4xA100-80")
    constraints = parse_constraints(["stages=2", "replicas=1", "microbatches=4", "schedule=1f1b", "recompute=none"])
    made = [make_plan(model, cluster, replace(JOB, optimizer=name), constraints) for name in ("adamw", "adafactor")]
    assert [plan.job.optimizer for plan in made] == ["adamw", "adafactor"]
    adamw, adafactor = (max(lane.peak_bytes for lane in plan.prediction.lanes) for plan in made if plan.prediction)
    assert adafactor < adamw


def test_it_is_named_in_the_plan_file_and_shown(named: dict[str, Any]) -> None:
    plan, _ = lanes("sign", microbatches=2)
    assert '"optimizer": "sign"' in dump_text(plan) and load_text(Plan, dump_text(plan), "plan") == plan
    assert ", sign, on 1 device" in plan_headline(plan)
    check_plan(plan)
    assert named["job"].optimizer == "sign"


def test_a_plan_file_without_a_name_means_adamw() -> None:
    plan, _ = lanes("adamw", microbatches=2)
    assert '"optimizer": "adamw"' not in dump_text(plan)
    assert load_text(Plan, dump_text(plan), "plan").job.optimizer == "adamw"


def test_a_plan_of_an_unknown_optimizer_is_refused() -> None:
    plan, _ = lanes("sgd", microbatches=2)
    with pytest.raises(PlanError) as error:
        check_plan(replace(plan, job=replace(plan.job, optimizer="sign")))
    text = error.value.full_text()
    assert "job.optimizer" in text and ", ".join(sorted(OPTIMIZERS)) in text and "register_optimizer" in text
    with pytest.raises(FormatError):
        load_text(Plan, dump_text(plan).replace('"sgd"', "1"), "plan")


def test_tied_copies_on_unequal_meshes_are_refused_if_means_are_summed() -> None:
    from tests.support import worker_plans as plans

    unequal = plans.with_groups(
        plans.plan("tied", stages=3, microbatches=2), [((1, 1), (1,)), ((1,), (1,)), ((1,), (1,))]
    )
    check_plan(unequal)
    with pytest.raises(PlanError) as error:
        check_plan(replace(unequal, job=replace(unequal.job, optimizer="adafactor")))
    text = error.value.full_text()
    assert "adafactor needs equal meshes" in text and "2 different meshes" in text and "adamw" in text


def test_it_trains(named: dict[str, Any]) -> None:
    """Three steps on one rank, against the same rule on plain modules under PyTorch's autograd."""
    from tests.support import worker_cases as cases
    from tests.support import worker_plans as plans

    from pipefit.run.transfers.comms import CommGroups
    from pipefit.run.update.optimizer import OptimizerConfig
    from pipefit.run.worker.build import build_worker

    plan = plans.plan("llama", replace(plans.JOB, optimizer="sign"), microbatches=2)
    config = OptimizerConfig(lr=1e-3, weight_decay=0.0, max_norm=0.0, options={"momentum": 0.8})
    worker = build_worker(plan, plans.model("llama"), CommGroups(), torch.device("cpu"), config)
    cases.train(worker, plan, plans.VOCABULARY, range(3))
    layers = plans.plain_layers("llama", plans.JOB)
    wanted = {layer.parameter_names[k]: v for layer in layers for k, v in layer.named_parameters()}
    averages = {name: torch.zeros_like(value) for name, value in wanted.items()}
    for step in range(3):
        tokens, labels, divisor = cases.rows_of(plan, step, plans.VOCABULARY)
        for value in wanted.values():
            value.grad = None
        (plans.plain_loss(layers, tokens, labels) / divisor).backward()
        with torch.no_grad():
            for name, value in wanted.items():
                averages[name].mul_(0.8).add_(value.grad, alpha=0.2)
                value -= 1e-3 * averages[name].sign()
    found = {entry.name: entry.tensor for bucket in worker.buckets for entry in bucket.entries}
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name].detach().numpy(), value.detach().numpy(), rtol=1e-9, atol=1e-12)


def test_the_how_to_is_one_page() -> None:
    assert len(HOW_TO.read_text(encoding="utf-8").split()) <= 500, "with its two examples"
