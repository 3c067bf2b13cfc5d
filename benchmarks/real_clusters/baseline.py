"""The baseline of compare.py: 1F1B on even plans in hostname order, and which of them are really run.

Every (replicas, stages, microbatches, rank layout) on all devices, and on those of every kind by itself but the
slowest. Layers are cut as evenly as their costs on equal devices allow (the head counts). Where memory is scarce each
of these with and without full recomputation.

Up to ALL of them are run, but for those that five predictors alike leave far behind (three of other configurators, our
closed form, our simulator; predictions/formulas.py). Of more, on all devices and on each subset, the BEST best by
each of the five are run, and beside them SPREAD in even steps through the simulator's order, from the best of all to
the worst.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.predictions.contention import laid
from benchmarks.predictions.formulas import FORMULAS
from pipefit.cluster import Cluster
from pipefit.model.graph import Model
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan
from pipefit.precision import COMPUTE_TYPE

ALL, BEST, SPREAD = 50, 3, 8
FAR = 1.5
"""Of few, not run is what every predictor says takes so many times what it says of the best."""

SIMULATOR = "simulator"


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan of the baseline, and where it came from."""

    where: str
    "`all` devices, or those of one kind."
    plan: Plan
    predicted_s: Mapping[str, float]
    "By predictor."
    fits: bool = True
    "As it was predicted."


def baseline(cluster: Cluster, model: Model, job: Job, recompute: Sequence[str] = ("none",)) -> Iterator[Tried]:
    """Every grid, microbatch count and rank layout on all devices, then on those of every kind alone."""
    one = replace(cluster.kinds[cluster.hosts[0].kind], memory_bytes=1 << 50)
    even = replace(cluster, kinds={one.name: one}, hosts=tuple(replace(host, kind=one.name) for host in cluster.hosts))
    level = PlannerContext(model, even, name="small")
    context = PlannerContext(model, cluster, name="small")
    for where, devices in subsets(cluster, job).items():
        for choice in grids(devices, job, len(context.only_module.layers)):
            cut = level.layer_cutter.cut_layers(job, choice) if choice.stages > 1 else None
            for again in recompute:
                decisions = replace(choice, cuts=cut.cuts if cut is not None else (), recompute=(again,))  # type: ignore[arg-type]
                plan = build_plan(model, cluster, job, decisions, context=context)
                simulation = simulate_plan(plan, model, cluster, network=context.network, layers=context.layers)
                predicted = {name: formula(plan, simulation, context.network) for name, formula in FORMULAS.items()}
                predicted[SIMULATOR] = simulation.timeline.makespan_s
                yield Tried(where, add_prediction(plan, model, simulation), predicted)


def subsets(cluster: Cluster, job: Job) -> dict[str, tuple[int, ...]]:
    """All devices, and those of every kind but the slowest."""
    kinds = [host.kind for host in cluster.hosts for _ in range(host.devices)]
    everything = tuple(range(len(kinds)))
    rates = {kind: cluster.kinds[kind].peak_flops_per_s[COMPUTE_TYPE[job.precision]] for kind in set(kinds)}
    alone = sorted(kind for kind in rates if rates[kind] > min(rates.values()))
    return {"all": everything} | {f"{kind} only": tuple(d for d in everything if kinds[d] == kind) for kind in alone}


def grids(devices: Sequence[int], job: Job, layers: int) -> Iterator[ParallelConfig]:
    """1F1B on every (replicas, stages), with every microbatch count, in both layouts."""
    for stages in range(1, min(len(devices), layers) + 1):
        if len(devices) % stages:
            continue
        replicas = len(devices) // stages
        for microbatches in (1, 2, 4, 8, 16, 32):
            if microbatches * replicas > job.batch or job.batch % microbatches:
                continue
            for inner in ("replica", "stage") if stages > 1 and replicas > 1 else ("replica",):
                by_lane = ParallelConfig(stages=stages, replicas=(1,) * replicas, inner=inner).lane_devices()  # type: ignore[arg-type]
                order = tuple(devices[place] for lane in by_lane for place in lane)
                yield laid(stages, replicas, microbatches, devices=order, inner=inner)


def chosen(tried: Sequence[Tried]) -> list[int]:
    """Which of the baseline's plans are really run, by the rule above: their places, ascending. Among the best by a
    predictor are only plans that are predicted to fit; among the spread ones any."""
    found: set[int] = set()
    names = list(tried[0].predicted_s)
    for where in {one.where for one in tried}:
        places = [place for place, one in enumerate(tried) if one.where == where]
        fitting = [place for place in places if tried[place].fits] or places
        least = {name: min(tried[place].predicted_s[name] for place in fitting) for name in names}
        if len(tried) <= ALL:
            found |= {p for p in places if any(tried[p].predicted_s[name] < FAR * least[name] for name in names)}
            continue
        for name in names:
            found |= set(sorted(fitting, key=lambda place, name=name: tried[place].predicted_s[name])[:BEST])  # type: ignore[misc]
    if len(tried) > ALL:
        everything = sorted(range(len(tried)), key=lambda place: tried[place].predicted_s[SIMULATOR])
        found |= {everything[round(share * (len(tried) - 1) / (SPREAD - 1))] for share in range(SPREAD)}
    return sorted(found)
