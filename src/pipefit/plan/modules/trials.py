"""Candidates with several modules, tried one by one on sampled batches: what fits, what does not, and by how much.

The samples of a batch are arranged for the candidate, and its step is simulated with the costs of that very
arrangement, as ragged as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pipefit.errors import DoesNotFitError, PlanError, ScheduleError
from pipefit.plan.assemble.module_parts import module_parts
from pipefit.plan.assemble.structure import FormsError
from pipefit.plan.evaluate.evaluate import evaluate
from pipefit.plan.evaluate.outcome import Evaluated, Misfit
from pipefit.plan.evaluate.planner_context import Workbench
from pipefit.plan.modules.costing import Costed, Costing
from pipefit.plan.request.module_decisions import ModuleDecisions
from pipefit.plan.request.sampled_batches import Arrange, Samples
from pipefit.plan.types import Arranging, Job, SampleLoad
from pipefit.schedule.actions import Schedule
from pipefit.units import format_bytes

FEW = 2
"""Of plans whose modules have devices of their own, of those with guests, and of those in line, so many at least are
among the best."""


class Trials:
    """What was tried of one model and job; `own`: the pins of every module."""

    def __init__(
        self,
        bench: Workbench,
        job: Job,
        own: Mapping[str, Mapping[str, Any]],
        samples: Samples,
        arrange: Arrange,
        balance: bool = True,
    ) -> None:
        self.bench, self.job, self.samples, self.arrange, self.balance = bench, job, samples, arrange, balance
        costing = Costing(bench.programs, bench.network, bench.layers, job, samples)
        self.costed: list[Costed] = [costing.profile(module, own[module.name]) for module in bench.model.modules]
        self.fitting: list[Evaluated] = []
        self.misfits: list[Misfit] = []
        self.simulated = 0

    def simulate(self, decisions: ModuleDecisions) -> Evaluated | None:
        """One plan on the first sampled batch; None where it does not fit or cannot be made. Samples are balanced, but
        microbatches stay in the order that this gives."""
        made = self._simulated(decisions, 0, self.arranging(decisions, order=False), None)
        if made is not None:
            self.fitting.append(made)
        return made

    def on_all(self, one: Evaluated, order: bool) -> list[Evaluated]:
        """What was simulated on the first batch, on every batch as a run takes it: in the order of actions that it has
        there, and for which microbatches change places if `order`. [] where it does not fit on one of them."""
        decisions, schedule = plain(one), one.simulation.timeline.schedule
        arranging = self.arranging(decisions, order)
        found = []
        for batch in range(self.samples.batches):
            made = self._simulated(decisions, batch, arranging, schedule)
            if made is None:
                return []
            found.append(made)
        return found

    def _simulated(
        self, decisions: ModuleDecisions, batch: int, arranging: Arranging, schedule: Schedule | None
    ) -> Evaluated | None:
        shares, count = decisions.shares_of_stages, decisions.microbatches
        order = self.arrange(self.samples, batch, arranging, shares, count, schedule)
        names = dict.fromkeys(["samples", *(module.space for module in self.bench.model.modules)])
        spaces = [self.samples.space(name, self.job, batch, order) for name in names]
        try:
            parts = module_parts(self.bench.model, self.bench.programs, self.job, decisions, spaces)
            made = evaluate(self.bench, decisions, parts, schedule)
        except (FormsError, ScheduleError):
            return None
        self.simulated += 1
        if made.simulation.fits:
            return made
        self.misfits.append(Misfit(decisions, made.step_s, made.peak_bytes, made.limit_bytes, made.worst_lane))
        return None

    def arranging(self, decisions: ModuleDecisions, order: bool) -> Arranging:
        """What samples cost on every stage: the module's load, by the stage's part of its layers' time."""
        loads: list[SampleLoad] = []
        for costed, (name, own) in zip(self.costed, decisions.modules, strict=True):
            index, way = next((i, way) for i, way in enumerate(costed.ways) if way.is_of(own))
            seconds = costed.profile.ways[index].sample_s
            whole = float(seconds.sum()) or 1.0
            for start, stop in pairwise((0, *own.cuts, len(seconds))):
                part = float(seconds[start:stop].sum()) / whole
                scaled = {name: getattr(way.load, name) * part for name in ("row_s", "token_s", "square_s")}
                loads += [replace(way.load, **scaled)] * decisions.copies(name)
        return Arranging(loads=tuple(loads), balance=self.balance, order=order)

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

    def nothing(self, pinned: bool) -> PlanError:
        """The error for a search that found nothing, under pins or none."""
        if not self.misfits:
            devices = self.bench.network.devices
            return DoesNotFitError(
                "No layout of the modules fits: by the closed form every one needs more memory or devices.",
                where=", ".join(module.name for module in self.bench.model.modules),
                seen=f"{devices} devices for {len(self.costed)} modules, batch {self.job.batch}",
                allowed="every module within the memory of its devices, and no more replicas than samples in a "
                "microbatch or stages than layers",
                next_step="use more devices, or a smaller model" + (", or drop a --fix" if pinned else ""),
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


def best_of_each(some: Sequence[Evaluated], count: int) -> list[Evaluated]:
    """The fastest of them, FEW at least of each way of placing modules: with guests, in line, or neither."""
    ranked = sorted(some, key=lambda one: one.rank)
    few: dict[tuple[bool, bool], list[Evaluated]] = {}
    for one in ranked:
        few.setdefault((bool(plain(one).guests), bool(plain(one).inline)), []).append(one)
    chosen = {id(one) for one in (*ranked[:count], *(one for each in few.values() for one in each[:FEW]))}
    return [one for one in ranked if id(one) in chosen]


def best_of_grids(some: Sequence[Evaluated]) -> list[Evaluated]:
    """The fastest of those whose modules have the same replicas, stages and shards, placed alike."""
    first: dict[object, Evaluated] = {}
    for one in sorted(some, key=lambda one: one.rank):
        decisions = plain(one)
        grids = tuple((name, len(own.replicas), own.stages, len(own.shards)) for name, own in decisions.modules)
        first.setdefault((grids, decisions.guests, decisions.inline), one)
    return [*first.values()]


def plain(one: Evaluated) -> ModuleDecisions:
    """The choices of what was simulated."""
    assert isinstance(one.decisions, ModuleDecisions)
    return replace(one.decisions, cuts=())


def busiest_s(one: Evaluated) -> float:
    """What the busiest lane has to do, in whatever order."""
    return float(max(one.simulation.timeline.busy_s))
