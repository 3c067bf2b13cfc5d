"""Layouts next to a layout: each differs in one thing that may, and going from one to the next finds the best. And the
last step of the search: what does not fit on every batch gives way to what does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.modules.test_search import CLUSTER, JOB
from tests.support.three_modules import skewed_samples, three_modules

from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.modules.module_budgets import MODULE_SEARCH_BUDGET
from pipefit.plan.modules.polish import neighbour_layouts, polish_plan
from pipefit.plan.modules.search import ModuleSearch
from pipefit.plan.modules.trials import plain_decisions
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.request.sampled_batches import deal_samples


def finder(batches: int = 1) -> ModuleSearch:
    return ModuleSearch(
        PlannerContext(three_modules(), CLUSTER),
        JOB,
        NO_CONSTRAINTS,
        skewed_samples(8, batches, mean=300),
        deal_samples,
    )


def in_line(cuts: tuple[int, ...], recompute: str = "none") -> MultiModuleConfig:
    """All modules on two lanes of two devices, whose shards the language model splits."""
    common = {"microbatches": 4, "sharded_state": "optimizer"}
    split = {"replicas": (1,), "shards": (1, 1), "sharding": "megatron-sp", "recompute": (recompute,)}
    language = ParallelConfig(**common, **split, stages=2, cuts=cuts, devices=(0, 1, 2, 3))
    ends = ParallelConfig(**common, **split)
    return MultiModuleConfig(
        **common, schedule="1f1b", backbone="language", inline=("vision", "generator"),
        modules=(("vision", ends), ("language", language), ("generator", ends)),
    )  # fmt: skip


def changes(one: MultiModuleConfig, other: MultiModuleConfig) -> list[tuple[str, str]]:
    """(module, what differs there) of two layouts."""
    keys = ("replicas", "shards", "cuts", "recompute")
    pairs = zip(one.modules, other.modules, strict=True)
    return [(name, key) for (name, own), (_, new) in pairs for key in keys if getattr(own, key) != getattr(new, key)]


def test_everything_next_to_a_layout_differs_in_one_thing() -> None:
    own, costed = in_line((1,)), finder().trials.costed
    found = [
        tuple(changes(own, other))
        for other in neighbour_layouts(own, costed, 2, {}, Constraints(sharded_state="optimizer"))
    ]
    again = [((name, "recompute"),) for name in ("vision", "language", "generator")]
    grids = [((name, "replicas"), (name, "shards")) for name in ("vision", "generator")]
    assert sorted(found) == sorted([*again, *grids, (("language", "cuts"),)]), "before layer 1 there is no cut"
    per_module = {"vision": Constraints(recompute=("none",)), "generator": Constraints(shards=(1, 1))}
    kept = Constraints(sharded_state="optimizer", per_module=per_module)
    pinned = [tuple(changes(own, other)) for other in neighbour_layouts(own, costed, 2, {}, kept)]
    assert {*found} - {*pinned} == {again[0], grids[1]}
    few = [
        tuple(changes(own, other))
        for other in neighbour_layouts(own, costed, 1, {}, Constraints(sharded_state="optimizer"))
    ]
    assert {*found} - {*few} == {*grids}, "a sample for every replica"
    whole = next(
        other for other in neighbour_layouts(own, costed, 2, {}, NO_CONSTRAINTS) if other.sharded_state == "none"
    )
    assert not changes(own, whole) and all(one.sharded_state == "none" for _, one in whole.modules), (
        "optimizer state on every replica"
    )
    some = [other for other in neighbour_layouts(own, costed, 2, {}, NO_CONSTRAINTS) if changes(own, other)]
    (wide,) = (other for other in some if changes(own, other)[0] == ("vision", "replicas"))
    assert (("vision", "replicas"), ("vision", "shards")) in [
        tuple(changes(wide, back)) for back in neighbour_layouts(wide, costed, 2, {}, NO_CONSTRAINTS)
    ]


def test_next_to_a_layout_replicas_divide_images_where_samples_have_several() -> None:
    """A microbatch of one sample with four images: four replicas of one shard each have one, but no sample."""
    own, costed = in_line((1,)), finder().trials.costed

    def grids(one: MultiModuleConfig, **per_module: Constraints) -> set[tuple[int, int, bool]]:
        neighbours = neighbour_layouts(one, costed, 1, {"vision": 4.0}, Constraints(per_module=per_module))
        each = [(other, dict(other.modules)["vision"]) for other in neighbours]
        return {(len(v.replicas), len(v.shards), "vision" in other.divided) for other, v in each}

    assert grids(own) == {(1, 2, False), (2, 1, True)}, "a single replica has nothing to divide"
    assert grids(own, vision=Constraints(divide="samples")) == {(1, 2, False)}
    assert grids(own, vision=Constraints(shards=(1, 1))) == {(1, 2, False)}
    wide = next(o for o in neighbour_layouts(own, costed, 1, {"vision": 4.0}, NO_CONSTRAINTS) if o.divided)
    assert wide.to_constraints(())["vision.divide"] == "images" and "images divided" in wide.to_text()
    assert wide.shares_of_stages[0] == ((1, 1), 1, "images")
    assert (2, 1, False) not in grids(wide), "two replicas for one sample"
    four = replace(
        wide, modules=((wide.modules[0][0], replace(wide.modules[0][1], replicas=(1,) * 4)), *wide.modules[1:])
    )
    assert not {(2, 2, False), (4, 1, False)} & grids(four), "nor half of four"


def test_next_to_a_module_on_shared_lanes_it_takes_more_or_fewer_microbatches_together() -> None:
    """Two lanes of two devices, eight microbatches of a sample: two replicas need two of them."""
    common = {"microbatches": 8, "sharded_state": "optimizer"}
    language = ParallelConfig(**common, stages=2, cuts=(2,), replicas=(1,), shards=(1, 1), sharding="megatron-sp",
                         devices=(0, 1, 2, 3))  # fmt: skip
    own = MultiModuleConfig(
        **common, schedule="1f1b", backbone="language", guests=("vision",), inline=(),
        modules=(("vision", ParallelConfig(**common, replicas=(1,), shards=(1, 1), sharding="megatron-sp")),
                 ("language", language), ("generator", ParallelConfig(**common, devices=(4,)))),
    )  # fmt: skip

    def multiples(one: MultiModuleConfig, samples: int, **per_module: Constraints) -> list[tuple[int, int, int]]:
        constraints = Constraints(per_module=per_module)
        grids = [
            (dict(each.modules)["vision"], each)
            for each in neighbour_layouts(one, finder().trials.costed, samples, {}, constraints)
        ]
        found = [(each.multiple_of("vision"), len(grid.replicas), len(grid.shards)) for grid, each in grids]
        return sorted({*found} - {(one.multiple_of("vision"), *map(len, (grids[0][0].replicas, grids[0][0].shards)))})

    assert multiples(own, 1) == [(2, 2, 1), (4, 2, 1)], "a unit for either lane, and no shards"
    assert multiples(own, 1, vision=Constraints(multiple=1)) == []
    assert multiples(own, 1, vision=Constraints(shards=(1, 1))) == []
    four = next(
        each
        for each in neighbour_layouts(own, finder().trials.costed, 1, {}, NO_CONSTRAINTS)
        if each.multiple_of("vision") == 4
    )
    assert (2, 2, 1) in multiples(four, 1) and (1, 2, 1) not in multiples(four, 1)
    assert {**four.to_constraints(())}["vision.multiple"] == "4" and "4 microbatches together" in four.to_text()


def test_going_from_one_to_the_next_gets_to_the_best_of_them_all() -> None:
    """From the worst cut with everything recomputed, as far as trying every cut, recomputation and grid goes."""
    search, known = finder(), dict[MultiModuleConfig, EvaluatedPlan]()
    start = search.trials.simulate_plan(in_line((1,), "full"))
    assert start is not None
    todo = [replace(start.decisions, cuts=())]
    while todo:
        own = todo.pop()
        for other in neighbour_layouts(own, search.trials.costed, 2, {}, NO_CONSTRAINTS):
            if other not in known and (made := search.trials.simulate_plan(other)) is not None:
                known[other] = made
                todo.append(other)
    assert len(known) >= 32, "two recomputations of three modules, two grids of two"
    best = polish_plan(start, search.fitting_neighbours)
    assert best.step_s < start.step_s and best.step_s == min(one.step_s for one in known.values())


@pytest.mark.parametrize("refused", [1, 2, 3, 4, 5, 6, 10**6])
def test_plans_that_do_not_fit_on_a_later_batch_give_way(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    search = finder(2)
    search.simulate_all(search.short_list(1e12))
    ranked = sorted(search.trials.fitting, key=lambda one: one.rank_key)
    too_large = {one.decisions.to_text() for one in ranked[:refused] if isinstance(one.decisions, MultiModuleConfig)}
    real = search.trials.on_all

    def on_all(one: EvaluatedPlan, order: bool) -> list[EvaluatedPlan]:
        return [] if plain_decisions(one).to_text() in too_large else real(one, order)

    monkeypatch.setattr(search.trials, "on_all", on_all)
    search.rank_on_batches()
    left = [one.decisions.to_text() for one in search.trials.fitting if isinstance(one.decisions, MultiModuleConfig)]
    if refused > len(ranked):
        assert not left, "nothing fits"
        return
    means_s = search.mean_s()
    count = MODULE_SEARCH_BUDGET.settled_plans
    assert len(means_s) >= count and not too_large & {*left[:count]}
    best_s = min(means_s.values())
    assert means_s[id(search.trials.fitting[0])] == best_s
    rest = [one for one in search.trials.fitting if id(one) not in means_s]
    assert all(one.step_s >= best_s for one in rest), "who is faster on the first batch was tried on all"


def test_the_arrangement_is_that_of_the_best_also_where_another_placement_has_the_same_grids() -> None:
    inline = in_line((1,))
    shared = replace(inline, guests=inline.inline, inline=(), ahead=2)
    assert shared.modules == inline.modules
    found = []
    for decisions in (inline, shared):
        search = finder()
        assert search.trials.simulate_plan(inline) and search.trials.simulate_plan(shared)
        search.trials.fitting.sort(key=lambda one, best=decisions: plain_decisions(one) != best)  # type: ignore[misc]
        del search.trials.fitting[1:]
        search.rank_on_batches()
        found.append(search.build_result().arranging)
        assert found[-1] == search.trials.arranging_for(decisions, found[-1].order)
    assert found[0] != found[1]
