"""The best plans of a model of several modules: layouts by the closed form, then the simulator on sampled batches.

Every layout of the short list is made a plan on devices of its own for each module, the samples of a batch are
arranged for it, and the step is simulated with the costs of that very arrangement, as ragged as it is. The most
promising ones are simulated on all sampled batches and with the orders of other schedule families; the mean over the
batches decides (Entrain, arXiv 2605.27918: one plan for whole batches is enough).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from pipefit.cluster.topology import device_count
from pipefit.errors import DoesNotFitError, PlanError, ScheduleError
from pipefit.plan.build import Workbench
from pipefit.plan.decisions import Decisions
from pipefit.plan.evaluate import evaluate
from pipefit.plan.modules.asked import check_asked
from pipefit.plan.modules.costing import Costed, CostedWay, Costing, passes
from pipefit.plan.modules.decisions import ModuleDecisions
from pipefit.plan.modules.orchestrate import Arrangement, ModuleLayout, orchestrate
from pipefit.plan.modules.parts import host_order, module_parts
from pipefit.plan.modules.samples import Arrange, Samples
from pipefit.plan.outcome import Evaluated, Found, Misfit
from pipefit.plan.structure import FormsError
from pipefit.plan.types import Arranging, Job, SampleLoad
from pipefit.units import format_bytes, format_seconds

SHORT, ACTIONS = 60, 120_000
"""Layouts that are simulated: at most so many, fewer when their actions come to so many."""

ORDERED, BEST = 12, 4
"""Layouts that are simulated with the orders of OTHERS as well, and plans that are on every sampled batch."""

TIGHTER, SPARE, MISSES = 6, 0.02, 20
"""How often the short list is made again with more memory kept free because nothing of it fits, the least part of the
memory that is then kept free, and after how many layouts that do not fit."""

OTHERS = ("eager-1f1b", "zb-h1")
"""Families that are tried beside 1F1B; their placement is a stage a lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulesFound:
    """What was found, and how."""

    found: Found
    arranging: Arranging
    "Of the best plan."
    notes: tuple[str, ...]


def modules_found(
    bench: Workbench, job: Job, pins: Mapping[str, Any], samples: Samples, arrange: Arrange, progress: Any = None
) -> ModulesFound:
    """The best plans under `pins`, the fastest over all sampled batches first. Raises PlanError for pins that mean
    nothing here, and DoesNotFitError."""
    check_asked(bench.model, job, pins)
    finder = _Finder(bench, job, pins, samples, arrange)
    finder.look(progress)
    if not finder.fitting:
        raise finder.nothing()
    return finder.result()


class _Finder:
    def __init__(self, bench: Workbench, job: Job, pins: Mapping[str, Any], samples: Samples, arrange: Arrange) -> None:
        self.bench, self.job, self.pins, self.samples, self.arrange = bench, job, pins, samples, arrange
        self.fitting: list[Evaluated] = []
        self.misfits: list[Misfit] = []
        self.arranging: dict[tuple[tuple[str, Decisions], ...], Arranging] = {}
        self.step_s: dict[int, float] = {}
        "Mean over the sampled batches, by the identity of what was simulated on all of them."
        self.simulated = self.combined = self.considered = 0
        self.closed_s = float("inf")
        own = {name: self._of(name) for name in [module.name for module in bench.model.modules]}
        costing = Costing(bench.programs, bench.network, bench.layers, job, samples)
        self.costed = [costing.profile(module, own[module.name]) for module in bench.model.modules]
        self.fixed = {
            name: {key: len(value) if key == "replicas" else value for key, value in each.items() if key in FIXED}
            for name, each in own.items()
        }

    def _of(self, module: str) -> dict[str, Any]:
        """The pins of one module."""
        return {key.partition(".")[2]: value for key, value in self.pins.items() if key.startswith(f"{module}.")}

    def look(self, progress: Any) -> None:
        """Simulate the short list, with more memory kept free as long as nothing of it fits; then the best of it in
        other orders, and on every batch."""
        limit = min(float(kind.memory_bytes) for kind in self.bench.network.kinds)
        spare = 0.0
        for _ in range(TIGHTER):
            known = len(self.misfits)
            self.simulate_all(self.short_list(limit - spare), progress)
            lacking = [one.peak_bytes - one.limit_bytes for one in self.misfits[known:]]
            if self.fitting or not lacking:
                break
            spare = max(2 * spare, min(lacking), SPARE * limit)
        self.fitting.sort(key=lambda one: one.rank)
        best = self.fitting[:ORDERED]
        if "schedule" not in self.pins:
            for one in list(best):
                best += filter(None, [self.simulate(replace(_plain(one), schedule=name), 0) for name in OTHERS])
        self.settle(sorted(best, key=lambda one: one.rank)[:BEST])

    def short_list(self, limit_bytes: float) -> tuple[Arrangement, ...]:
        """The best layouts by the closed form, within this memory."""
        count = device_count(self.bench.cluster)
        found = orchestrate(
            [one.profile for one in self.costed],
            min(self.pins.get("devices", count), count),
            self.job.batch,
            limit_bytes,
            top=SHORT,
            counts=[self.pins["microbatches"]] if "microbatches" in self.pins else None,
            passes=[passes(one, two) for one, two in pairwise(self.costed)],
            fixed=self.fixed,
        )
        self.considered += found.considered
        self.combined += found.combined
        if found.best:
            self.closed_s = found.best[0].step_s
        return found.best

    def simulate_all(self, layouts: Sequence[Arrangement], progress: Any) -> None:
        """One after the other, until their actions come to ACTIONS, or the first MISSES do not fit."""
        actions, misses = 0, 0
        for place, layout in enumerate(layouts):
            decisions = self.decisions(layout)
            if decisions is None or actions > ACTIONS or (misses >= MISSES and not self.fitting):
                continue
            actions += 2 * decisions.stage_count * decisions.microbatches
            misses += self.simulate(decisions, 0) is None
            if progress is not None:
                best_s = min((one.step_s for one in self.fitting), default=None)
                progress(len(layouts) - place - 1, self.simulated, best_s)

    def settle(self, best: Sequence[Evaluated]) -> None:
        """The order of the best by their mean over all sampled batches, their microbatches put in order as well."""
        settled: list[Evaluated] = []
        for one in best:
            made = [self.simulate(_plain(one), batch, keep=False) for batch in range(self.samples.batches)]
            whole = [each for each in made if each is not None]
            if len(whole) == len(made):
                self.step_s[id(whole[0])] = float(np.mean([each.step_s for each in whole]))
                settled.append(whole[0])
        known = {id(one) for one in best}
        rest = [one for one in self.fitting if id(one) not in known]
        settled.sort(key=lambda one: (self.step_s[id(one)], one.rank))
        self.fitting = [*settled, *sorted(rest, key=lambda one: one.rank)]

    def simulate(self, decisions: ModuleDecisions, batch: int, keep: bool = True) -> Evaluated | None:
        """One plan on one sampled batch; None where it does not fit or cannot be made. What is to be kept is looked at
        in passing: samples are balanced, but microbatches stay in the order that this gives."""
        shares = [own.replicas for _, own in decisions.modules for _ in range(own.stage_count)]
        arranging = self.loads(decisions)
        looking = replace(arranging, order=False) if keep else arranging
        order = self.arrange(self.samples, batch, looking, shares, decisions.microbatches)
        names = dict.fromkeys(["samples", *(module.space for module in self.bench.model.modules)])
        spaces = [self.samples.space(name, self.job, batch, order) for name in names]
        try:
            parts = module_parts(self.bench.model, self.bench.programs, self.job, decisions, spaces)
            made = evaluate(self.bench, decisions, parts)
        except (FormsError, ScheduleError):
            return None
        self.simulated += 1
        self.arranging[decisions.modules] = arranging
        if made.simulation.fits:
            if keep:
                self.fitting.append(made)
            return made
        if keep:
            self.misfits.append(Misfit(decisions, made.step_s, made.peak_bytes, made.limit_bytes, made.worst_lane))
        return None

    def loads(self, decisions: ModuleDecisions) -> Arranging:
        """What samples cost on every stage: the module's load, by the stage's part of its layers' time."""
        loads: list[SampleLoad] = []
        for costed, (_, own) in zip(self.costed, decisions.modules, strict=True):
            index, way = next((i, way) for i, way in enumerate(costed.ways) if _is(way, own))
            seconds = costed.profile.ways[index].sample_s
            whole = float(seconds.sum()) or 1.0
            for start, stop in pairwise((0, *own.cuts, len(seconds))):
                part = float(seconds[start:stop].sum()) / whole
                scaled = {name: getattr(way.load, name) * part for name in ("row_s", "token_s", "square_s")}
                loads.append(replace(way.load, **scaled))
        return Arranging(loads=tuple(loads))

    def decisions(self, arrangement: Arrangement) -> ModuleDecisions | None:
        """The choices that a layout stands for; None where its shard groups do not fit into the hosts."""
        sizes = [(layout.devices, layout.shards) for layout in arrangement.modules]
        devices = host_order(sizes, [host.devices for host in self.bench.cluster.hosts])
        if not devices:
            return None
        common = {
            "microbatches": arrangement.microbatches,
            "schedule": self.pins.get("schedule", "1f1b"),
            "zero1": self.pins.get("zero1", True),
        }
        modules = tuple(
            (layout.module, Decisions(**_own(layout, costed), devices=own, **common))
            for layout, costed, own in zip(arrangement.modules, self.costed, devices, strict=True)
        )
        return ModuleDecisions(**common, modules=modules)

    def result(self) -> ModulesFound:
        best = self.fitting[0]
        mean_s = self.step_s.get(id(best), best.step_s)
        told_apart = {tuple(one.decisions.words(()).items()): one for one in reversed(self.fitting)}
        found = Found(
            fitting=tuple(one for one in self.fitting if told_apart[tuple(one.decisions.words(()).items())] is one),
            misfits=tuple(sorted(self.misfits, key=lambda misfit: misfit.bound_s)),
            unfit=len(self.misfits),
            lower_bound_s=self.work_bound_s(),
            open_bound_s=float("inf"),
            considered=self.considered,
            simulated=self.simulated,
        )
        notes = (
            self.samples.note,
            f"modules: {_shares(best)}",
            f"modules: every one on devices of its own (disjoint); {self.considered} layouts of single modules, "
            f"{self.combined} of all together, the {SHORT} best by the closed form simulated; sharing devices between "
            "modules is not considered, because runs cannot do it yet",
            f"step: {format_seconds(best.step_s)} for the batch shown, {format_seconds(mean_s)} on average over "
            f"all {self.samples.batches} of them; the closed form says {format_seconds(self.closed_s)} at best",
        )
        assert isinstance(best.decisions, ModuleDecisions)
        return ModulesFound(found=found, arranging=self.arranging[best.decisions.modules], notes=notes)

    def work_bound_s(self) -> float:
        """Less than any step on these devices: the time of all samples of the first batch in every module's cheapest
        way, evenly over all devices; or what one microbatch takes on its way whatever it holds."""
        total_s = 0.0
        for costed in self.costed:
            profile = costed.profile
            samples = float(profile.weights[0].sum()) if profile.weights.size else float(self.job.batch)
            total_s += samples * min(way.shards * float(way.sample_s.sum()) for way in profile.ways)
        fixed_s = sum(min(float(way.fixed_s.sum()) for way in one.profile.ways) for one in self.costed)
        return max(total_s / self.bench.network.devices, fixed_s)

    def nothing(self) -> PlanError:
        """The error for a search that found nothing."""
        if not self.misfits:
            devices = self.bench.network.devices
            return DoesNotFitError(
                "No layout of the modules fits: by the closed form every one needs more memory or devices.",
                where=", ".join(module.name for module in self.bench.model.modules),
                seen=f"{devices} devices for {len(self.costed)} modules, batch {self.job.batch}",
                allowed="every module on devices of its own, within their memory",
                next_step="use more devices, or a smaller model" + (", or drop a --fix" if self.pins else ""),
            )
        closest = min(self.misfits, key=lambda misfit: misfit.peak_bytes - misfit.limit_bytes)
        assert isinstance(closest.decisions, ModuleDecisions)
        missing = format_bytes(closest.peak_bytes - closest.limit_bytes)
        return DoesNotFitError(
            f"No plan fits: at least {missing} are missing on each device of lane {closest.lane} in the closest one.",
            where=closest.decisions.text(),
            seen=f"{format_bytes(closest.peak_bytes)} needed",
            allowed=f"{format_bytes(closest.limit_bytes)} of memory",
            next_step="use more devices, devices with more memory, or a smaller batch",
        )


FIXED = ("replicas", "stages", "devices")


def _plain(one: Evaluated) -> ModuleDecisions:
    """The choices of what was simulated."""
    assert isinstance(one.decisions, ModuleDecisions)
    return replace(one.decisions, cuts=())


def _shares(one: Evaluated) -> str:
    """What every module has of the devices, what of the work, and how busy its busiest stage is: why they are divided
    so."""
    parts, timeline = one.parts, one.simulation.timeline
    count: dict[str, int] = {}
    work: dict[str, float] = {}
    busiest: dict[str, float] = {}
    for stage, lane in zip(parts.stages, parts.placement, strict=True):
        devices, busy_s = len(parts.groups[stage.group].devices), float(timeline.busy_s[lane])
        count[stage.module] = count.get(stage.module, 0) + devices
        work[stage.module] = work.get(stage.module, 0.0) + devices * busy_s
        busiest[stage.module] = max(busiest.get(stage.module, 0.0), busy_s)
    every, whole = sum(count.values()), sum(work.values()) or 1.0
    return "; ".join(
        f"{name} has {count[name]} of {every} devices for {work[name] / whole:.0%} of the device time, its busiest "
        f"stage {busiest[name] / timeline.makespan_s:.0%} of the step"
        for name in count
    )


def _is(way: CostedWay, own: Decisions) -> bool:
    return (way.shards, way.recompute) == (len(own.shards), own.recompute[0])


def _own(layout: ModuleLayout, costed: Costed) -> dict[str, Any]:
    way = next(way for way in costed.ways if (way.shards, way.recompute) == (layout.shards, layout.recompute))
    return {
        "stages": layout.stages,
        "cuts": layout.cuts,
        "replicas": (1,) * layout.replicas,
        "shards": (1,) * layout.shards,
        "sharding": way.sharding,
        "recompute": (layout.recompute,),
    }
