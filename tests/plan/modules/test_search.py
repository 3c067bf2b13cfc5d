"""Plans of several modules: disjoint devices, ragged predictions, frozen modules, and nothing faster by trying all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.plan_toys import toy_model
from tests.support.three_modules import skewed_samples, three_modules

from benchmarks.plain_devices import plain_spec
from pipefit.codec import dump_text, load_text
from pipefit.errors import DoesNotFitError, PlanError
from pipefit.plan.assemble.module_parts import host_order
from pipefit.plan.assemble.pipeline_work import pipeline_work, skeleton_from_plan
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.assemble.shard_programs import ProgramCache
from pipefit.plan.check.rules import check_plan, load_plan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.explain.text import forecast_lines
from pipefit.plan.make import make_plan
from pipefit.plan.modules.orchestrate import ModuleArrangement, ModuleLayout
from pipefit.plan.modules.search import ModuleSearch
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.request.sampled_batches import StageShares, deal_samples
from pipefit.plan.types import Job, Plan, SampleArrangement

JOB = Job(batch=8, sequence=4096)
CLUSTER = plain_spec("8xA100-80")
SAMPLES = skewed_samples(8)


def made(*fixes: str, frozen: tuple[str, ...] = (), cluster: str = "8xA100-80", **more: Any) -> Plan:
    model = three_modules(frozen)
    return make_plan(
        model, plain_spec(cluster), JOB, parse_constraints(fixes), samples=more.pop("samples", SAMPLES), **more
    )


def test_a_plan_of_three_modules_is_whole_and_predicted_as_ragged_as_its_samples() -> None:
    plan, model = made("modules=disjoint"), three_modules()
    check_plan(plan, model, CLUSTER)
    assert load_text(Plan, dump_text(plan), "plan") == plan
    owners = {stage.group: stage.module for stage in plan.stages}
    devices = [(device, owners[index]) for index, group in enumerate(plan.groups) for device in group.devices]
    assert len({device for device, _ in devices}) == len(devices) <= 8, "no device of two modules"
    assert {name for _, name in devices} == {"vision", "language", "generator"}
    counts = {space.name: sum(space.counts) for space in plan.spaces}
    assert counts["patches"] == SAMPLES.tokens["patches"][0].sum() and counts["samples"] == 0
    assert plan.prediction is not None and plan.arranging is not None
    assert len(plan.arranging.loads) == len(plan.stages)
    again = simulate_plan(plan, model, CLUSTER)
    assert again.timeline.makespan_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
    assert any("disjoint" in note for note in forecast_lines(plan))
    assert plan.decisions["vision.devices"] == str(sum(name == "vision" for _, name in devices))


def test_forms_of_packed_rows_go_by_tokens_on_both_sides_of_a_seam() -> None:
    plan = made("language.stages=2", "microbatches=4", "modules=disjoint")
    rows = {
        (plan.stages[edge.source].module, plan.stages[edge.target].module): edge.forward.sent[0] for edge in plan.edges
    }
    assert rows["vision", "language"] == rows["language", "generator"] == "G1" and rows["language", "language"] == "G0"


def test_frozen_modules_have_no_backward_and_need_less() -> None:
    trained, frozen = (
        made("microbatches=4", "modules=disjoint", frozen=names, samples=None) for names in ((), ("vision",))
    )
    check_plan(frozen, three_modules(("vision",)), CLUSTER)
    words = frozen.order.lanes[0].split()
    assert "0F3" in words and not {"0B0", "0I0", "0W0", "0REDUCE"} & {*words}
    assert trained.prediction is not None and frozen.prediction is not None
    assert frozen.prediction.step_s <= trained.prediction.step_s, "the language model may be what both wait for"
    encoders = [sum(one.busy_s for one in plan.prediction.lanes[:1]) for plan in (frozen, trained)]
    assert encoders[0] < 0.7 * encoders[1]
    assert frozen.prediction.flops_per_step < trained.prediction.flops_per_step
    share = [int(plan.decisions["vision.devices"]) / len(plan.used_devices) for plan in (trained, frozen)]
    assert share[1] <= share[0]
    late = made("microbatches=4", "modules=disjoint", frozen=("generator",), samples=None)
    last = len(late.stages) - 1
    assert {f"{last}B3", f"{last}I3"} & {*late.order.lanes[-1].split()}, "gradients pass through it"


def test_no_layout_on_a_small_cluster_is_faster_in_the_simulator() -> None:
    """Every number of microbatches, replicas and stages on four devices, with 1F1B, nothing recomputed."""
    model, cluster = three_modules(), plain_spec("4xA100-80")
    constraints = parse_constraints(
        ["schedule=1f1b", "modules=disjoint", *(f"{module.name}.recompute=none" for module in model.modules)]
    )
    finder = ModuleSearch(PlannerContext(model, cluster), JOB, constraints, skewed_samples(8, 1), deal_samples)
    for count, grids in itertools.product((1, 2, 4, 8), itertools.product(*map(layouts, finder.trials.costed))):
        fits = sum(grid.device_count for grid in grids) <= 4 and all(grid.replicas <= 8 // count for grid in grids)
        if fits and all(grid.shards == 1 for grid in grids):
            decisions = finder.decisions_for(ModuleArrangement(microbatches=count, modules=grids, step_s=0.0))
            assert decisions is not None
            finder.trials.simulate_plan(decisions)
    every = min(one.step_s for one in finder.trials.fitting)
    assert len(finder.trials.fitting) > 20
    plan = make_plan(model, cluster, JOB, constraints, samples=finder.trials.samples)
    assert plan.prediction is not None and plan.prediction.step_s <= every * (1 + 1e-9)


def layouts(costed: Any) -> list[ModuleLayout]:
    """Replicas up to 2, stages up to 2, one shard."""
    cuts = costed.profile.ways[0].stage_cuts
    return [
        ModuleLayout(module=costed.profile.name, replicas=r, shards=1, cuts=bounds[1:-1], recompute="none")
        for r in (1, 2)
        for bounds in cuts.bounds
        if len(bounds) <= 3
    ]


def test_constraints_of_one_module() -> None:
    plan = made("vision.replicas=2", "language.stages=3", "microbatches=2", "generator.devices=1")
    assert plan.decisions["vision.replicas"] == "2" and plan.decisions["language.stages"] == "3"
    assert plan.decisions["generator.devices"] == "1" and plan.order.microbatches == 2


def test_a_module_that_takes_several_microbatches_together_is_planned_and_costed_so() -> None:
    """Two of them cost what their samples do, at once; nothing of the images is sent twice."""
    fixes = ("microbatches=8", "language.stages=2", "language.shards=2", "generator.devices=1")
    one, two = (made(*fixes, f"vision.multiple={multiple}", "vision.shards=1", "vision.replicas=2")
                if multiple > 1 else made(*fixes, "vision.multiple=1") for multiple in (1, 2))  # fmt: skip
    check_plan(two, three_modules(), CLUSTER)
    own = [stage for stage in two.stages if stage.module == "vision"]
    assert [(stage.microbatch_multiple, stage.turn, stage.turns) for stage in own] == [(2, 0, 2), (2, 1, 2)]
    assert two.decisions["vision.multiple"] == "2" and one.decisions["vision.multiple"] == "1"
    work, alone = (pipeline_work(skeleton_from_plan(plan), ProgramCache(three_modules())) for plan in (two, one))
    tokens = [sum(count for count, _ in each) for each in work.stages[0].packed]
    by_sample = [sum(count for count, _ in each) for each in alone.stages[0].packed]
    assert tokens[::2] == tokens[1::2] and sum(tokens) == 2 * sum(by_sample)
    vision = [index for index, edge in enumerate(two.edges) if two.stages[edge.source].module == "vision"]
    sent = [sum(size for _, _, size in work.edges[i].ragged[m][0]) for i in vision for m in range(8)]
    assert sum(size > 0 for size in sent) <= 8, "every microbatch from one of the two lanes"
    assert two.prediction is not None
    assert simulate_plan(two, three_modules(), CLUSTER).timeline.makespan_s == pytest.approx(two.prediction.step_s)


def test_the_search_takes_microbatches_together_where_that_is_faster() -> None:
    """Microbatches of one sample on a lane of four devices, which have slow links: shards of the encoder wait for them,
    replicas need four microbatches."""
    slow = plain_spec("1x4xA100-80")
    slow = replace(slow, links={name: replace(link, bandwidth_bytes_per_s=2e9) for name, link in slow.links.items()})
    constraints = ["microbatches=8", "language.stages=1", "language.shards=4", "generator.placement=shared"]
    model, samples = three_modules(("generator",)), skewed_samples(8, 1)
    free = make_plan(model, slow, JOB, parse_constraints([*constraints, "vision.placement=shared"]), samples=samples)
    alone = make_plan(model, slow, JOB, parse_constraints([*constraints, "vision.multiple=1"]), samples=samples)
    assert free.decisions["vision.multiple"] in ("4", "8") and free.decisions["vision.replicas"] == "4"
    assert free.prediction is not None and alone.prediction is not None
    assert free.prediction.step_s < 0.97 * alone.prediction.step_s


def test_constraints_that_mean_nothing_here() -> None:
    for text, seen in (("visoin.replicas=2", "visoin.replicas"), ("replicas=2", "replicas")):
        with pytest.raises(PlanError, match="several modules") as caught:
            made(text)
        assert caught.value.seen == seen and "vision.replicas" in str(caught.value.allowed)


@pytest.mark.parametrize(
    ("text", "message", "seen"),
    [
        ("vision.replicas=2:1", "replicas and shards of a module are of the same size", "2:1"),
        ("language.recompute=none,full", "use the same activation recomputation", "none,full"),
        ("microbatches=3", "cannot be cut into this many equal microbatches", "batch 8, microbatches 3"),
        ("microbatches=4 vision.multiple=3", "not a multiple of those a module processes", "3 of 4 microbatches"),
        ("vision.multiple=2 vision.shards=2", "several microbatches together cannot be sharded", "2, 2 shards"),
        (
            "vision.multiple=2 vision.placement=inline",
            "Modules inline with the largest",
            "inline, with vision.multiple",
        ),
        ("vision.multiple=2 modules=disjoint", "Only a module that shares devices", "2, placement disjoint"),
        ("language.multiple=2", "cannot share the devices of another", "2"),
        ("language.divide=images", "cannot be divided among its replicas", "it works on whole sequences"),
        ("vision.divide=images", "cannot be divided among its replicas", "samples: lognormal"),
        ("schedule=zb-v", "one stage, which this schedule does not support", "zb-v"),
    ],
)
def test_constraints_that_cannot_be_obeyed(text: str, message: str, seen: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        made(*text.split())
    assert str(caught.value.seen) == seen


def test_samples_of_another_batch() -> None:
    with pytest.raises(PlanError, match="do not have the job's size") as caught:
        made(samples=skewed_samples(9))
    assert "(2, 9)" in str(caught.value.seen)


def test_modules_that_exceed_the_cluster() -> None:
    with pytest.raises(DoesNotFitError, match="No layout of the modules fits") as caught:
        made("vision.replicas=3", "microbatches=8")
    assert "8 devices for 3 modules, batch 8" in str(caught.value)
    assert "no more replicas than samples in a microbatch" in str(caught.value)


@pytest.mark.parametrize(
    ("fixes", "where", "seen", "allowed"),
    [
        (["modules=disjoint"], "modules", "1 for vision + 1 for language + 1 for generator = 3", "2 devices"),
        (
            ["vision.devices=2", "language.stages=2"], "vision.devices, language.stages",
            "2 for vision + 2 for language = 4", "2 devices",
        ),
        (["language.replicas=2", "language.shards=2"], "language.replicas, language.shards", "4 for language", "2 dev"),
        (["devices=3"], "devices", "3", "1 to 2"),
        (["devices=1", "vision.devices=2"], "vision.devices", "2 for vision", "1 devices"),
    ],
)  # fmt: skip
def test_constraints_that_exceed_the_cluster(fixes: list[str], where: str, seen: str, allowed: str) -> None:
    with pytest.raises(PlanError, match=r"more devices than there are|does not have this many devices") as caught:
        made(*fixes, cluster="2xA100-80")
    assert (caught.value.where, str(caught.value.seen)) == (f"--fix {where}", seen)
    assert str(caught.value.allowed).startswith(allowed)


def test_dealing_out_evens_the_fullest_replica() -> None:
    """Against taking samples as they come: less on the fullest replica of a microbatch, and the same samples."""
    samples = skewed_samples(64, 1)
    plan = made("microbatches=2", "vision.replicas=2", "modules=disjoint")
    assert plan.arranging is not None
    loads = plan.arranging
    order = deal_samples(samples, 0, loads, [StageShares((1, 1)), StageShares((1,)), StageShares((1,))], 8)
    assert sorted(order.tolist()) == list(range(64))
    weight = sum(
        (one.token_s * samples.tokens[one.space][0] for one in loads.loads if one.space in samples.tokens), np.zeros(64)
    )
    dealt_out, as_they_come = (
        weight[rows].reshape(8, 2, 4).sum(axis=2).max(axis=1).sum() for rows in (order, np.arange(64))
    )
    assert weight.sum() / 2 < dealt_out < 0.85 * as_they_come
    assert dealt_out < 1.05 * weight.sum() / 2, "microbatches wait for their fullest replica next to not at all"
    alone = deal_samples(samples, 0, loads, [StageShares((1,) * 8)], 8)
    fullest, mean = weight[alone].reshape(8, 8).max(axis=1).sum(), weight.sum() / 8
    assert fullest < 1.5 * mean < weight.reshape(8, 8).max(axis=1).sum(), "one sample each: alike ones together"
    uneven = deal_samples(samples, 0, loads, [StageShares((2, 1))], 8)
    assert sorted(uneven.tolist()) == sorted(alone.tolist()) == list(range(64))
    assert deal_samples(samples, 0, SampleArrangement(balance=False), [StageShares((1,))], 8).tolist() == list(
        range(64)
    )


def test_shard_groups_stay_within_hosts() -> None:
    assert host_order([(2, 1), (8, 4), (2, 2)], [8, 4]) == ((10, 11), (0, 1, 2, 3, 4, 5, 6, 7), (8, 9))
    assert host_order([(4, 4)], [3, 3]) == ()


def test_from_the_command_line(tmp_path: Path, pipefit: Callable[..., tuple[int, str, str]]) -> None:
    """An index of images, a plan for its batches, and what explain says of it."""
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "images").mkdir()
    for number in range(16):
        image.new("RGB", (2 * (1 + number % 5), 4)).save(tmp_path / "images" / f"{number}.png")
        (tmp_path / "images" / f"{number}.txt").write_text("a picture")
    (tmp_path / "model.json").write_text(dump_text(three_modules()))

    def run(*words: str) -> tuple[int, str]:
        code, out, error = pipefit(*words)
        return code, out + error

    for name, patch in (("index", "2"), ("other", "4")):
        assert run("data", str(tmp_path / "images"), "-o", str(tmp_path / name), "--patch", patch)[0] == 0
    words = ["plan", "--model", str(tmp_path / "model.json"), "--batch", "4", "--seq", "64", "--cluster", "4xA100-80"]
    plan_file = str(tmp_path / "plan.json")
    code, out = run(*words, "--data", str(tmp_path / "index"), "--fix", "vision.replicas=1", "-o", plan_file)
    assert code == 0, out
    assert "modules: all disjoint: " in out and "modules: vision shared: " in out and "3 global batches of index" in out
    assert "cores for 4 images in steps of " in out
    plan = load_plan(plan_file)
    assert {space.name: len(space.counts) for space in plan.spaces} == {"samples": 0, "patches": 4, "latents": 4}
    assert set(plan.spaces[1].counts) <= {2, 4, 6, 8, 10} and set(plan.spaces[2].counts) == {0}
    told = run("explain", plan_file)[1]
    assert "vision.replicas" in told and "vision" in told.split("alternatives")[1]
    rows = [tuple(sorted(one.decisions.items())) for one in plan.alternatives]
    assert len({*rows, tuple(sorted(plan.decisions.items()))}) == len(rows) + 1, "no runner-up is there twice"
    short = [*words[:6], "16", *words[7:], "--data", str(tmp_path / "index")]
    code, out = run(*short)
    assert code == 2 and "longer than the sequence" in out and "--on-long skip" in out
    code, out = run(*short, "--on-long", "skip")
    assert code == 0 and "3 global batches of index, 6 samples left out that are longer" in " ".join(out.split())
    code, out = run(*short, "--on-long", "cut")
    assert code == 2 and "--on-long" in out and "fail or skip" in out
    code, out = run(*words[:-1], "2xA100-80", "--data", str(tmp_path / "index"), "--fix", "modules=disjoint")
    assert code == 2 and "The modules need more devices than there are." in out and "where: --fix modules" in out
    assert "seen: 1 for vision + 1 for language" in out and "allowed: 2 devices" in out and "try: fewer replicas" in out
    code, out = run(*words, "--data", str(tmp_path / "index"), "--held-out", "16")
    assert code == 2 and "no sample left to train on" in out
    assert run(*words, "--data", str(tmp_path / "index"), "--pack", "-o", plan_file)[0] == 0
    assert max(load_plan(plan_file).spaces[1].counts) > 10, "several samples in a sequence"
    code, out = run(*words, "--data", str(tmp_path / "other"))
    assert code == 2 and "The patches of the images do not fit the model" in out and "--patch 2" in out
    (tmp_path / "text.json").write_text(dump_text(toy_model(2)))
    words[2] = str(tmp_path / "text.json")
    code, out = run(*words, "--data", str(tmp_path / "index"))
    assert code == 2 and "Only a model with images can be planned for an index of samples." in out


def test_words_name_every_module() -> None:
    plan = made("microbatches=4", "modules=disjoint")
    assert {key.partition(".")[0] for key in plan.decisions if "." in key} == {"vision", "language", "generator"}
    assert MultiModuleConfig(modules=()).to_constraints(())["modules"] == plan.decisions["modules"] == "disjoint"
