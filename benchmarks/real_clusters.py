"""The proof: the plan for a cluster as it is, against the best that hostname order and even layers can do, really run.

    python benchmarks/real_clusters.py [--quick] [--only NAME] [--steps N] [--json PATH]

Clusters of benchmarks/data/clusters, each made as a lab (docs/lab.md) and measured by `pipefit profile`; nothing else
is known to the planner.

- Baseline: every (replicas, stages, microbatches) on all devices, with layers cut as evenly as their costs on equal
  devices allow (the head counts), hostname order, both rank layouts: each really run, the best kept. The same on the
  devices of every kind by itself but the slowest.
- Configurators: the plan among those of the baseline that the uniform formula chooses, and the one that AMP's chooses
  (formulas.py), as they were measured.
- Ours: `make_plan` on the profile. Memory is not limited in a lab; memory_estimates.py is about what fits.

A run in which real work did not keep to its pace took too long, never too short: a plan of the baseline counts with
what it took all the same, ours has to be valid.

Beside the gain over the best baseline on all devices stands the compute bound: f r + 1 - f for a share f of devices
that are r times as fast, which is what balancing alone could give over a step in which all wait for the slow ones.
Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from contention import laid, words
from formulas import amp, uniform
from lab_runs import Measured, lab_of, measured_labs, profiled, run_plans, small_model
from pipefit.cluster import Cluster
from pipefit.errors import PipefitError
from pipefit.model.graph import Model
from pipefit.plan.build import Workbench, build_plan
from pipefit.plan.decisions import Decisions
from pipefit.plan.make import make_plan
from pipefit.plan.predict import predict, simulate_plan
from pipefit.plan.types import Job, Plan
from provenance import provenance, write_result

LABS = ("half-2.5", "half-1.8", "links-only", "half-2.5-16")
JOB = Job(batch=32, sequence=64, precision="float32")
TARGETS = {"half-2.5": 1.4, "half-1.8": 1.2, "links-only": 0.98, "half-2.5-16": 1.4, "pair": 0.0}
"""Least gain over the best baseline on all devices."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan of the baseline, and where it came from."""

    where: str
    "`all` devices, or those of one kind."
    plan: Plan


def main() -> int:
    """All clusters, a table, JSON; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Two hosts, a few plans, a short profile.")
    parser.add_argument("--only", choices=LABS, help="This cluster only; the others stay in a result that stands.")
    parser.add_argument("--steps", type=int, default=2, help="Steps of each plan that count.")
    parser.add_argument("--json", help="Write the result here.")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"provenance": provenance(), "job": {"batch": JOB.batch, "sequence": JOB.sequence}}
    model, began = small_model(), time.monotonic()
    try:
        labs = measured_labs(
            arguments, LABS, lambda name: measure(name, model, arguments.steps, arguments.quick), print_lab
        )
    except PipefitError as error:
        print(f"real_clusters: {error.text()}", file=sys.stderr)
        return 2
    write_result(arguments.json, result | {"labs": labs, "seconds": round(time.monotonic() - began)})
    return 0 if arguments.quick or all(lab["reached"] for lab in labs) else 1


def measure(name: str, model: Model, steps: int, quick: bool = False) -> dict[str, Any]:
    """One cluster: profile, all plans, their runs, and what came of it."""
    with lab_of(name) as lab:
        cluster = profiled(lab, model, JOB.sequence, quick=quick)
        job = replace(JOB, batch=8) if quick else JOB
        ours = make_plan(model, cluster, job, name=f"small on {name}")
        tried = list(baseline(cluster, model, job))[:: 3 if quick else 1]
        runs = run_plans(lab, [ours, *(one.plan for one in tried)], model, steps=steps)
    return summary(name, cluster, model, ours, runs[0], tried, runs[1:])


def baseline(cluster: Cluster, model: Model, job: Job) -> Iterator[Tried]:
    """Every grid, microbatch count and rank layout on all devices, then on those of every kind alone."""
    kinds = [host.kind for host in cluster.hosts for _ in range(host.devices)]
    everything = tuple(range(len(kinds)))
    subsets = {"all": everything}
    if len(set(kinds)) > 1:
        rates = {kind: cluster.kinds[kind].peak_flops_per_s[job.precision] for kind in set(kinds)}
        alone = sorted(kind for kind in rates if rates[kind] > min(rates.values()))
        subsets |= {f"{kind} only": tuple(d for d in everything if kinds[d] == kind) for kind in alone}
    even = replace(cluster, hosts=tuple(replace(host, kind=cluster.hosts[0].kind) for host in cluster.hosts))
    level = Workbench(model, even, name="small")
    bench = Workbench(model, cluster, name="small")
    for where, devices in subsets.items():
        for choice in grids(devices, job, len(bench.module.layers)):
            cut = level.cutter.cut(job, choice) if choice.stages > 1 else None
            decisions = replace(choice, cuts=cut.cuts if cut is not None else ())
            plan = build_plan(model, cluster, job, decisions, bench=bench)
            yield Tried(where, predict(plan, model, simulate_plan(plan, model, cluster)))


def grids(devices: Sequence[int], job: Job, layers: int) -> Iterator[Decisions]:
    """1F1B on every (replicas, stages), with every microbatch count that fills the pipeline, in both layouts."""
    for stages in range(1, min(len(devices), layers) + 1):
        if len(devices) % stages:
            continue
        replicas = len(devices) // stages
        for microbatches in (1, 2, 4, 8, 16, 32):
            if microbatches * replicas > job.batch or microbatches < stages // 2 or job.batch % microbatches:
                continue
            for inner in ("replica", "stage") if stages > 1 and replicas > 1 else ("replica",):
                by_lane = Decisions(stages=stages, replicas=(1,) * replicas, inner=inner).lane_devices()  # type: ignore[arg-type]
                order = tuple(devices[place] for lane in by_lane for place in lane)
                yield laid(stages, replicas, microbatches, devices=order, inner=inner)


def summary(
    name: str,
    cluster: Cluster,
    model: Model,
    ours: Plan,
    run: Measured,
    tried: Sequence[Tried],
    runs: Sequence[Measured],
) -> dict[str, Any]:
    """What is written of one cluster."""
    bench = Workbench(model, cluster)
    rows = []
    for one, measured in zip(tried, runs, strict=True):
        simulation = simulate_plan(one.plan, model, cluster, network=bench.network, layers=bench.layers)
        rows.append(
            line(one.plan, measured)
            | {
                "where": one.where,
                "uniform_s": uniform(one.plan, simulation, bench.network),
                "amp_s": amp(one.plan, simulation, bench.network),
            }
        )
    everywhere = [row for row in rows if row["where"] == "all"]
    best = min(everywhere, key=lambda row: row["measured_s"])
    best_of_all = min(rows, key=lambda row: row["measured_s"])
    chosen = {key: min(everywhere, key=lambda row, key=key: row[f"{key}_s"]) for key in ("uniform", "amp")}
    own = line(ours, run)
    gains = {
        "best baseline": best["measured_s"] / own["measured_s"],
        "best of all": best_of_all["measured_s"] / own["measured_s"],
        **{key: row["measured_s"] / own["measured_s"] for key, row in chosen.items()},
    }
    return {
        "lab": name,
        "devices": sum(host.devices for host in cluster.hosts),
        "compute_bound": compute_bound(cluster),
        "ours": own,
        "best": best,
        "best_of_all": best_of_all,
        "chosen": chosen,
        "gains": gains,
        "target": TARGETS[name],
        "reached": own["valid"] and gains["best baseline"] >= TARGETS[name] and gains["best of all"] >= 1.0,
        "invalid": sum(not row["valid"] for row in rows),
        "plans": rows,
    }


def line(plan: Plan, run: Measured) -> dict[str, Any]:
    """A plan, predicted and measured."""
    assert plan.prediction is not None
    return {
        "plan": words(plan),
        "measured_s": run.median_s,
        "steps_s": list(run.step_s),
        "predicted_s": plan.prediction.step_s,
        "valid": run.valid,
    }


def compute_bound(cluster: Cluster) -> float:
    """f r + 1 - f, by the measured rates of matrix products."""
    rates = [
        cluster.kinds[host.kind].peak_flops_per_s["float32"] for host in cluster.hosts for _ in range(host.devices)
    ]
    return sum(rate / min(rates) for rate in rates) / len(rates)


def print_lab(lab: Mapping[str, Any]) -> None:
    """What came of one cluster."""
    print(f"{lab['lab']}: {lab['devices']} devices, {len(lab['plans'])} plans tried, {lab['invalid']} invalid")
    for name, row in (
        ("ours", lab["ours"]),
        ("best baseline", lab["best"]),
        ("best of all", lab["best_of_all"]),
        ("uniform", lab["chosen"]["uniform"]),
        ("amp", lab["chosen"]["amp"]),
    ):
        gain = "" if name == "ours" else f"{lab['gains'][name]:.2f}x"
        print(f"  {name:>13} {row['measured_s']:.3f} s (predicted {row['predicted_s']:.3f} s) {gain:>6}  {row['plan']}")
    verdict = "reached" if lab["reached"] else "MISSED"
    print(f"  compute bound {lab['compute_bound']:.2f}x; wanted {lab['target']:.2f}x: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
