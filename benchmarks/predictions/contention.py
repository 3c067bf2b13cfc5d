"""Predicted beside measured where transfers share ports: four predictors on the same runs, in labs of eight devices.

    python -m benchmarks.predictions.contention [--quick] [--only NAME] [--json PATH]

For each cluster of benchmarks/data/clusters (uniform links; links that differ, one host with a slow port; links and
devices that differ, two racks with an uplink each): the lab is made, `pipefit profile` measures it, and ten plans are
built, predicted and really run there, one of them also with buckets small enough that its reductions run beside the
backward: real processes and transfers, devices at the pace of tables that nothing here reads but the lab. Nothing is
fitted to the runs. A run is left out, and counted, where the real work did not keep to
its pace. Predictors: a GPipe-like formula with one bandwidth, Pipette's formula (both in formulas.py), our closed form
(the bound that prunes), our simulator; and for comparison our simulator without sharing, in which every lane has a port
of its own and replicas go in step. Needs root and iproute2.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness import Outcome, benchmark_parser, run_benchmark
from benchmarks.lab.runs import Measured, lab_of, measured_labs, profiled, run_plans, small_model
from benchmarks.predictions.formulas import closed_form, pipette, uniform
from pipefit.cluster import Cluster
from pipefit.cluster.topology import device_count
from pipefit.cost.work import BUCKET_BYTES
from pipefit.model.graph import Model
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan
from pipefit.schedule.families import FAMILIES
from pipefit.simulate import simulate_schedule
from pipefit.validate.report import rank_correlation

LABS = ("uniform", "mixed-links", "mixed")
JOB = Job(batch=32, sequence=64, precision="float32")
SIMULATOR = "simulator"
TARGETS = {"mean_error": 0.05, "max_error": 0.12, "rank_correlation": 0.95}
"""Of the simulator, over all plans; the rank correlation (Spearman) on each cluster."""

MEASURES = {"uniform": uniform, "pipette": pipette, "closed form": closed_form}
SMALL_BUCKET = 1 << 18
"""A layer's gradients: with buckets of this size a small model's reductions run beside its backward, as a large one's
do with 32 MiB."""

AGAIN = 2
"""How often plans are run whose run was invalid."""


def main() -> int:
    """All clusters, a table, JSON; 1 where a target is missed."""
    parser = benchmark_parser(__doc__, quick="two hosts, three plans, a short profile", only=LABS)
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Profile the labs, run the plans, and compare all predictors."""
    model, began = small_model(), time.monotonic()
    labs = measured_labs(arguments, LABS, lambda name: measure(name, model, quick=arguments.quick), print_lab)
    rows = [row for lab in labs for row in lab["plans"] if row["valid"]]
    result: dict[str, Any] = {"job": {"batch": JOB.batch, "sequence": JOB.sequence}, "labs": labs, "targets": TARGETS}
    result |= {"seconds": round(time.monotonic() - began), "errors": errors_of(rows)}
    print(f"all {len(rows)} plans:")
    print_errors(result["errors"])
    return Outcome(result, passed=arguments.quick or reached(result))


def measure(name: str, model: Model, *, quick: bool = False) -> dict[str, Any]:
    """One lab: profile, plans, predictions, runs."""
    with lab_of(name) as lab:
        began = time.monotonic()
        cluster = profiled(lab, model, JOB.sequence, quick=quick)
        seconds = time.monotonic() - began
        plans = plans_for(cluster, model, name, quick)
        buckets = [BUCKET_BYTES] * len(plans)
        if not quick:
            plans, buckets = [*plans, plans[-1]], [*buckets, SMALL_BUCKET]
        runs = run_plans(lab, plans, model, steps=2 if quick else 3, bucket_bytes=buckets)
        for _ in range(AGAIN - 1):
            late = [index for index, run in enumerate(runs) if not run.valid]
            again = run_plans(lab, [plans[i] for i in late], model, bucket_bytes=[buckets[i] for i in late])
            for index, run in zip(late, again, strict=True):
                runs[index] = run
    rows = [row(plan, run, model, cluster, size) for plan, run, size in zip(plans, runs, buckets, strict=True)]
    rail = cluster.rails[0]
    return {
        "lab": name,
        "devices": device_count(cluster),
        "profile_s": round(seconds),
        "bandwidth_bytes_per_s": [[round(value) for value in line] for line in rail.bandwidth_bytes_per_s],
        "invalid": sum(not each["valid"] for each in rows),
        "plans": rows,
        "errors": errors_of([each for each in rows if each["valid"]]),
    }


def plans_for(cluster: Cluster, model: Model, name: str, quick: bool) -> list[Plan]:
    """The planner's choice, and others that lay the same job differently over all devices."""
    if quick:
        choices = [laid(4, 1, 4), laid(2, 2, 4), laid(1, 4, 2)]
        return [built(cluster, model, choice, replace(JOB, batch=16)) for choice in choices]
    chosen = make_plan(model, cluster, JOB, Constraints(devices=8), name=f"small on {name}")
    choices = [
        laid(8, 1, 8), laid(8, 1, 16), laid(4, 2, 8), laid(4, 2, 8, inner="stage"), laid(2, 4, 4),
        laid(2, 4, 4, inner="stage"), laid(4, 2, 8, "zb-h1", inner="stage"),
    ]  # fmt: skip
    if name == "uniform":
        choices.append(laid(1, 8, 1, sharded_state="optimizer"))
    else:
        choices.append(laid(4, 2, 4, "interleaved-1f1b", devices=(0, 4, 2, 6, 1, 5, 3, 7)))
    choices.append(laid(1, 8, 2))
    return [chosen, *(built(cluster, model, choice, JOB) for choice in choices)]


def laid(lanes: int, replicas: int, microbatches: int, schedule: str = "1f1b", **others: Any) -> ParallelConfig:
    """So many lanes of so many devices."""
    placement = FAMILIES[schedule].placement(lanes)
    return ParallelConfig(
        stages=len(placement), placement=placement, replicas=(1,) * replicas, microbatches=microbatches,
        schedule=schedule, **others,
    )  # fmt: skip


def built(cluster: Cluster, model: Model, decisions: ParallelConfig, job: Job) -> Plan:
    """The plan of these decisions, with its prediction."""
    plan = build_plan(model, cluster, job, decisions, context=PlannerContext(model, cluster, name="small"))
    return add_prediction(plan, model, simulate_plan(plan, model, cluster))


def row(
    plan: Plan, run: Measured, model: Model, cluster: Cluster, bucket_bytes: float = BUCKET_BYTES
) -> dict[str, Any]:
    """Measured and predicted."""
    context = PlannerContext(model, cluster)
    simulation = simulate_plan(
        plan, model, cluster, network=context.network, layers=context.layers, bucket_bytes=bucket_bytes
    )
    plain = replace(simulation.costs, contention=None)
    predicted = {name: formula(plan, simulation, context.network) for name, formula in MEASURES.items()}
    predicted["without sharing"] = simulate_schedule(plan.order.to_schedule(), plain).makespan_s
    predicted[SIMULATOR] = simulation.timeline.makespan_s
    return {
        "plan": words(plan) + (f", buckets of {bucket_bytes} bytes" if bucket_bytes != BUCKET_BYTES else ""),
        "measured_s": run.median_s,
        "steps_s": list(run.step_s),
        "valid": run.valid,
        "pace": run.pace,
        "predicted_s": predicted,
        "error": {name: value / run.median_s - 1 for name, value in predicted.items()},
    }


def words(plan: Plan) -> str:
    """The plan in a line."""
    keys = ("schedule", "stages", "replicas", "microbatches", "inner", "sharded_state", "cuts", "mapping")
    return ", ".join(f"{key} {plan.decisions[key]}" for key in keys if key in plan.decisions)


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean and largest error and the rank correlation of every predictor."""
    found = {}
    for name in rows[0]["predicted_s"] if rows else ():
        errors = [abs(each["error"][name]) for each in rows]
        pairs = [(each["predicted_s"][name], each["measured_s"]) for each in rows]
        rank = rank_correlation(pairs)
        rank = 1.0 if rank is None else rank
        found[name] = {
            "mean_error": statistics.mean(errors),
            "max_error": max(errors),
            "rank_correlation": 1.0 if rank is None else rank,
        }
    return found


def reached(result: Mapping[str, Any]) -> bool:
    """Whether the simulator is as good as it should be."""
    own = result["errors"][SIMULATOR]
    ranks = [lab["errors"][SIMULATOR]["rank_correlation"] for lab in result["labs"]]
    good = own["mean_error"] <= TARGETS["mean_error"] and own["max_error"] <= TARGETS["max_error"]
    return good and min(ranks) >= TARGETS["rank_correlation"]


def print_lab(lab: Mapping[str, Any]) -> None:
    """One lab's table."""
    print(f"{lab['lab']}: {lab['devices']} devices, profiled in {lab['profile_s']} s, {lab['invalid']} invalid runs")
    names = list(lab["errors"])
    print(f"{'measured':>9} " + " ".join(f"{name:>15}" for name in names) + "  plan")
    for each in lab["plans"]:
        cells = " ".join(f"{each['error'][name]:>+15.1%}" for name in names)
        print(f"{each['measured_s']:>7.3f} s {cells}  {each['plan']}" + ("" if each["valid"] else "  INVALID"))
    print_errors(lab["errors"])


def print_errors(errors: Mapping[str, Mapping[str, float]]) -> None:
    """Of every predictor."""
    for name, each in errors.items():
        print(
            f"  {name:>15}: mean {each['mean_error']:.1%}, largest {each['max_error']:.1%}, "
            f"rank correlation {each['rank_correlation']:.3f}"
        )


if __name__ == "__main__":
    sys.exit(main())
