"""Pipelines of synthesized stages, really run: against the best pure pipeline and the best single SPMD program.

    python -m benchmarks.spmd.synthesized_stages [--quick] [--steps N] [--json PATH]

One cluster of benchmarks/data/clusters, `islands`: two islands of a fast device and three slow ones, 4:1, whose links
inside are forty times as fast as those between them; few layers and few long sequences, so that neither layers nor rows
divide as the devices are fast. It is made as a lab (docs/reference/lab.md) and measured by `pipefit profile`; nothing
else is known to the planner, which is asked

- `ours`: for the best plan, everything to choose;
- `pipeline`: without any group of devices, `--fix shards=1`: pipelines, replicas, token slices, leaving devices idle;
- `program`: with one stage, `--fix stages=1`: one searched program over any devices, replicas of it, or replicas alone;
- `even`: with groups of four even shares, `--fix shards=4 --fix sharding=searched`.

Each plan runs there: steps measured beside the prediction. The bound is what all devices together would take at the
speed that was measured for the whole batch, nothing waiting and nothing sent. Needs root and iproute2.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.harness import Outcome, benchmark_parser, run_benchmark
from benchmarks.lab.runs import TOKENS, Measured, lab_of, measured_labs, profiled, run_again, small_model
from pipefit.cluster import Cluster
from pipefit.errors import PipefitError
from pipefit.model.graph import Model
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.types import Job, Plan

LABS = ("islands",)
LAYERS = 4
JOB = Job(batch=4, sequence=256, precision="float32")
QUICK = replace(JOB, sequence=64)
TARGET = 1.15
"""Least gain over both rivals."""

CONSTRAINTS: Mapping[str, Constraints] = {
    "ours": NO_CONSTRAINTS,
    "pipeline": Constraints(shards=(1,)),
    "program": Constraints(stages=1),
    "even": Constraints(shards=(1, 1, 1, 1), sharding="searched", replicas=(1,), microbatches=4),
}
RIVALS = ("pipeline", "program")

PROFILE: Mapping[str, Any] = {"tokens": TOKENS // 2}
"""Smaller microbatches than plans have, since these devices are slow: beyond, curves are drawn out."""

AGAIN = 2
"""How often plans are run whose run was invalid."""


def main() -> int:
    """Measure, print a table, write JSON; 1 where the target is missed."""
    parser = benchmark_parser(__doc__, quick="two hosts, a short profile, short sequences", only=LABS)
    parser.add_argument("--steps", type=int, default=4, help="Steps of each plan that count.")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Profile the lab and run our plan and its rivals."""
    job = QUICK if arguments.quick else JOB
    labs = measured_labs(arguments, LABS, lambda name: measure(name, job, arguments), show)
    result = {"job": {"batch": job.batch, "sequence": job.sequence, "layers": LAYERS}, "labs": labs}
    return Outcome(result, passed=arguments.quick or all(lab["reached"] for lab in labs))


def measure(name: str, job: Job, arguments: Namespace) -> dict[str, Any]:
    """One cluster: its profile, the plans, their runs."""
    model = small_model(LAYERS)
    with lab_of(name) as lab:
        cluster = profiled(lab, model, job.sequence, quick=arguments.quick, **({} if arguments.quick else PROFILE))
        plans = {
            who: plan for who, fixed in CONSTRAINTS.items() if (plan := planned(model, cluster, job, fixed)) is not None
        }
        runs = run_again(lab, plans, model, tries=AGAIN, steps=arguments.steps)
    return summary(name, bound_s(model, cluster, job), {who: line(plans[who], runs[who]) for who in plans})


def planned(model: Model, cluster: Cluster, job: Job, constraints: Constraints) -> Plan | None:
    """The planner's choice; None where these devices cannot be grouped as the constraints ask."""
    try:
        return make_plan(model, cluster, job, constraints, name=f"small on {cluster.name}")
    except PipefitError:
        if constraints == NO_CONSTRAINTS:
            raise
        return None


def bound_s(model: Model, cluster: Cluster, job: Job) -> float:
    """A step of all devices together, each as fast as it was measured with the whole batch."""
    context = PlannerContext(model, cluster)
    time_s, kinds = context.layer_cutter.row_time(job, "none"), context.layer_cutter.fleet.kind
    return 1 / sum(1 / time_s(int(kind), job.batch) for kind in kinds)


def line(plan: Plan, run: Measured) -> dict[str, Any]:
    """A plan, predicted and measured."""
    assert plan.prediction is not None
    shares = [[list(axis.shares) for axis in group.axes if axis.name == "shard"] for group in plan.groups]
    return {
        "decisions": dict(plan.decisions),
        "groups": [
            {"devices": list(group.devices), "shares": own[0] if own else [1]}
            for group, own in zip(plan.groups, shares, strict=True)
        ],
        "recipes": dict(plan.recipes),
    } | run.beside(plan.prediction.step_s)


def summary(name: str, least_s: float, plans: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What came of one cluster."""
    ours = plans["ours"]
    gains = {who: one["measured_s"] / ours["measured_s"] for who, one in plans.items() if who != "ours"}
    synthesized = len(ours["groups"]) > 1 and any(len({*one["shares"]}) > 1 for one in ours["groups"])
    good = ours["valid"] and synthesized and all(gains.get(who, 0.0) >= TARGET for who in RIVALS)
    return {"lab": name, "bound_s": least_s, "gains": gains, "target": TARGET, "reached": good, "plans": dict(plans)}


def show(lab: Mapping[str, Any]) -> None:
    """What came of one cluster."""
    print(f"{lab['lab']}: bound {lab['bound_s']:.3f} s")
    for who, one in lab["plans"].items():
        gain = f"{lab['gains'][who]:.2f}x" if who in lab["gains"] else ""
        shares = ", ".join(":".join(map(str, each["shares"])) for each in one["groups"])
        chosen = ", ".join(
            f"{key} {one['decisions'][key]}"
            for key in ("replicas", "stages", "microbatches", "slices", "schedule")
            if one["decisions"].get(key)
        )
        print(
            f"  {who:>8} {one['measured_s']:.3f} s, predicted {one['predicted_s']:.3f} s ({one['error']:+.1%}) "
            f"{gain:>6}  {chosen}; groups {shares}" + ("" if one["valid"] else f"  INVALID: {one['pace']}")
        )
    print(f"  wanted {lab['target']:.2f}x over each rival: {'reached' if lab['reached'] else 'MISSED'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
