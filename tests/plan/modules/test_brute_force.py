"""Plans of several modules without constraints against all that is possible on a small cluster, in the simulator:
modules apart, on shared devices and in line, trained and frozen, with much memory and with little. And what the search
knows of frozen modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import pytest
from tests.plan.modules.test_inline import monolithic
from tests.plan.modules.test_search import JOB
from tests.support.three_modules import skewed_samples, three_modules

from benchmarks.plain_devices import plain_spec
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.make import make_plan
from pipefit.plan.modules.orchestrate import ModuleArrangement, ModuleLayout
from pipefit.plan.modules.search import ModuleSearch, first_guest_orders, other_families
from pipefit.plan.request.constraints import NO_CONSTRAINTS
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.request.sampled_batches import deal_samples

DEVICES = 4
SAMPLES = skewed_samples(8, 1, mean=300)


def finder(memory_bytes: float, frozen: tuple[str, ...]) -> ModuleSearch:
    cluster = plain_spec(f"{DEVICES}xA100-80")
    kinds = {name: replace(kind, memory_bytes=int(memory_bytes)) for name, kind in cluster.kinds.items()}
    return ModuleSearch(
        PlannerContext(three_modules(frozen), replace(cluster, kinds=kinds)), JOB, NO_CONSTRAINTS, SAMPLES, deal_samples
    )


def grids(search: ModuleSearch, name: str, recompute: str) -> list[ModuleLayout]:
    """Replicas and shards, of the language model one stage or two in every cut, of others one."""
    layers = next(len(one.layers) for one in search.context.model.modules if one.name == name)
    cuts = [(), *((cut,) for cut in range(1, layers))] if name == "language" else [()]
    return [
        ModuleLayout(module=name, replicas=replicas, shards=shards, cuts=each, recompute=recompute)
        for replicas, shards, each in itertools.product((1, 2, 3, 4), (1, 2), cuts)
        if replicas * shards * (len(each) + 1) <= DEVICES
    ]


def apart(search: ModuleSearch, recompute: str) -> Iterator[MultiModuleConfig]:
    """Every module on devices of its own."""
    each = [grids(search, module.name, recompute) for module in search.context.model.modules]
    for count, layouts in itertools.product((1, 2, 4, 8), itertools.product(*each)):
        if sum(one.device_count for one in layouts) <= DEVICES and all(one.replicas * count <= 8 for one in layouts):
            made = search.decisions_for(ModuleArrangement(microbatches=count, modules=layouts, step_s=0.0))
            if made is not None:
                yield from (replace(made, schedule=name) for name in ("1f1b", *other_families()))


def shared(search: ModuleSearch, recompute: str) -> Iterator[MultiModuleConfig]:
    """One of the small modules or both on all lanes of the language model, in every grid."""
    for guests in (("vision",), ("generator",), ("vision", "generator")):
        each = []
        for module in search.context.model.modules:
            found = grids(search, module.name, recompute)
            each.append([replace(one, shared=module.name in guests) for one in found])
        for count, layouts in itertools.product((1, 2, 4, 8), itertools.product(*each)):
            lane = layouts[1].replicas * layouts[1].shards
            own = [one for one in layouts if not one.shared]
            fits = (
                all(one.device_count == lane for one in layouts if one.shared)
                and sum(o.device_count for o in own) <= DEVICES
            )
            if not fits or any(one.replicas * count > 8 for one in layouts) or layouts[1].stage_count > count:
                continue
            made = search.decisions_for(ModuleArrangement(microbatches=count, modules=layouts, step_s=0.0))
            if made is not None:
                yield from search.with_orders(made, first_guest_orders())


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [(), ("vision",)], ids=["trained", "frozen"])
@pytest.mark.parametrize("memory_bytes", [80e9, 3.6e8])
def test_nothing_that_is_possible_is_faster_in_the_simulator(memory_bytes: float, frozen: tuple[str, ...]) -> None:
    search = finder(memory_bytes, frozen)
    every = [*monolithic(search, DEVICES, (1, 2), (1, 2, 4), (1, 2, 4, 8))]
    for recompute in ("none",) if memory_bytes > 1e9 else ("none", "full"):
        every += [*apart(search, recompute), *shared(search, recompute)]
    for one in every:
        search.trials.simulate_plan(one)
    fitting = search.trials.fitting
    assert len(fitting) > 50 and {one.decisions.to_constraints(())["modules"] for one in fitting} == {
        "disjoint", "shared", "inline",
    }  # fmt: skip
    assert bool(search.trials.misfits) == (memory_bytes < 1e9), "the little memory binds"
    best = min(fitting, key=lambda one: one.step_s)
    plan = make_plan(search.context.model, search.context.cluster, JOB, samples=SAMPLES)
    assert plan.prediction is not None and plan.prediction.step_s <= best.step_s * (1 + 1e-9), best.decisions.to_text()
    assert search.trials.work_bound_s() <= best.step_s


@lru_cache
def profiles(frozen: tuple[str, ...]) -> dict[str, tuple[float, float, float, float, float]]:
    """Of every module alone on a device, nothing recomputed: seconds of a sample, bytes of gradients, of optimizer
    state and of what is kept, and the backward in forwards."""
    found = {}
    for costed in finder(80e9, frozen).trials.costed:
        at = next(i for i, way in enumerate(costed.profile.ways) if (way.shards, way.recompute) == (1, "none"))
        way = costed.profile.ways[at]
        sums = (way.sample_s, way.gradient_bytes, way.state_bytes, way.saved_bytes)
        found[costed.profile.name] = (*(float(one.sum()) for one in sums), costed.ways[at].load.backward)
    return found


@pytest.mark.parametrize(
    ("frozen", "factors"),
    [
        (("vision",), {"vision": 0, "language": 2, "generator": 2}),
        (("language",), {"vision": 2, "language": 1, "generator": 2}),
        (("vision", "language"), {"vision": 0, "language": 0, "generator": 2}),
        (("generator",), {"vision": 2, "language": 2, "generator": 1}),
    ],
)
def test_modules_are_profiled_as_they_are_trained(frozen: tuple[str, ...], factors: dict[str, int]) -> None:
    """No backward, that of inputs alone, or the whole: 0, 1 and 2 forwards, and what has to be held for it."""
    plain, found = profiles(()), profiles(frozen)
    for name, factor in factors.items():
        sample_s, gradients, state, saved, backward = found[name]
        whole_s, all_gradients, all_state, all_saved, twice = plain[name]
        assert (factor - 0.7) < backward < factor + 0.5 and (backward == 0) == (factor == 0)
        assert backward == twice if factor == 2 else backward < 0.8 * twice
        assert sample_s == pytest.approx(whole_s * (1 + backward) / (1 + twice), rel=0.15)
        trained = factor == 2
        assert (gradients, state) == ((all_gradients, all_state) if trained else (0, 0))
        assert saved == all_saved if trained else saved < all_saved
        assert (saved == 0) == (factor == 0)
