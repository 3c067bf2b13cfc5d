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
from pipefit.plan.assemble.module_parts import module_skeleton
from pipefit.plan.assemble.structure import FormsError
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan, InfeasiblePlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.modules.costing import CostedModule, ModuleCosting
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.request.sampled_batches import Arrange, SampledBatches
from pipefit.plan.types import Job, SampleArrangement, SampleLoad
from pipefit.schedule.actions import Schedule
from pipefit.units import format_bytes

FEW = 2
"""Of plans whose modules have devices of their own, of those with guests, and of those in line, so many at least are
among the best."""


class ModuleTrials:
    """What was tried of one model and job; `own`: the pins of every module."""

    def __init__(
        self,
        bench: PlannerContext,
        job: Job,
        own: Mapping[str, Mapping[str, Any]],
        samples: SampledBatches,
        arrange: Arrange,
        balance: bool = True,
    ) -> None:
        self.bench, self.job, self.samples, self.arrange, self.balance = bench, job, samples, arrange, balance
        costing = ModuleCosting(bench.programs, bench.network, bench.layers, job, samples)
        self.costed: list[CostedModule] = [
            costing.profile_module(module, own[module.name]) for module in bench.model.modules
        ]
        self.fitting: list[EvaluatedPlan] = []
        self.misfits: list[InfeasiblePlan] = []
        self.simulated = 0

    def simulate_plan(self, decisions: MultiModuleConfig) -> EvaluatedPlan | None:
        """One plan on the first sampled batch; None where it does not fit or cannot be made. Samples are balanced, but
        microbatches stay in the order that this gives."""
        made = self._simulate_batch(decisions, 0, self.arranging_for(decisions, order=False), None)
        if made is not None:
            self.fitting.append(made)
        return made

    def on_all(self, one: EvaluatedPlan, order: bool) -> list[EvaluatedPlan]:
        """What was simulated on the first batch, on every batch as a run takes it: in the order of actions that it has
        there, and for which microbatches change places if `order`. [] where it does not fit on one of them."""
        decisions, schedule = plain_decisions(one), one.simulation.timeline.schedule
        arranging = self.arranging_for(decisions, order)
        found = []
        for batch in range(self.samples.batch_count):
            made = self._simulate_batch(decisions, batch, arranging, schedule)
            if made is None:
                return []
            found.append(made)
        return found

    def _simulate_batch(
        self, decisions: MultiModuleConfig, batch: int, arranging: SampleArrangement, schedule: Schedule | None
    ) -> EvaluatedPlan | None:
        shares, count = decisions.shares_of_stages, decisions.microbatches
        order = self.arrange(self.samples, batch, arranging, shares, count, schedule)
        names = dict.fromkeys(["samples", *(module.space for module in self.bench.model.modules)])
        spaces = [self.samples.to_space(name, self.job, batch, order) for name in names]
        try:
            parts = module_skeleton(self.bench.model, self.bench.programs, self.job, decisions, spaces)
            made = evaluate_candidate(self.bench, decisions, parts, schedule)
        except (FormsError, ScheduleError):
            return None
        self.simulated += 1
        if made.simulation.fits_in_memory:
            return made
        self.misfits.append(InfeasiblePlan(decisions, made.step_s, made.peak_bytes, made.limit_bytes, made.worst_lane))
        return None

    def arranging_for(self, decisions: MultiModuleConfig, order: bool) -> SampleArrangement:
        """What samples cost on every stage: the module's load, by the stage's part of its layers' time."""
        loads: list[SampleLoad] = []
        for costed, (name, own) in zip(self.costed, decisions.modules, strict=True):
            index, way = next((i, way) for i, way in enumerate(costed.ways) if way.matches_decisions(own))
            seconds = costed.profile.ways[index].sample_s
            whole = float(seconds.sum()) or 1.0
            for start, stop in pairwise((0, *own.cuts, len(seconds))):
                part = float(seconds[start:stop].sum()) / whole
                scaled = {name: getattr(way.load, name) * part for name in ("row_s", "token_s", "square_s")}
                loads += [replace(way.load, **scaled)] * decisions.copy_count(name)
        return SampleArrangement(loads=tuple(loads), balance=self.balance, order=order)

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

    def no_plan_error(self, pinned: bool) -> PlanError:
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
        assert isinstance(closest.decisions, MultiModuleConfig)
        missing = format_bytes(closest.peak_bytes - closest.limit_bytes)
        return DoesNotFitError(
            f"No plan fits: at least {missing} are missing on each device of lane {closest.lane} in the closest one.",
            where=closest.decisions.to_text(),
            seen=f"{format_bytes(closest.peak_bytes)} needed",
            allowed=f"{format_bytes(closest.limit_bytes)} of memory",
            next_step="use more devices, devices with more memory, or a smaller batch",
        )


def best_of_each(some: Sequence[EvaluatedPlan], count: int) -> list[EvaluatedPlan]:
    """The fastest of them, FEW at least of each way of placing modules: with guests, in line, or neither."""
    ranked = sorted(some, key=lambda one: one.rank_key)
    few: dict[tuple[bool, bool], list[EvaluatedPlan]] = {}
    for one in ranked:
        few.setdefault((bool(plain_decisions(one).guests), bool(plain_decisions(one).inline)), []).append(one)
    chosen = {id(one) for one in (*ranked[:count], *(one for each in few.values() for one in each[:FEW]))}
    return [one for one in ranked if id(one) in chosen]


def best_of_grids(some: Sequence[EvaluatedPlan]) -> list[EvaluatedPlan]:
    """The fastest of those whose modules have the same replicas, stages and shards, placed alike."""
    first: dict[object, EvaluatedPlan] = {}
    for one in sorted(some, key=lambda one: one.rank_key):
        decisions = plain_decisions(one)
        grids = tuple((name, len(own.replicas), own.stages, len(own.shards)) for name, own in decisions.modules)
        first.setdefault((grids, decisions.guests, decisions.inline), one)
    return [*first.values()]


def plain_decisions(one: EvaluatedPlan) -> MultiModuleConfig:
    """The choices of what was simulated."""
    assert isinstance(one.decisions, MultiModuleConfig)
    return replace(one.decisions, cuts=())


def busiest_s(one: EvaluatedPlan) -> float:
    """What the busiest lane has to do, in whatever order."""
    return float(max(one.simulation.timeline.busy_s))
