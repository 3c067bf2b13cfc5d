"""The best plans of a model of several modules: layouts by the closed form, then the simulator on sampled batches.

Every layout of the short list becomes a plan with its devices assigned and is tried (`trials.py`). The most promising
ones are simulated on all sampled batches and with the orders of other schedule families; the mean over the batches
decides (Entrain, arXiv 2605.27918: one plan for whole batches is enough).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pipefit.cluster.topology import device_count
from pipefit.optimizers.sharded_state import STATES_UP_TO_ZERO_1, leanest_state
from pipefit.plan.assemble.module_parts import host_order, within_hosts
from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.evaluate.search_progress import BATCHES, INTERRUPTED, MODULES
from pipefit.plan.modules.constraints_check import (
    allows_inline,
    check_constraints,
    inline_requests,
    sharing_choices,
)
from pipefit.plan.modules.costing import CostedModule, can_pass_hidden
from pipefit.plan.modules.inline import inline_layouts
from pipefit.plan.modules.module_budgets import MODULE_SEARCH_BUDGET
from pipefit.plan.modules.notes import arranging_note, placement_notes, shares_note
from pipefit.plan.modules.orchestrate import (
    ModuleArrangement,
    ModuleLayout,
    backbone_of,
    can_share,
    orchestrate_modules,
)
from pipefit.plan.modules.polish import neighbour_layouts, polish_plan
from pipefit.plan.modules.trials import ModuleTrials, best_of_each, best_of_grids, busiest_s, plain_decisions
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.request.sampled_batches import Arrange, SampledBatches
from pipefit.plan.types import Job, SampleArrangement
from pipefit.schedule.families import DEFAULT_FAMILY, FAMILIES
from pipefit.units import format_seconds


class SettledPlan(NamedTuple):
    """Result of a plan that was simulated on all sampled batches."""

    step_s: float
    "Mean over the batches."
    order: bool
    "True if its microbatches are reordered because that is faster."
    before: EvaluatedPlan
    "The plan on the first batch without reordering, comparable with plans simulated on that batch only."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSearchResult:
    """Result of the search."""

    found: SearchResult
    arranging: SampleArrangement
    "Sample arrangement of the best plan."
    mean_s: Mapping[int, float]
    "Mean step over all batches by plan identity, for plans simulated on all of them."
    notes: tuple[str, ...]


def search_modules(
    context: PlannerContext,
    job: Job,
    constraints: Constraints,
    samples: SampledBatches,
    arrange: Arrange,
    keep_best: bool = False,
) -> ModuleSearchResult:
    """Return the best plans under the constraints, the fastest over all sampled batches first.

    With `keep_best`, a KeyboardInterrupt ends the search with the plans so far, and the first note says so.

    Raises PlanError for constraints that do not apply here, and DoesNotFitError.
    """
    check_constraints(context.model, job, constraints, samples, device_count(context.cluster))
    finder = ModuleSearch(context, job, constraints, samples, arrange)
    interrupted = False
    try:
        finder.run_search()
    except KeyboardInterrupt:
        if not keep_best or not finder.settle_best():
            raise
        interrupted = True
    if not finder.trials.fitting:
        raise finder.trials.no_plan_error(constrained=constraints != NO_CONSTRAINTS)
    result = finder.build_result()
    return replace(result, notes=(INTERRUPTED, *result.notes)) if interrupted else result


class ModuleSearch:
    def __init__(
        self, context: PlannerContext, job: Job, constraints: Constraints, samples: SampledBatches, arrange: Arrange
    ) -> None:
        per_module = {module.name: constraints.of_module(module.name) for module in context.model.modules}
        self.context, self.job, self.constraints = context, job, constraints
        self.budget = MODULE_SEARCH_BUDGET
        self.trials = ModuleTrials(context, job, per_module, samples, arrange, constraints.balance is not False)
        self.orders_tried = (constraints.order,) if constraints.order is not None else (False, True)
        "Values to try for reordering the microbatches of a pipeline."
        self.settled: dict[int, SettledPlan] = {}
        "Results of plans that were simulated on all sampled batches, by identity."
        self.combined = self.considered = 0
        self.closed_s = float("inf")
        self.fixed = {
            name: {
                key: len(value) if key == "replicas" else value
                for key, value in module_constraints.to_mapping().items()
                if key in FIXED
            }
            for name, module_constraints in per_module.items()
        }
        image_counts = {module.name: samples.images_per_sample(module.space) for module in context.model.modules}
        self.images = {name: count for name, count in image_counts.items() if count}
        "Mean number of images of a sample, for modules whose images are known."
        profiles = [costed.profile for costed in self.trials.costed]
        self.backbone = profiles[backbone_of(profiles)].name
        able = can_share(profiles)
        self.inline = allows_inline(constraints, list(per_module), able)
        "True if layouts with the other modules inline with the backbone are considered."
        alone = bool(inline_requests(constraints))
        self.sharing = [] if alone else sharing_choices(constraints, list(per_module), able)

    def run_search(self) -> None:
        """Simulate the short list, then the best of it in other orders, and on every batch.

        The short list is computed with more memory reserved as long as none of it fits in one of the placements.
        """
        self.context.tracker.start_pass(MODULES)
        limit = min(float(kind.memory_bytes) for kind in self.context.network.kinds)
        spare = 0.0
        for _ in range(self.budget.short_lists):
            known = len(self.trials.misfits)
            self.simulate_all(self.short_list(limit - spare))
            lacking = [plan.peak_bytes - plan.limit_bytes for plan in self.trials.misfits[known:]]
            fit = {frozenset(plain_decisions(plan).shared_modules) for plan in self.trials.fitting}
            if not lacking or all(frozenset(choice.items()) in fit for choice in self.placement_choices()):
                break
            spare = max(2 * spare, min(lacking), self.budget.reserved_fraction * limit)
        self.try_orders()
        for start in best_of_each(best_of_grids(self.trials.fitting), 1):
            polish_plan(start, self.fitting_neighbours)
        self.context.tracker.start_pass(BATCHES, keeps_plans=False)
        self.rank_on_batches()
        if self.trials.fitting:
            polish_plan(self.settled[id(self.trials.fitting[0])].before, self.fitting_neighbours)
            self.rank_on_batches()

    def fitting_neighbours(self, one: EvaluatedPlan) -> list[EvaluatedPlan]:
        """Return the fitting plans that differ from this one in one thing; none if it has too many actions."""
        decisions = plain_decisions(one)
        if 2 * decisions.lane_count * decisions.microbatches > self.budget.polished_actions:
            return []
        samples = self.job.batch // decisions.microbatches
        neighbours = neighbour_layouts(decisions, self.trials.costed, samples, self.images, self.constraints)
        return [fitting for neighbour in neighbours if (fitting := self.trials.simulate_plan(neighbour)) is not None]

    def try_orders(self) -> None:
        """Simulate the best layouts in other orders.

        Layouts without guests whose busiest lane has less work than the best step follow, the least busy first, until
        their actions reach the budget.
        """
        known = list(self.trials.fitting)
        best = {id(plan): plan for plan in best_of_each(known, self.budget.reordered_layouts)}
        alone = [plan for plan in known if not plain_decisions(plan).guests]
        rest = sorted((plan for plan in alone if id(plan) not in best), key=busiest_s)
        actions = 0
        for plan in (*best.values(), *rest):
            fastest_s = min(fitting.step_s for fitting in self.trials.fitting)
            if id(plan) not in best and (busiest_s(plan) >= fastest_s or actions > self.budget.total_actions):
                break
            reordered = self.other_orders(plain_decisions(plan))
            actions += 2 * plan.decisions.lane_count * plan.decisions.microbatches * len(reordered)
            for reordered_decisions in reordered:
                self.trials.simulate_plan(reordered_decisions)

    def other_orders(self, decisions: MultiModuleConfig) -> list[MultiModuleConfig]:
        """Return the same layout in other orders, unless the order is constrained."""
        if not decisions.guests:
            names = other_families() if self.constraints.schedule is None else ()
            return [replace(decisions, schedule=name) for name in names]
        return [reordered for reordered in self.with_orders(decisions, more_guest_orders()) if reordered != decisions]

    def with_orders(self, decisions: MultiModuleConfig, of: Sequence[tuple[str, int]]) -> list[MultiModuleConfig]:
        """Return the layout, which has guests, in these orders; constraints replace their values."""
        orders = {
            (self.constraints.schedule or name, self.constraints.ahead or ahead): None for name, ahead in of
        }  # distinct, in order
        return [replace(decisions, schedule=name, ahead=ahead) for name, ahead in orders]

    def short_list(self, limit_bytes: float) -> tuple[ModuleArrangement, ...]:
        """Return the best layouts by the closed form, within this memory."""
        count = device_count(self.context.cluster)
        asked: dict[str, Any] = {
            "counts": [self.constraints.microbatches] if self.constraints.microbatches is not None else None,
            "passes": [can_pass_hidden(before, behind) for before, behind in pairwise(self.trials.costed)],
            "fixed": self.fixed,
        }
        common = (
            [costed.profile for costed in self.trials.costed],
            min(self.constraints.devices or count, count),
            self.job.batch,
            limit_bytes,
        )
        divided = orchestrate_modules(*common, top=self.budget.layouts, sharing=self.sharing, **asked)
        inline = inline_layouts(*common, **asked) if self.inline else None
        for result in filter(None, (divided, inline)):
            self.considered += result.considered
            self.combined += result.combined
            self.closed_s = min([self.closed_s, *(layout.step_s for layout in result.best[:1])])
        counts: Counter[frozenset[str]] = Counter()
        chosen = []
        for index, entry in enumerate(divided.best):
            counts[entry.guest_names] += 1
            if index < self.budget.layouts or counts[entry.guest_names] <= self.budget.layouts_per_sharing:
                chosen.append(entry)
        chosen += inline.best if inline else ()
        return tuple(sorted(chosen, key=lambda entry: entry.step_s))

    def simulate_all(self, layouts: Sequence[ModuleArrangement]) -> None:
        """Simulate the layouts until their actions reach the budget.

        For placements without a fitting plan it continues until one fits or too many do not. If the list was
        computed again, only these placements are simulated.
        """
        actions, misses = 0, Counter[object]()
        fit = {frozenset(plain_decisions(plan).shared_modules) for plan in self.trials.fitting}
        again = frozenset(fit)
        for index, layout in enumerate(layouts):
            decisions = self.decisions_for(layout)
            if decisions is None:
                continue
            placement = frozenset(decisions.shared_modules)
            lacking = misses.total() < self.budget.misfits
            if fit:
                lacking = misses[placement] < self.budget.misfits_per_placement
            if placement in again or not (actions <= self.budget.total_actions if placement in fit else lacking):
                continue
            actions += 2 * (decisions.lane_count + len(decisions.guests)) * decisions.microbatches
            tried = self.with_orders(decisions, first_guest_orders()) if decisions.guests else [decisions]
            if any(self.trials.simulate_plan(candidate) is not None for candidate in tried):
                fit.add(placement)
            else:
                misses[placement] += 1
            self.context.tracker.count_left(len(layouts) - index - 1)

    def rank_on_batches(self) -> None:
        """Sort the best plans by their mean over all sampled batches, with microbatches in the better order.

        Plans that do not fit on all batches are removed. A remaining plan that is faster on the first batch than the
        best mean is tried as well, because the plans removed may have been fast.
        """
        settled = [plan for plan in self.trials.fitting if id(plan) in self.settled]
        tried = {id(plan) for plan in settled}
        while len(tried) < self.budget.settling_trials or not settled:
            rest = [plan for plan in self.trials.fitting if id(plan) not in tried]
            best_s = min((self.settled[id(plan)].step_s for plan in settled), default=float("inf"))
            faster = [plan for plan in sorted(rest, key=lambda plan: plan.rank_key)[:1] if plan.step_s < best_s]
            open_plans = self.budget.settled_plans - len(settled)
            left = best_of_each(rest, open_plans) if open_plans > 0 else faster
            if not left:
                break
            for plan in left:
                tried.add(id(plan))
                on_first = self.settle_plan(plan)
                if on_first is not None:
                    settled.append(on_first)
        rest = [plan for plan in self.trials.fitting if id(plan) not in tried]
        settled.sort(key=lambda plan: (self.settled[id(plan)].step_s, plan.rank_key))
        self.trials.fitting = [*settled, *sorted(rest, key=lambda plan: plan.rank_key)]

    def settle_plan(self, plan: EvaluatedPlan) -> EvaluatedPlan | None:
        """Simulate a plan on all batches, in the better order of its microbatches; None if it does not fit on one.

        Returns the plan on the first batch, whose mean is recorded.
        """
        plans_by_order = {order: self.trials.on_all(plan, order) for order in self.orders_tried}
        means_s = {
            order: float(np.mean([batch_plan.step_s for batch_plan in batch_plans]))
            for order, batch_plans in plans_by_order.items()
            if batch_plans
        }
        if not means_s:
            return None
        # the order of actions of plans with guests assumes microbatches without reordering
        wanted = not plain_decisions(plan).guests
        order = min(means_s, key=lambda order: (means_s[order], order != wanted))
        on_first = plans_by_order[order][0]
        self.settled[id(on_first)] = SettledPlan(means_s[order], order, plan)
        return on_first

    def settle_best(self) -> bool:
        """After an interruption, put the best plan that fits on all batches first. Return whether there is one."""
        self.context.tracker.start_pass(BATCHES, keeps_plans=False)
        if self.trials.fitting and id(self.trials.fitting[0]) in self.settled:
            return True
        ranked = sorted(self.trials.fitting, key=lambda plan: plan.rank_key)
        for plan in ranked:
            on_first = self.settle_plan(plan)
            if on_first is not None:
                self.trials.fitting = [on_first, *(other for other in ranked if other is not plan)]
                return True
        return False

    def decisions_for(self, arrangement: ModuleArrangement) -> MultiModuleConfig | None:
        """Return the decisions of a layout; None if its shard groups do not fit into the hosts."""
        device_holders = [layout for layout in arrangement.modules if not layout.shared and not layout.inline]
        hosts = [host.devices for host in self.context.cluster.hosts]
        devices = host_order([(layout.device_count, layout.shards) for layout in device_holders], hosts)
        if not devices:
            return None
        placed = dict(zip([layout.module for layout in device_holders], devices, strict=True))
        common: dict[str, Any] = {
            "microbatches": arrangement.microbatches,
            "schedule": self.constraints.schedule or DEFAULT_FAMILY,
            "sharded_state": leanest_state(self.constraints.sharded_state, STATES_UP_TO_ZERO_1),
        }
        modules = tuple(
            (
                layout.module,
                ParallelConfig(**_module_fields(layout, costed), devices=placed.get(layout.module, ()), **common),
            )
            for layout, costed in zip(arrangement.modules, self.trials.costed, strict=True)
        )
        guests = tuple(layout.module for layout in arrangement.modules if layout.shared)
        multiples = tuple((layout.module, layout.multiple) for layout in arrangement.modules if layout.multiple > 1)
        divided = tuple(name for name in self.images if self.constraints.of_module(name).divide == "images")
        decisions = MultiModuleConfig(
            **common, modules=modules, backbone=self.backbone, guests=guests, inline=arrangement.inline_names,
            multiples=multiples, divided=divided,
        )  # fmt: skip
        return decisions if within_hosts(decisions, hosts) else None

    def build_result(self) -> ModuleSearchResult:
        fitting, samples = self.trials.fitting, self.trials.samples
        best = fitting[0]
        mean_s, order, _ = self.settled[id(best)]
        arranging = self.trials.arranging_for(plain_decisions(best), order)
        told_apart = {_plan_key(plan): plan for plan in reversed(fitting)}
        distinct = [plan for plan in fitting if told_apart[_plan_key(plan)] is plan]
        first = {plain_decisions(plan).shared_modules: plan for plan in reversed(distinct)}
        other_placements = sorted((plan for plan in first.values() if plan is not best), key=lambda plan: plan.rank_key)
        known = {id(best), *map(id, other_placements)}
        result = SearchResult(
            fitting=(best, *other_placements, *(plan for plan in distinct if id(plan) not in known)),
            misfits=tuple(sorted(self.trials.misfits, key=lambda misfit: misfit.bound_s)),
            unfit=len(self.trials.misfits),
            lower_bound_s=self.trials.work_bound_s(),
            open_bound_s=float("inf"),
            considered=self.considered,
            simulated=self.trials.simulated,
        )
        notes = (
            samples.note,
            f"samples: {arranging_note(arranging)}",
            f"modules: {shares_note(best)}",
            *(
                f"modules: {note}"
                for note in placement_notes(
                    fitting, self.trials.misfits, self.placement_choices(), self.backbone, self.mean_s()
                )
            ),
            f"modules: {self.considered} layouts of single modules, {self.combined} of all together, the best by the "
            f"closed form simulated: {self.budget.layouts}, and {self.budget.layouts_per_sharing} at least of every "
            "choice of modules that share devices, until "
            f"their actions come to {self.budget.total_actions:,} and something of every placement fits",
            f"step: {format_seconds(best.step_s)} for the batch shown, {format_seconds(mean_s)} on average over "
            f"all {samples.batch_count} of them; the closed form says {format_seconds(self.closed_s)} at best",
        )
        return ModuleSearchResult(found=result, arranging=arranging, mean_s=self.mean_s(), notes=notes)

    def mean_s(self) -> dict[int, float]:
        """Return the mean over all batches by plan identity, for plans simulated on all of them."""
        return {plan_id: known.step_s for plan_id, known in self.settled.items()}

    def placement_choices(self) -> list[Mapping[str, str]]:
        """Return the placements considered: the modules on shared devices, each with its word."""
        choices: list[Mapping[str, str]] = [dict.fromkeys(guests, "shared") for guests in self.sharing]
        names = [costed.profile.name for costed in self.trials.costed if costed.profile.name != self.backbone]
        return [*choices, dict.fromkeys(names, "inline")] if self.inline else choices


FIXED = ("replicas", "stages", "devices", "multiple")


def other_families() -> list[str]:
    """Return the families that are tried besides the default one; their placement is one stage per lane."""
    return sorted(name for name, family in FAMILIES.items() if family.searched_with_modules)


def first_guest_orders() -> list[tuple[str, int]]:
    """Return (family, units ahead) for layouts with guests, to try until one fits: more units first.

    Guests fit into a pipeline with idle time between its forwards and backwards.
    """
    orders = [(name, ahead) for name in sorted(FAMILIES) for ahead in FAMILIES[name].guest_units_ahead]
    return sorted(orders, key=lambda order: -order[1])


def more_guest_orders() -> list[tuple[str, int]]:
    """Return (family, units ahead) that are also tried with the best layouts with guests."""
    return [(name, ahead) for name in sorted(FAMILIES) for ahead in FAMILIES[name].more_guest_units_ahead]


def _plan_key(one: EvaluatedPlan) -> tuple[object, ...]:
    """Return the key of distinct plans: their decisions except how far guests are ahead, and their step."""
    words = one.decisions.to_constraints(())
    return (*(item for item in words.items() if item[0] not in ("ahead", "schedule")), one.step_s)


def _module_fields(layout: ModuleLayout, costed: CostedModule) -> dict[str, Any]:
    variant = next(
        variant for variant in costed.ways if (variant.shards, variant.recompute) == (layout.shards, layout.recompute)
    )
    return {
        "stages": layout.stage_count,
        "cuts": layout.cuts,
        "replicas": (1,) * layout.replicas,
        "shards": (1,) * layout.shards,
        "sharding": variant.sharding,
        "recompute": (layout.recompute,),
    }
