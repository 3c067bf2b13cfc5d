"""Plans of a small multimodal model really run in a lab, beside monolithic layouts, by sigma and way of training.

The cluster `modules-slower` of benchmarks/data/clusters is made as a lab and measured by `pipefit profile`; nothing
else is known. Every plan trains on the samples of one index, step by step the same ones.
Rivals:

- `paper`: DistTrain's baseline. Every module has the language model's replicas and SHARDS; encoder and generator are
  stages of their own, first and last; the language model has the fewest stages that fit. Of what is left to choose
  (replicas, microbatches, recomputation) the best by the simulator.
- the best monolithic layouts of all by the simulator: with ends `apart`, `merged` with the language model's, and with
  at least SHARDS shards, where small modules are inefficient. `BEST` of each are run.

Few long samples (`FEW_SAMPLES`) are trained in the same way in a lab of one host whose links are slow beside what its
devices compute: encoder and generator have an efficiency below 0.6 over two shards there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lab.runs import Measured, lab_of, profiled, run_again
from benchmarks.multimodal.layouts import Layout, Monolithic, Rated
from benchmarks.multimodal.model import (
    LONG,
    SEQUENCE,
    arranging_model,
    lab_model,
    make_arranged_samples,
    make_long_samples,
    make_samples,
)
from benchmarks.multimodal.order import WAYS
from pipefit.cluster import Cluster
from pipefit.data.multimodal.index import open_index
from pipefit.data.multimodal.planning import arranged_samples, sample_batches
from pipefit.data.multimodal.sample_rows import rows_of_index
from pipefit.model.graph import Model
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.request.sampled_batches import SampledBatches
from pipefit.plan.types import Job, Plan, SampleArrangement

LAB, MANY = "modules-slower", "many"
JOB = Job(batch=32, sequence=SEQUENCE, precision="float32")
SHARDS = 2
"""Of the language model in the paper's kind of layout."""

BEST = 1
WARM, STEPS = 1, 2
TRIES = 2
DRAWN = 10
"""Batches that the index has samples for."""

BATCHES = WARM + STEPS
"""Global batches that are drawn. Those of warm steps are not planned for."""

PROFILE = {"sequence": SEQUENCE, "tokens": 2 * SEQUENCE, "link_rounds": 1}
LONG_PROFILE = {"sequence": LONG // 4, "tokens": LONG // 4, "link_rounds": 1}
"""Tokens of the longest sequence and of the largest microbatch on a device, for layers; rounds of links. Layers of long
samples are measured up to a quarter of these: whole ones take over a quarter of an hour."""

CASES = (
    (0.5, "trained"),
    (1.0, "trained"),
    (0.5, "language frozen"),
    (0.5, "generator frozen"),
    (0.5, "all but projector frozen"),
    (0.5, "vision frozen"),
)
"""(sigma, way of training)."""

ARRANGED_SIGMA = 1.0
ARRANGED = (
    "modules=disjoint", "vision.replicas=8", "vision.shards=1", "vision.recompute=none", "vision.divide=samples",
    "language.stages=3", "language.replicas=8", "language.shards=1", "language.recompute=none", "microbatches=16",
    "schedule=1f1b", "sharded_state=optimizer",
)  # fmt: skip
ARRANGED_JOB = replace(JOB, batch=128)
"""The layout under which arrangements are compared: that of the first of the reference's settings."""

TOGETHER = (
    "modules=shared", "language.replicas=2", "language.stages=2", "language.shards=2", "language.recompute=full",
    "vision.replicas=4", "vision.shards=1", "vision.recompute=full", "vision.divide=samples", "generator.replicas=2",
    "generator.shards=2", "generator.recompute=none", "generator.divide=samples", "microbatches=8", "schedule=1f1b",
    "sharded_state=optimizer",
)  # fmt: skip
MULTIPLES = (1, 2, 4)
"""The layout under which an encoder takes so many microbatches at a time, whole on every device of the two lanes of the
language model that it shares: that of the largest model's plan, small."""

GAIN, UTILISATION = 1.5, 0.547
"""Asked for at sigma 0.5, trained: how many times as fast as the paper's kind, and what is used of the devices."""

FEW_GAIN = 1.1
"""Over the best monolithic layout, where small modules are inefficient over its shards."""


@dataclass(frozen=True)
class Setting:
    """What is trained where."""

    lab: str
    job: Job
    make: Callable[[Path, int, float], Path]
    profile: Mapping[str, Any]
    "What `pipefit profile` is asked for."
    also: tuple[str, ...] = ()
    "Ways of training whose layers are profiled beside those of the trained model."
    long: bool = False

    def model(self, training: str = "trained") -> Model:
        return lab_model(training, self.long)

    def cluster(self) -> Cluster:
        """The lab's cluster as `pipefit profile` finds it."""
        with lab_of(self.lab) as lab:
            return profiled(lab, self.model(), also=[self.model(training) for training in self.also], **self.profile)


MANY_SAMPLES = Setting(LAB, JOB, make_samples, PROFILE, also=("all but projector frozen",))
"""Four times as many samples as devices."""

FEW_SAMPLES = Setting(
    "one-host", Job(batch=4, sequence=LONG, precision="float32"), make_long_samples, LONG_PROFILE,
    also=("all but projector frozen",), long=True,
)  # fmt: skip
"""Half as many samples as devices: whoever divides samples needs shards."""


@contextmanager
def samples_of(
    sigma: float, job: Job = JOB, make: Callable[[Path, int, float], Path] = make_samples
) -> Iterator[tuple[Path, SampledBatches]]:
    """An index, for as long as it is needed, and the batches that a run draws from it, those of warm steps apart."""
    with tempfile.TemporaryDirectory() as folder:
        index = make(Path(folder), DRAWN * job.batch, sigma)
        rows = rows_of_index(open_index(index), job.sequence, images=True)
        drawn = sample_batches(rows, job.batch, BATCHES, where=f"image counts lognormal, sigma {sigma}")
        yield index, drawn.select_batches(slice(WARM, None))


def case(setting: Setting, cluster: Cluster, sigma: float, training: str) -> dict[str, Any]:
    """One case: plans, rivals, runs."""
    model, job = setting.model(training), setting.job
    with samples_of(sigma, job, setting.make) as (index, samples):
        monolithic = Monolithic(model, cluster, job, samples)
        found = {"ours": make_plan(model, cluster, job, samples=samples, arrange=arranged_samples)}
        rated = monolithic.rated()
        chosen = rivals(rated)
        found |= {name: monolithic.plan(one.layout) for name, one in chosen.items()}
        runs = ran(setting.lab, found, model, index)
    useful_s = monolithic.useful_s()
    return {
        "lab": setting.lab,
        "sigma": sigma,
        "training": training,
        "batch": job.batch,
        "devices": monolithic.context.network.devices,
        "enumerated": len(rated),
        "efficiency": monolithic.efficiency(),
        "shares": monolithic.shares(),
        "useful_s": useful_s,
        "plans": {name: row(found[name], runs[name], chosen.get(name)) for name in found},
    }


def ran(lab_name: str, plans: Mapping[str, Plan], model: Model, index: Path) -> dict[str, Measured]:
    """Every plan's run; one whose real work was late is run once more."""
    with lab_of(lab_name) as lab:
        return run_again(lab, plans, model, tries=TRIES, warm=WARM, steps=STEPS, samples=index)


def together(setting: Setting, cluster: Cluster, sigma: float) -> dict[str, Any]:
    """One layout whose encoder takes one or several microbatches at a time, predicted and measured."""
    model, job = setting.model(), setting.job
    with samples_of(sigma, job, setting.make) as (index, samples):
        plans = {
            f"{multiple} at a time": make_plan(
                model, cluster, job, parse_constraints([*TOGETHER, f"vision.multiple={multiple}"]), samples=samples,
                arrange=arranged_samples,
            )
            for multiple in MULTIPLES
        }  # fmt: skip
        runs = ran(setting.lab, plans, model, index)
    return {
        "lab": setting.lab,
        "sigma": sigma,
        "plans": {name: row(plan, runs[name], None) for name, plan in plans.items()},
    }


def arranged() -> dict[str, Any]:
    """One layout under every way of arranging its samples, predicted and measured: an encoder and three stages of a
    language model, each in eight replicas, whose microbatches have a sample for each of them."""
    model = arranging_model()
    with lab_of(MANY) as lab:
        cluster = profiled(lab, model, **PROFILE)
    with samples_of(ARRANGED_SIGMA, ARRANGED_JOB, make_arranged_samples) as (index, samples):
        each = {way: arranged_plans(cluster, model, samples, *how) for way, how in WAYS.items()}
        plans = {way: own[0] for way, own in each.items()}
        predicted_s = {way: [one.prediction.step_s for one in own if one.prediction] for way, own in each.items()}
        runs = ran(MANY, plans, model, index)
    return {
        "sigma": ARRANGED_SIGMA,
        "layout": dict(plans["random"].decisions),
        "ways": {
            way: {
                "predicted_s": predicted_s[way],
                "measured_s": list(runs[way].step_s),
                "predicted_gain": sum(predicted_s["random"]) / sum(predicted_s[way]),
                "measured_gain": sum(runs["random"].step_s) / sum(runs[way].step_s),
                "valid": runs[way].valid,
                "pace": runs[way].pace,
            }
            for way in plans
        },
    }


def arranged_plans(cluster: Cluster, model: Model, samples: SampledBatches, balance: bool, order: bool) -> list[Plan]:
    """The plan under an arrangement, with its prediction for every batch that is run."""

    def way(arranging: SampleArrangement) -> SampleArrangement:
        return replace(arranging, balance=balance, order=order)

    found = []
    for at in range(STEPS):
        plan = make_plan(
            model, cluster, ARRANGED_JOB, parse_constraints(ARRANGED), samples=samples.select_batches(slice(at, at +
            1)), arrange=lambda some, batch, arranging, *rest: arranged_samples(some, batch, way(arranging), *rest),
        )  # fmt: skip
        assert plan.arranging is not None
        found.append(replace(plan, arranging=way(plan.arranging)))
    return found


def rivals(rated: Sequence[Rated]) -> dict[str, Rated]:
    """The layouts that are run: of those that fit, the fastest by the simulator."""
    fitting = [one for one in rated if one.fits]
    paper = [one for one in fitting if one.layout.ends == "apart" and one.layout.shards == SHARDS
             and one.layout.schedule == "1f1b"]  # fmt: skip
    least = min((one.layout.stages for one in paper), default=0)
    found = {}
    if paper:
        found["paper"] = min((one for one in paper if one.layout.stages == least), key=lambda one: one.step_s)
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


def row(plan: Plan, run: Measured, rival: Rated | None) -> dict[str, Any]:
    """A plan, predicted and measured. Utilisation is useful time over device time, all devices counted."""
    assert plan.prediction is not None
    step_s, predicted_s = float(np.mean(run.step_s)), plan.prediction.step_s
    return {
        "layout": words(rival.layout) if rival else dict(plan.decisions),
        "devices_used": len(plan.used_devices),
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
