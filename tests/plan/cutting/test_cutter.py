"""The cut of a model with a heavy embedding and head under a V, both on lane 0, against trying every cut."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from benchmarks.plain_devices import plain_spec
from pipefit.cluster.types import Cluster
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Model
from pipefit.model.registry import describe_config
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan
from pipefit.schedule import FAMILIES
from pipefit.simulate import simulate_schedule

JOB = Job(batch=16, sequence=2048, precision="bfloat16")
V_FAMILIES = ("1f1b-v", "v-half", "v-min", "v-zb", "zb-v")


@lru_cache
def model(blocks: int, vocabulary: int) -> Model:
    """Blocks between an embedding and a head; of 128,256 tokens the head takes as long as eight blocks."""
    config = {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": 1024, "intermediate_size": 2816,
        "num_hidden_layers": blocks, "num_attention_heads": 16, "num_key_value_heads": 16,
    }  # fmt: skip
    described = describe_config(config, "heavy", "test")
    return capture_family(described.family, described.config)


def cluster(devices: int, memory_bytes: int | None = None) -> Cluster:
    made = plain_spec(f"{devices}xA100-80")
    if memory_bytes is None:
        return made
    return replace(made, kinds={key: replace(one, memory_bytes=memory_bytes) for key, one in made.kinds.items()})


def decisions(family: str, devices: int, cuts: tuple[int, ...] = ()) -> ParallelConfig:
    placement = FAMILIES[family].placement(devices)
    return ParallelConfig(
        stages=0 if cuts else len(placement), placement=placement, schedule=family, microbatches=16, cuts=cuts
    )


@lru_cache
def every_cut(family: str, devices: int, blocks: int, vocabulary: int) -> dict[tuple[int, ...], tuple[float, float]]:
    """Cuts -> (simulated step, largest peak of a lane), for all of them."""
    context = PlannerContext(model(blocks, vocabulary), cluster(devices))
    stages = len(FAMILIES[family].placement(devices))
    result = {}
    for cuts in itertools.combinations(range(1, len(context.only_module.layers)), stages - 1):
        chosen = decisions(family, devices, cuts)
        parts = context.make_skeleton(JOB, chosen)
        costs = context.build_cost_table(parts)
        timeline = simulate_schedule(context.build_schedule(parts, chosen, costs), costs)
        result[cuts] = (timeline.makespan_s, float(timeline.peak_bytes.max()))
    return result


def planned(family: str, devices: int, blocks: int, vocabulary: int, memory_bytes: int | None = None) -> Plan:
    return build_plan(model(blocks, vocabulary), cluster(devices, memory_bytes), JOB, decisions(family, devices))


def cuts_of(plan: Plan) -> tuple[int, ...]:
    return tuple(stage.layers[0] for stage in plan.stages[1:])


@pytest.mark.parametrize("family", V_FAMILIES)
@pytest.mark.parametrize(("devices", "blocks", "vocabulary"), [(2, 8, 128_256), (3, 7, 64_000)])
def test_hardly_any_cut_is_faster_and_equal_layers_are_slower(
    family: str, devices: int, blocks: int, vocabulary: int
) -> None:
    """Within 1 % of the best of all cuts in simulated step time; equal blocks with the embedding and the head beside
    the first and the last are at least 5 % slower."""
    every = every_cut(family, devices, blocks, vocabulary)
    best_s = min(step_s for step_s, _ in every.values())
    step_s, _ = every[cuts_of(planned(family, devices, blocks, vocabulary))]
    assert step_s <= 1.01 * best_s
    stages, layers = 2 * devices, len(model(blocks, vocabulary).modules[0].layers)
    equal = tuple(1 + int(cut) for cut in np.round(np.linspace(0, layers - 2, stages + 1))[1:-1])
    assert every[equal][0] >= 1.05 * step_s


@pytest.mark.parametrize("family", ["v-half", "1f1b-v"])
def test_within_a_memory_limit_it_is_the_best_that_fits(family: str) -> None:
    """A limit that the fastest cut exceeds: the plan fits, and hardly any cut that fits is faster."""
    every = every_cut(family, 2, 8, 128_256)
    fastest = min(every.values())
    leanest = min(peak for _, peak in every.values())
    limit = int(leanest + 0.2 * (fastest[1] - leanest)) if fastest[1] > 1.02 * leanest else int(0.995 * fastest[1])
    fitting = [step_s for step_s, peak in every.values() if peak <= limit]
    assert fitting and min(fitting) > fastest[0]
    plan = planned(family, 2, 8, 128_256, limit)
    simulation = simulate_plan(plan, model(8, 128_256), cluster(2, limit))
    assert simulation.fits_in_memory
    assert simulation.timeline.makespan_s <= 1.05 * min(fitting)


@pytest.mark.parametrize(("lanes", "turns", "blocks", "vocabulary"), [(3, 3, 21, 64_000), (2, 3, 17, 32_000)])
def test_lanes_of_several_stages_fit_if_their_leanest_cut_does(
    lanes: int, turns: int, blocks: int, vocabulary: int
) -> None:
    """Between the memory of the leanest cut and that of the fastest, the cut that is chosen fits."""
    opened, placement = model(blocks, vocabulary), tuple(range(lanes)) * turns
    chosen = ParallelConfig(
        stages=lanes * turns,
        placement=placement,
        schedule="interleaved-1f1b",
        microbatches=16,
        recompute=("selective",),
    )
    cutter = PlannerContext(opened, cluster(lanes)).layer_cutter
    leanest, fastest = cutter.leanest_cut(JOB, chosen), cutter.cut_layers(JOB, chosen)
    assert fastest is not None and max(fastest.floor_bytes) > 1.02 * max(leanest.floor_bytes)
    for part in (0.001, 0.1, 0.3, 0.5, 0.7, 0.9):
        limit = int(max(leanest.floor_bytes) + part * (max(fastest.floor_bytes) - max(leanest.floor_bytes)))
        cut = PlannerContext(opened, cluster(lanes, limit)).layer_cutter.cut_layers(JOB, chosen)
        assert cut is not None and cut.may_fit, part


def test_the_planners_plan_is_cut_so_too() -> None:
    every = every_cut("v-half", 2, 8, 128_256)
    constraints = Constraints(schedule="v-half", stages=4, replicas=(1,), microbatches=16, recompute=("none",))
    plan = make_plan(model(8, 128_256), cluster(2), JOB, constraints)
    assert plan.prediction is not None and len(plan.stages) == 4
    assert plan.prediction.step_s <= 1.01 * min(step_s for step_s, _ in every.values())


def test_lanes_of_one_stage_and_given_cuts_stay_as_they_are() -> None:
    context = PlannerContext(model(8, 128_256), cluster(2))
    chosen = ParallelConfig(stages=2, schedule="1f1b", microbatches=16)
    assert (
        cuts_of(build_plan(context.model, context.cluster, JOB, chosen))
        == context.layer_cutter.cut_layers(JOB, chosen).cuts
    )
    given = decisions("v-half", 2, (3, 5, 8))
    assert cuts_of(build_plan(context.model, context.cluster, JOB, given)) == (3, 5, 8)
