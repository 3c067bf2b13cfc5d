"""The proof: the plan for a cluster as it is, against the best that hostname order and even layers can do, really run.

    python -m benchmarks.real_clusters.compare [--quick] [--only NAME] [--steps N] [--work FOLDER [--seconds S]]
        [--json PATH]

Clusters of benchmarks/data/clusters, each made as a lab (docs/reference/lab.md) and measured by `pipefit profile`;
nothing else is known to the planner.

- Baseline: even plans in hostname order on all devices, and on those of every kind but the slowest alone; which there
  are, and which of them are run, is said in baseline.py. The best that ran, and fitted, is kept.
- Configurators: the plans among those of the baseline that the uniform formula and AMP's choose (predictions/
  formulas.py), as they were measured. They know no limits of memory: they are asked for the best of those
  that are predicted to fit.
- Ours: `make_plan` on the profile. Where the cluster's memory is scarce (memory.py) `make_plan_at_risk` with what
  small plans taught; there also for other limits, LIMITS times those of the file. What every rank had alive is counted
  for all plans.

A run in which real work did not keep to its pace took too long, never too short: a plan of the baseline counts with
what it took all the same, ours has to be valid.

Beside the gain over the best baseline on all devices stands the compute bound: f r + 1 - f for a share f of devices
that are r times as fast, which is what balancing alone could give over a step in which all wait for the slow ones.

`--work` keeps the profile, our plans and every run in a folder: a later call goes on where this one stopped, after
`--seconds`. Needs root and iproute2.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness import Outcome, benchmark_parser, run_benchmark
from benchmarks.lab.runs import SIZES, TOKENS, Measured, measured_labs, small_model
from benchmarks.predictions.contention import words
from benchmarks.real_clusters.baseline import Tried, baseline, chosen
from benchmarks.real_clusters.memory import held, risk_of, scarce
from benchmarks.real_clusters.work import Unfinished, Work
from pipefit.cluster import Cluster, DeviceKind
from pipefit.cost.comm.network import Network
from pipefit.cost.memory.correction_file import MemoryFacts
from pipefit.errors import DoesNotFitError
from pipefit.model.graph import Model
from pipefit.plan.make import make_plan
from pipefit.plan.risk import RISK, make_plan_at_risk
from pipefit.plan.types import Job, Plan

LABS = ("half-2.5", "half-1.8", "links-only", "tight", "half-2.5-16", "half-2.5-32")
JOB = Job(batch=32, sequence=64, precision="float32")
TARGETS = {
    "half-2.5": 1.4, "half-1.8": 1.2, "links-only": 0.98, "tight": 1.4, "half-2.5-16": 1.4, "half-2.5-32": 1.4,
    "pair": 0.0,
}  # fmt: skip
"""Least gain over the best baseline on all devices."""

PROFILES: Mapping[str, Mapping[str, Any]] = {
    "half-2.5-16": {"tokens": TOKENS // 2},
    "half-2.5-32": {"tokens": TOKENS // 2, "sizes_bytes": SIZES[::2]},
}
"""Shorter profiles of large labs, where all of it takes many minutes: smaller microbatches (beyond, curves are drawn
out), and fewer sizes of messages."""

LIMITS = {"tight": (1.0, 1.5, 1.2, 0.8, 0.65, 0.5), "half-2.5-32": (1.0, 0.8)}
"""Where memory is scarce, plans are asked for under these multiples of the cluster's limits. The first is the one that
is compared with the baseline."""


def main() -> int:
    """All clusters, a table, JSON; 1 where a target is missed or runs are left."""
    parser = benchmark_parser(__doc__, quick="two hosts, a few plans, a short profile", only=LABS)
    parser.add_argument("--steps", type=int, default=2, help="Steps of each plan that count.")
    parser.add_argument("--work", help="Keep what was measured in this folder, and go on from there.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Begin no run after so long.")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Profile the labs and run our plans and the baseline's."""
    model, began = small_model(), time.monotonic()
    try:
        labs = measured_labs(arguments, LABS, lambda name: measure(name, model, arguments), print_lab)
    except Unfinished as left:
        print(f"real_clusters: {left}; call it again")
        return Outcome(passed=False)
    result = {"job": {"batch": JOB.batch, "sequence": JOB.sequence}, "labs": labs}
    result["seconds"] = round(time.monotonic() - began)
    return Outcome(result, passed=arguments.quick or all(lab["reached"] for lab in labs))


def measure(name: str, model: Model, arguments: Namespace) -> dict[str, Any]:
    """One cluster: profile, all plans, their runs, and what came of it."""
    with Work.kept(arguments.work, name, arguments.seconds) as work:
        cluster = work.profile(model, JOB.sequence, arguments.quick, PROFILES.get(name, {}))
        job = replace(JOB, batch=8) if arguments.quick else JOB
        facts = work.facts(model, cluster) if scarce(cluster) else None
        clusters = limited(cluster, LIMITS.get(name, (1.0,)))
        ours = work.plans(lambda: [recommended(model, each, job, facts) for each in clusters])
        tried = list(baseline(cluster, model, job, ("none", "full") if facts else ("none",)))
        if facts:
            risks = [risk_of(one.plan, model, cluster, facts) for one in tried]
            tried = [replace(one, fits=risk <= RISK) for one, risk in zip(tried, risks, strict=True)]
        picked = chosen(tried)[:: 4 if arguments.quick else 1]
        plans = [*(plan for plan in ours if plan), *(tried[place].plan for place in picked)]
        runs = iter(work.runs(plans, model, arguments.steps, facts is not None))
        own = [(each, plan, next(runs) if plan else None) for each, plan in zip(clusters, ours, strict=True)]
        found = summary(name, cluster, own, tried, {place: next(runs) for place in picked})
        return found | {"sessions": work.sessions}


def limited(cluster: Cluster, shares: Sequence[float]) -> list[Cluster]:
    """The cluster with so much of its memory."""

    def kinds(share: float) -> dict[str, DeviceKind]:
        return {k: replace(kind, memory_bytes=round(kind.memory_bytes * share)) for k, kind in cluster.kinds.items()}

    return [replace(cluster, kinds=kinds(share)) for share in shares]


def recommended(model: Model, cluster: Cluster, job: Job, facts: MemoryFacts | None) -> Plan | None:
    """The planner's choice; None where it says that nothing fits."""
    name = f"small on {cluster.name}"
    try:
        return (
            make_plan_at_risk(model, cluster, job, facts, name=name)
            if facts
            else make_plan(model, cluster, job, name=name)
        )
    except DoesNotFitError:
        return None


def summary(
    name: str,
    cluster: Cluster,
    own: Sequence[tuple[Cluster, Plan | None, Measured | None]],
    tried: Sequence[Tried],
    runs: Mapping[int, Measured],
) -> dict[str, Any]:
    """What is written of one cluster. `own`: our plans and their runs, under the cluster's limits first; `runs`: those
    of the plans of the baseline that were run, by their places."""
    recommendations = [recommendation(each, plan, run) for each, plan, run in own]
    ours = recommendations[0]
    rows = [line(one.plan, runs[place], cluster) | about(one) for place, one in enumerate(tried) if place in runs]
    others = [{"plan": named(one.plan)} | about(one) for place, one in enumerate(tried) if place not in runs]
    able = [row for row in rows if row.get("fits", True)]
    everywhere = [row for row in able if row["where"] == "all"]
    best, best_of_all = (min(some, key=lambda row: row["measured_s"]) for some in (everywhere, able))
    expected = [row for row in rows if row["where"] == "all" and row["expected_to_fit"]]
    chose = {key: min(expected, key=lambda row, key=key: row["formulas_s"][key]) for key in ("uniform", "amp")}  # type: ignore[misc]
    gains = {
        key: row["measured_s"] / ours["measured_s"]
        for key, row in {"best baseline": best, "best of all": best_of_all, **chose}.items()
    }
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in (ours, *rows) if row["valid"]]
    good = ours["valid"] and all(one.get("fits", True) for one in recommendations)
    return {
        "lab": name,
        "devices": len(Network(cluster).kinds),
        "compute_bound": compute_bound(cluster),
        "ours": ours,
        "recommendations": recommendations,
        "best": best,
        "best_of_all": best_of_all,
        "chosen": chose,
        "gains": gains,
        "target": TARGETS[name],
        "reached": good and gains["best baseline"] >= TARGETS[name] and gains["best of all"] >= 1.0,
        "invalid": sum(not row["valid"] for row in rows),
        "unfit": sum(not row.get("fits", True) for row in rows),
        "error": {"mean": sum(errors) / len(errors), "largest": max(errors)},
        "plans": rows,
        "not_run": others,
    }


def recommendation(cluster: Cluster, plan: Plan | None, run: Measured | None) -> dict[str, Any]:
    """One of our plans as it ran; of a cluster for which there is none, the limits."""
    if plan is None or run is None:
        return {"plan": None, "limit_bytes": {name: kind.memory_bytes for name, kind in cluster.kinds.items()}}
    assert plan.prediction is not None
    estimates = [lane.memory for lane in plan.prediction.lanes]
    expected = {"expected_bytes": [round(one.expected_bytes) for one in estimates if one], "risk": plan.prediction.risk}
    return line(plan, run, cluster) | (expected if run.peak_bytes else {})


def line(plan: Plan, run: Measured, cluster: Cluster) -> dict[str, Any]:
    """A plan, predicted and measured."""
    assert plan.prediction is not None
    return {
        "plan": named(plan),
        "measured_s": run.median_s,
        "steps_s": list(run.step_s),
        "predicted_s": plan.prediction.step_s,
        "valid": run.valid,
        "pace": run.pace,
    } | held(plan, run, cluster)


def about(one: Tried) -> dict[str, Any]:
    """Where a plan of the baseline stands, and what predictors say of it."""
    return {"where": one.where, "expected_to_fit": one.fits, "formulas_s": dict(one.predicted_s)}


def named(plan: Plan) -> str:
    """The plan in a line."""
    again = plan.decisions["recompute"]
    return words(plan) + (f", recompute {again}" if set(again.split(",")) != {"none"} else "")


def compute_bound(cluster: Cluster) -> float:
    """f r + 1 - f, by the measured rates of matrix products."""
    rates = [kind.peak_flops_per_s["float32"] for kind in Network(cluster).kinds]
    return sum(rate / min(rates) for rate in rates) / len(rates)


def print_lab(lab: Mapping[str, Any]) -> None:
    """What came of one cluster."""
    print(
        f"{lab['lab']}: {lab['devices']} devices, {len(lab['plans'])} plans tried and {len(lab['not_run'])} not, "
        f"{lab['invalid']} invalid, {lab['unfit']} did not fit"
    )
    for name, row in (
        ("ours", lab["ours"]),
        ("best baseline", lab["best"]),
        ("best of all", lab["best_of_all"]),
        ("uniform", lab["chosen"]["uniform"]),
        ("amp", lab["chosen"]["amp"]),
    ):
        gain = "" if name == "ours" else f"{lab['gains'][name]:.2f}x"
        print(f"  {name:>13} {row['measured_s']:.3f} s (predicted {row['predicted_s']:.3f} s) {gain:>6}  {row['plan']}")
    for one in lab["recommendations"] if "fits" in lab["ours"] else ():
        held_mb, limits_mb = (
            ", ".join(f"{kind} {size / 1e6:.2f}" for kind, size in one.get(key, {}).items())
            for key in ("peak_bytes", "limit_bytes")
        )
        verdict = "fits" if one.get("fits", True) else "DOES NOT FIT"
        print(f"  MB held: {held_mb or 'no plan'}; limits {limits_mb}: {verdict}")
    print(f"  predicted within {lab['error']['mean']:.1%} on average, {lab['error']['largest']:.1%} at most")
    verdict = "reached" if lab["reached"] else "MISSED"
    print(f"  compute bound {lab['compute_bound']:.2f}x; wanted {lab['target']:.2f}x: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
