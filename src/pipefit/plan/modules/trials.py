"""Trials of candidates with several modules on sampled batches: plans that fit, and the memory others lack.

The samples of a batch are arranged for the candidate, and its step is simulated with the exact costs of that
arrangement, ragged microbatches included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import fsum

from pipefit.errors import DoesNotFitError, PlanError, ScheduleError
from pipefit.plan.assemble.module_parts import module_skeleton
from pipefit.plan.assemble.structure import FormsError
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan, InfeasiblePlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.modules.costing import CostedModule, ModuleCosting
from pipefit.plan.modules.module_budgets import MODULE_SEARCH_BUDGET
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.request.sampled_batches import Arrange, SampledBatches
from pipefit.plan.types import Job, SampleArrangement, SampleLoad
from pipefit.schedule.actions import Schedule
from pipefit.units import format_bytes


class ModuleTrials:
    """Trials of one model and job; `own` holds the constraints of every module."""

    def __init__(
        self,
        context: PlannerContext,
        job: Job,
        own: Mapping[str, Constraints],
        samples: SampledBatches,
        arrange: Arrange,
        balance: bool = True,
    ) -> None:
        self.context, self.job, self.samples, self.arrange, self.balance = context, job, samples, arrange, balance
        costing = ModuleCosting(context.programs, context.network, context.layers, job, samples)
        self.costed: list[CostedModule] = [
            costing.profile_module(module, own[module.name]) for module in context.model.modules
        ]
        self.fitting: list[EvaluatedPlan] = []
        self.misfits: list[InfeasiblePlan] = []
        self.simulated = 0

    def simulate_plan(self, decisions: MultiModuleConfig) -> EvaluatedPlan | None:
        """Return one plan on the first sampled batch; None if it does not fit or cannot be built.

        Samples are balanced, but microbatches are not reordered.
        """
        plan = self._simulate_batch(decisions, 0, self.arranging_for(decisions, order=False), None)
        if plan is not None:
            self.fitting.append(plan)
        return plan

    def on_all(self, one: EvaluatedPlan, order: bool) -> list[EvaluatedPlan]:
        """Return a plan of the first batch simulated on every batch, in the same order of actions; [] if it does not
        fit on one.

        With `order`, microbatches are reordered for it.
        """
        decisions, schedule = plain_decisions(one), one.simulation.timeline.schedule
        arranging = self.arranging_for(decisions, order)
        plans = []
        for batch in range(self.samples.batch_count):
            plan = self._simulate_batch(decisions, batch, arranging, schedule)
            if plan is None:
                return []
            plans.append(plan)
        return plans

    def _simulate_batch(
        self, decisions: MultiModuleConfig, batch: int, arranging: SampleArrangement, schedule: Schedule | None
    ) -> EvaluatedPlan | None:
        shares, count = decisions.shares_of_stages, decisions.microbatches
        order = self.arrange(self.samples, batch, arranging, shares, count, schedule)
        names = dict.fromkeys(["samples", *(module.space for module in self.context.model.modules)])
        spaces = [self.samples.to_space(name, self.job, batch, order) for name in names]
        try:
            parts = module_skeleton(self.context.model, self.context.programs, self.job, decisions, spaces)
            plan = evaluate_candidate(self.context, decisions, parts, schedule)
        except (FormsError, ScheduleError):
            return None
        self.simulated += 1
        if plan.simulation.fits_in_memory:
            return plan
        self.misfits.append(InfeasiblePlan(decisions, plan.step_s, plan.peak_bytes, plan.limit_bytes, plan.worst_lane))
        return None

    def arranging_for(self, decisions: MultiModuleConfig, order: bool) -> SampleArrangement:
        """Return the cost of samples on every stage: the module's load times the stage's part of its layers' time."""
        loads: list[SampleLoad] = []
        for costed, (name, config) in zip(self.costed, decisions.modules, strict=True):
            index, variant = next(
                (i, variant) for i, variant in enumerate(costed.ways) if variant.matches_decisions(config)
            )
            seconds = costed.profile.ways[index].sample_s
            total = float(seconds.sum()) or 1.0
            for start, stop in pairwise((0, *config.cuts, len(seconds))):
                part = float(seconds[start:stop].sum()) / total
                scaled = {name: getattr(variant.load, name) * part for name in ("row_s", "token_s", "square_s")}
                loads += [replace(variant.load, **scaled)] * decisions.copy_count(name)
        return SampleArrangement(loads=tuple(loads), balance=self.balance, order=order)

    def work_bound_s(self) -> float:
        """Return a lower bound of any step on these devices.

        It is the larger of all samples of the first batch in every module's cheapest variant, divided evenly over all
        devices, and the fixed time of one microbatch through all modules.
        """
        total_s = 0.0
        for costed in self.costed:
            profile = costed.profile
            samples = float(profile.weights[0].sum()) if profile.weights.size else float(self.job.batch)
            total_s += samples * min(variant.shards * float(variant.sample_s.sum()) for variant in profile.ways)
        fixed_s = fsum(
            min(float(variant.fixed_s.sum()) for variant in costed_module.profile.ways) for costed_module in self.costed
        )
        return max(total_s / self.context.network.devices, fixed_s)

    def no_plan_error(self, constrained: bool) -> PlanError:
        """Return the error for a search without a plan; `constrained` if there were constraints."""
        if not self.misfits:
            devices = self.context.network.devices
            return DoesNotFitError(
                "No layout of the modules fits: by the closed form every one needs more memory or devices.",
                where=", ".join(module.name for module in self.context.model.modules),
                seen=f"{devices} devices for {len(self.costed)} modules, batch {self.job.batch}",
                allowed="every module within the memory of its devices, and no more replicas than samples in a "
                "microbatch or stages than layers",
                next_step="use more devices, or a smaller model" + (", or drop a --fix" if constrained else ""),
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
    """Return the fastest plans, at least `plans_per_placement` with guests, with inline modules, and with neither."""
    ranked = sorted(some, key=lambda plan: plan.rank_key)
    few: dict[tuple[bool, bool], list[EvaluatedPlan]] = {}
    for plan in ranked:
        few.setdefault((bool(plain_decisions(plan).guests), bool(plain_decisions(plan).inline)), []).append(plan)
    least = MODULE_SEARCH_BUDGET.plans_per_placement
    chosen = {id(plan) for plan in (*ranked[:count], *(plan for plans in few.values() for plan in plans[:least]))}
    return [plan for plan in ranked if id(plan) in chosen]


def best_of_grids(some: Sequence[EvaluatedPlan]) -> list[EvaluatedPlan]:
    """Return the fastest plan for each choice of the modules' replicas, stages, shards and placement."""
    first: dict[object, EvaluatedPlan] = {}
    for plan in sorted(some, key=lambda plan: plan.rank_key):
        decisions = plain_decisions(plan)
        grids = tuple(
            (name, len(config.replicas), config.stages, len(config.shards)) for name, config in decisions.modules
        )
        first.setdefault((grids, decisions.guests, decisions.inline), plan)
    return [*first.values()]


def plain_decisions(one: EvaluatedPlan) -> MultiModuleConfig:
    """Return the decisions of a simulated plan."""
    assert isinstance(one.decisions, MultiModuleConfig)
    return replace(one.decisions, cuts=())


def busiest_s(one: EvaluatedPlan) -> float:
    """Return the busy time of the busiest lane, which no order changes."""
    return float(max(one.simulation.timeline.busy_s))
