"""Programs with shares against programs with equal ones, on paced devices that are half 3 times as fast as the others.

    python -m benchmarks.spmd.lab [--quick] [--only NAME] [--json PATH]

Clusters `half-3` (4 devices) and `half-3-8` of benchmarks/data/clusters, each made as a lab (docs/reference/lab.md)
and measured by `pipefit profile`; nothing else is known to the planner. All plans go through `make_plan` and the
runtime as with `pipefit plan --fix sharding=searched --fix shards=...`:

- ours: the shares that the search and the linear program find for the profile,
- equal shares, with the best program for them,
- equal data parallelism, as the planner makes it without programs.

How much of a step is communication: what of it the busiest device does not compute, its update counted, too.
Needs root and iproute2.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import Outcome, benchmark_parser, run_benchmark
from benchmarks.lab.runs import Measured, lab_of, measured_labs, profiled, run_again, small_model
from pipefit.cluster import Cluster
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.model.graph import Model
from pipefit.plan.assemble.shard_recipes import shard_setting
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.types import Job, Plan
from pipefit.shard.chain import ChainSearch
from pipefit.shard.synthesize import synthesize_program

LABS = ("half-3", "half-3-8")
JOB = Job(batch=32, sequence=64, precision="float32")
MICROBATCHES = 1
TRIES = 4
"""Of a plan at most: a run in which real work did not keep to its pace took too long, and is done again."""

GAIN, ERROR, COMMUNICATION = 1.5, 0.08, 0.30
"""Targets: least gain over equal shares, largest error of the prediction, and largest part of a step that is sent."""


def main() -> int:
    """All labs, a table, JSON; 1 where a target is missed."""
    parser = benchmark_parser(__doc__, quick="two hosts that are alike, a short profile", only=LABS)
    parser.add_argument("--steps", type=int, default=5, help="Steps of each plan that count.")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Profile the labs and run all sides."""
    model = small_model(2 if arguments.quick else 8)
    labs = measured_labs(arguments, LABS, lambda name: measure(name, model, arguments), print_lab)
    result = {"job": {"batch": JOB.batch, "sequence": JOB.sequence}, "labs": labs}
    return Outcome(result, passed=arguments.quick or all(lab["reached"] for lab in labs))


def measure(name: str, model: Model, arguments: Namespace) -> dict[str, Any]:
    """One lab: profile, plans, runs."""
    with lab_of(name) as lab:
        cluster = profiled(lab, model, JOB.sequence, quick=arguments.quick)
        plans = planned(model, cluster)
        runs = run_again(lab, plans, model, tries=TRIES, steps=arguments.steps)
    rows = {side: row(plan, runs[side]) for side, plan in plans.items()}
    ours, equal = rows["ours"], rows["equal shares"]
    reached = (
        all(each["valid"] and abs(each["error"]) <= ERROR for each in (ours, equal))
        and ours["communication"] <= COMMUNICATION
        and equal["measured_s"] / ours["measured_s"] >= GAIN
    )
    return {
        "lab": name,
        "devices": len(Network(cluster).kinds),
        "gain": equal["measured_s"] / ours["measured_s"],
        "gain_predicted": equal["predicted_s"] / ours["predicted_s"],
        "reached": reached,
        "plans": rows,
    }


def planned(model: Model, cluster: Cluster) -> dict[str, Plan]:
    """The plan of every side."""
    network = Network(cluster)
    count = network.devices
    setting = shard_setting(
        model, network, best_costs(cluster), devices=tuple(range(count)), rows=JOB.batch // MICROBATCHES,
        tokens=JOB.sequence, precision=JOB.precision, microbatches=MICROBATCHES,
    )  # fmt: skip
    found = synthesize_program(ChainSearch(model, setting), model.layers)
    common = (f"microbatches={MICROBATCHES}", "stages=1", "recompute=none")
    ones = ":".join(["1"] * count)

    def make(*fixed: str) -> Plan:
        return make_plan(model, cluster, JOB, parse_constraints((*common, *fixed)), name=f"small on {cluster.name}")

    def searched(shares: Sequence[int]) -> Plan:
        return make("sharding=searched", f"shards={':'.join(map(str, shares))}", "replicas=1")

    return {
        "ours": searched(found.shares),
        "equal shares": searched((1,) * count),
        "equal data parallelism": make(f"replicas={ones}", "shards=1"),
    }


def row(plan: Plan, run: Measured) -> dict[str, Any]:
    """A plan, predicted and measured."""
    assert plan.prediction is not None
    communication = 1 - max(run.busy_s) / run.median_s if run.busy_s else None
    facts = {"decisions": dict(plan.decisions), "program": dict(plan.recipes), "communication": communication}
    return facts | run.beside(plan.prediction.step_s)


def print_lab(lab: Mapping[str, Any]) -> None:
    """What came of one lab."""
    print(f"{lab['lab']}: {lab['devices']} devices")
    for side, each in lab["plans"].items():
        print(
            f"  {side:>24} {each['measured_s']:.3f} s (predicted {each['predicted_s']:.3f} s, {each['error']:+.1%}),"
            f" {each['communication']:.0%} communication{'' if each['valid'] else ', INVALID'}"
        )
    verdict = "reached" if lab["reached"] else "MISSED"
    print(f"  {lab['gain']:.2f}x over equal shares (predicted {lab['gain_predicted']:.2f}x): {verdict}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
