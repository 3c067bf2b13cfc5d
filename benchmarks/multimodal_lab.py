"""Plans of a small multimodal model really run in a lab, beside monolithic layouts, by sigma and way of training.

The cluster `modules` of benchmarks/data/clusters is made as a lab and measured by `pipefit profile`; nothing else is
known. Every plan trains on the samples of one index, step by step the same ones. Rivals:

- `paper`: DistTrain's baseline. Every module has the language model's replicas and SHARDS; encoder and generator are
  stages of their own, first and last; the language model has the fewest stages that fit. Of what is left to choose
  (replicas, microbatches, recomputation) the best by the simulator.
- the best monolithic layouts of all by the simulator: with ends `apart`, `merged` with the language model's, and with
  at least SHARDS shards, where small modules are inefficient. `BEST` of each are run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lab_runs import Measured, lab_of, profiled, run_plans
from multimodal_layouts import Layout, Monolithic, Rated
from multimodal_model import SEQUENCE, lab_model, make_samples
from pipefit.cluster import Cluster
from pipefit.data.multimodal.index import open_index
from pipefit.data.multimodal.planning import arranged_samples, sampled
from pipefit.data.multimodal.sample_rows import rows_of_index
from pipefit.plan.make import make_plan
from pipefit.plan.modules.samples import Samples
from pipefit.plan.types import Job, Plan

LAB = "modules"
JOB = Job(batch=32, sequence=SEQUENCE, precision="float32")
SHARDS = 2
"""Of the language model in the paper's kind of layout."""

BEST = 1
WARM, STEPS = 1, 2
TRIES = 2
SAMPLES = 10 * JOB.batch
BATCHES = WARM + STEPS
"""Global batches that are planned for: those that are run."""

PROFILE = {"tokens": 2 * SEQUENCE, "link_rounds": 1}

CASES = (
    (0.5, "trained"),
    (1.0, "trained"),
    (0.5, "language frozen"),
    (0.5, "vision frozen"),
    (0.5, "all but projector frozen"),
    (0.5, "generator frozen"),
)
"""(sigma, way of training)."""

GAINS = {"paper": 1.5, "best": 1.0, "inefficient": 1.1}
"""Asked for: how many times as fast as the paper's kind, the best of all, the best at a small module's efficiency of
at most INEFFICIENT."""

INEFFICIENT, UTILISATION = 0.6, 0.547


def measured_cluster() -> Cluster:
    """The lab's cluster as `pipefit profile` finds it, with the layers of the trained and of the frozen model."""
    with lab_of(LAB) as lab:
        return profiled(lab, lab_model(), SEQUENCE, also=[lab_model("all but projector frozen")], **PROFILE)


@contextmanager
def samples_of(sigma: float) -> Iterator[tuple[Path, Samples]]:
    """An index, for as long as it is needed, and the batches that a run draws from it."""
    with tempfile.TemporaryDirectory() as folder:
        index = make_samples(Path(folder), SAMPLES, sigma)
        rows = rows_of_index(open_index(index), SEQUENCE)
        yield index, sampled(rows, JOB.batch, BATCHES, where=f"image counts lognormal, sigma {sigma}")


def case(cluster: Cluster, sigma: float, training: str, plans: Mapping[str, Plan] | None = None) -> dict[str, Any]:
    """One case: plans, rivals, runs."""
    model = lab_model(training)
    with samples_of(sigma) as (index, samples):
        monolithic = Monolithic(model, cluster, JOB, samples)
        found = {"ours": make_plan(model, cluster, JOB, {}, samples=samples, arrange=arranged_samples)}
        rated = monolithic.rated()
        chosen = rivals(rated)
        found |= {name: monolithic.plan(one.layout) for name, one in chosen.items()}
        with lab_of(LAB) as lab:
            runs: dict[str, Measured] = {}
            for _ in range(TRIES):
                left = [name for name in found if name not in runs or not runs[name].valid]
                again = run_plans(lab, [found[name] for name in left], model, warm=WARM, steps=STEPS, samples=index)
                runs |= dict(zip(left, again, strict=True))
    useful_s = monolithic.useful_s()
    return {
        "sigma": sigma,
        "training": training,
        "batch": JOB.batch,
        "devices": monolithic.bench.network.devices,
        "enumerated": len(rated),
        "efficiency": monolithic.efficiency(),
        "shares": monolithic.shares(),
        "useful_s": useful_s,
        "plans": {name: row(found[name], runs[name], useful_s, chosen.get(name)) for name in found},
    }


def rivals(rated: Sequence[Rated]) -> dict[str, Rated]:
    """The layouts that are run: of those that fit, the fastest by the simulator."""
    fitting = [one for one in rated if one.fits]
    paper = [one for one in fitting if one.layout.ends == "apart" and one.layout.shards == SHARDS
             and one.layout.schedule == "1f1b"]  # fmt: skip
    least = min((one.layout.stages for one in paper), default=0)
    found = {"paper": min((one for one in paper if one.layout.stages == least), key=lambda one: one.step_s)}
    kinds = {
        "apart": [one for one in fitting if one.layout.ends == "apart"],
        "merged": [one for one in fitting if one.layout.ends == "merged"],
        "inefficient": [one for one in fitting if one.layout.shards >= SHARDS],
    }
    for kind, ones in kinds.items():
        for place, one in enumerate(sorted(ones, key=lambda one: one.step_s)[:BEST], 1):
            if one not in found.values():
                found[f"{kind} {place}"] = one
    return found


def row(plan: Plan, run: Measured, useful_s: float, rival: Rated | None) -> dict[str, Any]:
    """A plan, predicted and measured. Utilisation is useful time over device time, all devices counted."""
    assert plan.prediction is not None
    step_s, predicted_s = float(np.mean(run.step_s)), plan.prediction.step_s
    return {
        "layout": words(rival.layout) if rival else dict(plan.decisions),
        "devices_used": len(plan.devices),
        "shards": rival.layout.shards if rival else None,
        "measured_s": step_s,
        "steps_s": list(run.step_s),
        "predicted_s": predicted_s,
        "error": predicted_s / step_s - 1,
        "lower_bound_s": plan.prediction.lower_bound_s,
        "busy_s": list(run.busy_s),
        "valid": run.valid,
        "pace": run.pace,
        "notes": []
        if rival
        else [note for note in plan.prediction.assumptions if note.startswith(("modules", "step"))],
    }


def words(layout: Layout) -> str:
    return (
        f"{layout.ends}: {layout.replicas} x {layout.shards} devices, {layout.stages} language stages, "
        f"{layout.microbatches} microbatches, {layout.schedule}, recompute {layout.recompute}"
    )


def show(found: Mapping[str, Any]) -> None:
    """One case."""
    ours = found["plans"]["ours"]
    used = found["useful_s"] / found["devices"] / ours["measured_s"]
    print(f"sigma {found['sigma']}, {found['training']}: utilisation {used:.1%}, small modules {found['efficiency']}")
    for name, one in found["plans"].items():
        gain = one["measured_s"] / ours["measured_s"]
        print(
            f"  {name:>14} {one['measured_s']:.3f} s, predicted {one['predicted_s']:.3f} s ({one['error']:+.1%}), ours "
            f"is {gain:.2f}x as fast{'' if one['valid'] else ', INVALID'}  {one['layout']}",
            flush=True,
        )
