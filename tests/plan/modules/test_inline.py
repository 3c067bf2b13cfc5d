"""Modules in line with the largest one: whole plans, nothing monolithic that is faster, what cannot be asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.plan.modules.test_search import CLUSTER, JOB, made
from tests.support.three_modules import skewed_samples, three_modules

from benchmarks.plain_devices import plain_spec
from pipefit.codec import dump_text, load_text
from pipefit.errors import PlanError
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.check.rules import check_plan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.explain.text import choice_cells, forecast_lines
from pipefit.plan.make import make_plan
from pipefit.plan.modules.inline import inline_layouts, join_modules
from pipefit.plan.modules.module_budgets import DIVISION_BUDGET
from pipefit.plan.modules.profile import ModuleProfile, ModuleVariant
from pipefit.plan.modules.search import ModuleSearch
from pipefit.plan.request.constraints import NO_CONSTRAINTS, parse_constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.request.sampled_batches import deal_samples
from pipefit.plan.types import Plan

NAMES = ("vision", "language", "generator")


def test_a_plan_in_line_is_whole_and_simulated() -> None:
    plan, model = made("modules=inline", "language.stages=3", "microbatches=4"), three_modules()
    check_plan(plan, model, CLUSTER)
    assert load_text(Plan, dump_text(plan), "plan") == plan
    assert [stage.module for stage in plan.stages] == ["vision", *["language"] * 3, "generator"]
    assert plan.order.placement == (0, 0, 1, 2, 2) and all(stage.turns == 1 for stage in plan.stages)
    assert [stage.group for stage in plan.stages] == [0, 0, 1, 2, 2], "no group of its own"
    assert plan.prediction is not None
    again = simulate_plan(plan, model, CLUSTER)
    assert again.timeline.makespan_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
    forwards = [word for word in plan.order.lanes[0].split() if word[1] == "F"]
    assert forwards == [f"{stage}F{m}" for m in range(4) for stage in (0, 1)]
    notes = "\n".join(forecast_lines(plan))
    assert "modules: generator and vision on the devices of language (inline)" in notes
    assert "modules: no other placement was looked at" in notes
    assert plan.decisions["modules"] == plan.decisions["vision.placement"] == "inline"
    assert "vision.devices" not in plan.decisions and "vision.stages" not in plan.decisions


def test_a_plan_is_found_again_by_its_own_words() -> None:
    plan = made("modules=inline")
    words = [f"{key}={value}" for key, value in plan.decisions.items() if not key.endswith(("sharding", "cuts"))]
    again = made(*words)
    assert again.prediction is not None and plan.prediction is not None
    assert again.decisions == plan.decisions and again.prediction.step_s == plan.prediction.step_s


def test_modules_in_line_may_have_grids_of_their_own() -> None:
    """One with fewer shards than the lane has devices has so many times more replicas there, in a group of its own."""
    fixes = ("modules=inline", "language.stages=2", "language.replicas=1", "language.shards=2", "microbatches=4")
    grids = {"vision": (2, 1), "generator": (1, 2)}
    fixes += tuple(
        f"{name}.{key}={own[at]}" for name, own in grids.items() for at, key in enumerate(("replicas", "shards"))
    )
    plan, model = made(*fixes), three_modules()
    check_plan(plan, model, CLUSTER)
    assert plan.order.placement == (0, 0, 1, 1) and [stage.group for stage in plan.stages] == [0, 1, 2, 2]
    one, other = plan.groups[:2]
    assert one.devices == other.devices and [len(axis.shares) for axis in one.axes] == [2, 1]
    assert plan.prediction is not None
    again = simulate_plan(plan, model, CLUSTER)
    assert again.timeline.makespan_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
    assert (plan.decisions["vision.replicas"], plan.decisions["generator.shards"]) == ("2", "2")


def test_a_frozen_encoder_in_line_has_its_forward_alone() -> None:
    fixes = ("modules=inline", "language.stages=2", "language.replicas=2", "microbatches=4")
    trained, frozen = (made(*fixes, frozen=names, samples=None) for names in ((), ("vision",)))
    check_plan(frozen, three_modules(("vision",)), CLUSTER)
    words = {*frozen.order.lanes[0].split()}
    assert "0F3" in words and not {"0B0", "0I0", "0REDUCE"} & words and "1B3" in words
    assert trained.prediction is not None and frozen.prediction is not None
    assert frozen.prediction.step_s < trained.prediction.step_s


def monolithic(
    finder: ModuleSearch, devices: int, stages: Sequence[int], replicas: Sequence[int], counts: Sequence[int]
) -> Iterator[MultiModuleConfig]:
    """Every module with the same replicas, shards and recomputation, one behind the other on lanes of their own, or
    with the ends on the language model's lanes; the language model in so many stages, in every cut."""
    layers = len(finder.context.model.modules[1].layers)
    for ends, shards, several, each, count in itertools.product((0, 2), (1, 2), stages, replicas, counts):
        fits = (several + ends) * each * shards <= devices and count * each <= JOB.batch
        every = itertools.combinations(range(1, layers), several - 1) if fits else ()
        for cuts, again in itertools.product(every, ("none", "full")):
            common: dict[str, Any] = {"microbatches": count, "sharded_state": "optimizer"}
            own: dict[str, Any] = {"replicas": (1,) * each, "shards": (1,) * shards, "recompute": (again,)}
            modules, first = [], 0
            for costed in finder.trials.costed:
                language = costed.profile.name == "language"
                size = (several if language else ends // 2) * each * shards
                lies: dict[str, Any] = {"devices": tuple(range(first, first + size))}
                lies |= {"stages": several, "cuts": cuts} if language else {}
                how = next(way.sharding for way in costed.ways if way.shards == shards)
                modules.append((costed.profile.name, ParallelConfig(**common, **own, **lies, sharding=how)))
                first += size
            for schedule in ("1f1b", "eager-1f1b", "zb-h1")[: 3 if several + ends > 1 else 1]:
                yield MultiModuleConfig(
                    **common, schedule=schedule, modules=tuple(modules), backbone="language",
                    inline=() if ends else ("vision", "generator"),
                )  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "memory_bytes", "fixes", "grids"),
    [
        ("2x2xA100-80:2GB/s", 80e9, (), ((1, 2), (2, 4), (1, 2, 4))),
        ("4xA100-80", 2.6e8, (), ((1, 2), (1, 2, 4), (2, 4, 8))),
        ("4xA100-80", 80e9, ("language.replicas=1", "language.shards=1", "microbatches=8"), ((2, 3, 4), (1,), (8,))),
    ],
)
def test_no_monolithic_layout_on_a_small_cluster_is_faster_in_the_simulator(
    spec: str, memory_bytes: float, fixes: tuple[str, ...], grids: tuple[tuple[int, ...], ...]
) -> None:
    """With much memory, with little, and where it has to be a pipeline."""
    model, cluster, samples = three_modules(), plain_spec(spec), skewed_samples(8, 1, mean=300)
    kinds = {name: replace(kind, memory_bytes=int(memory_bytes)) for name, kind in cluster.kinds.items()}
    cluster, constraints = replace(cluster, kinds=kinds), parse_constraints(fixes)
    finder = ModuleSearch(PlannerContext(model, cluster), JOB, NO_CONSTRAINTS, samples, deal_samples)
    for one in monolithic(finder, 4, *grids):
        if constraints.of_module("language").shards is None or not one.is_sharded:
            finder.trials.simulate_plan(one)
    assert len(finder.trials.fitting) >= 10 and {
        one.decisions.to_constraints(())["modules"] for one in finder.trials.fitting
    } >= {"inline"}
    best = min(finder.trials.fitting, key=lambda one: one.step_s)
    plan = make_plan(model, cluster, JOB, constraints, samples=samples)
    assert plan.prediction is not None and plan.prediction.step_s <= best.step_s * (1 + 1e-9)


def profile(name: str, layers: int, seconds: float, **more: Any) -> ModuleProfile:
    """Every layer alike; two shards take two thirds of the time each."""
    each = np.ones(layers)
    ways = [
        ModuleVariant(
            shards=shards, recompute="none", fixed_s=0.1 * part * each, sample_s=seconds * part * each,
            static_bytes=6.0 / shards * each, state_bytes=4.0 / shards * each, saved_bytes=2.0 / shards * each,
            passing_bytes=3.0 * each, gradient_bytes=4.0 * each,
        )
        for shards, part in ((1, 1.0), (2, 2 / 3))
    ]  # fmt: skip
    return ModuleProfile(name=name, ways=tuple(ways), **{"overhead_s": 0.01, "workspace_bytes": 1.0} | more)


CHAIN = (profile("vision", 2, 0.5), profile("language", 6, 1.0), profile("generator", 1, 0.7))


def divided(way: ModuleVariant, part: float) -> ModuleVariant:
    """What a replica of the backbone has of it."""
    return replace(
        way, sample_s=way.sample_s * part, state_bytes=way.state_bytes * part, saved_bytes=way.saved_bytes * part
    )


@pytest.mark.parametrize("limit_bytes", [1e9, 60.0])
def test_the_closed_form_is_that_of_every_layout(limit_bytes: float) -> None:
    """All counts of stages, replicas, shards and microbatches, the lanes summed up layer by layer. Modules with fewer
    shards have more replicas, which take and hold less of what is divided among these."""
    steps = []
    ways = [(0, 0, 0), *((vision, 1, generator) for vision in (0, 1) for generator in (0, 1))]
    for way, stages, replicas, count in itertools.product(ways, range(1, 7), range(1, 9), (1, 2, 4, 8)):
        samples, shards = 8 // count, way[1] + 1
        if replicas * stages * shards > 8 or max(replicas * shards // (own + 1) for own in way) > samples:
            continue
        layers = [
            (one.name, divided(one.ways[own], (own + 1) / shards), index)
            for one, own in zip(CHAIN, way, strict=True)
            for index in range(len(one.ways[own].fixed_s))
        ]
        for cuts in itertools.combinations(range(1, 6), stages - 1):
            bounds = [0, *(2 + cut for cut in cuts), len(layers)]
            lanes = [layers[start:stop] for start, stop in itertools.pairwise(bounds)]
            most = -(-samples // replicas)
            seconds = [
                sum(float(own.fixed_s[i] + most * own.sample_s[i]) for _, own, i in lane)
                + 0.01 * len({name for name, _, _ in lane})
                for lane in lanes
            ]
            fits = all(
                1.0 + sum(float(own.static_bytes[i] + own.state_bytes[i] / replicas) for _, own, i in lane)
                + most * (3.0 + min(count, stages - place) * sum(float(own.saved_bytes[i]) for _, own, i in lane))
                <= limit_bytes
                for place, lane in enumerate(lanes)
            )  # fmt: skip
            if fits:
                steps.append(sum(seconds) + (count - 1) * max(seconds))
    found = inline_layouts(CHAIN, 8, 8, limit_bytes)
    assert found.best[0].step_s == pytest.approx(min(steps)) and len(found.best) <= 6 * DIVISION_BUDGET.inline_layouts
    for one in found.best:
        assert one.inline_names == ("vision", "generator") and one.device_count <= 8
        assert len({each.replicas * each.shards for each in one.modules}) == 1
    grids = [{each.shards for each in one.modules} for one in found.best]
    assert {1, 2} in grids, "a grid of its own"
    alike = [one for one, grid in zip(found.best, grids, strict=True) if len(grid) == 1]
    assert len({one.modules[1].stage_count for one in alike}) >= 3, (
        "monolithic ones of several stages, the slow ones too"
    )


def test_modules_that_do_not_go_together_are_not_joined() -> None:
    never, only_alone = np.zeros((2, 2), dtype=bool), np.array([[True, False], [False, False]])
    assert not join_modules(CHAIN, [never, never]).profile.ways
    assert not inline_layouts(CHAIN, 8, 8, 1e9, passes=[never, never]).best
    assert [way.shards for way in join_modules(CHAIN, [only_alone, only_alone]).profile.ways] == [1]
    assert not inline_layouts(CHAIN, 8, 8, 1e9, fixed={"vision": {"replicas": 1}, "language": {"replicas": 2}}).best
    pinned = inline_layouts(CHAIN, 8, 8, 1e9, fixed={"vision": {"replicas": 2}}).best
    assert pinned and all(one.modules[0].replicas == 2 for one in pinned)
    assert {one.modules[1].replicas for one in pinned} == {1, 2}, "one with two shards, or two"
    for pair, name in ((CHAIN[:2], "vision"), (CHAIN[1:], "generator")):
        assert {one.inline_names for one in inline_layouts(pair, 8, 8, 1e9).best} == {(name,)}


@pytest.mark.parametrize(
    ("fixes", "message", "seen"),
    [
        (("language.placement=inline",), "cannot be inline with the largest", "inline"),
        (("vision.placement=inline", "generator.placement=disjoint"), "all of them together", "generator.placement"),
        (("modules=inline", "vision.stages=2"), "all of them together", "vision.stages"),
        (("modules=inline", "vision.replicas=1", "language.replicas=2"), "its devices, all", "language.replicas"),
        (("modules=inline", "vision.shards=2", "language.shards=1"), "its devices, all", "language.shards"),
        (
            ("modules=inline", "vision.replicas=4", "vision.shards=1", "language.replicas=1", "language.shards=2"),
            "its devices, all",
            "vision.replicas",
        ),
        (("modules=shared", "vision.placement=inline"), "all of them together", "modules"),
        (("modules=beside",), "valid value for 'modules'", "modules=beside"),
    ],
)
def test_what_cannot_be_in_line(fixes: tuple[str, ...], message: str, seen: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        made(*fixes)
    assert seen in str(caught.value.seen) and (caught.value.allowed or caught.value.next_step)


def test_constraints_that_leave_nothing_in_line() -> None:
    """Where modules are pinned elsewhere, or apart in shape, the search goes on without."""
    for fixes in (("vision.stages=1",), ("generator.placement=shared",), ("modules=disjoint",)):
        more = ("microbatches=2", "language.stages=2", "language.replicas=2", "language.shards=1")
        assert "inline" not in "\n".join(forecast_lines(made(*fixes, *more, samples=skewed_samples(8, 1))))


def test_a_cell_of_alternatives_says_where_a_module_lies():
    """In place of stages, which a module in line or in turns has none of its own of."""
    words = {"replicas": "2", "shards": "1", "recompute": "none"}
    for placement in ("shared", "inline"):
        decisions = {f"vision.{key}": value for key, value in (words | {"placement": placement}).items()}
        assert choice_cells(decisions, ["vision"]) == [f"2 x {placement} x 1"]
