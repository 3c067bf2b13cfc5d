"""The best plans of a model of several modules: layouts by the closed form, then the simulator on sampled batches.

Every layout of the short list is made a plan on devices of its own for each module and tried (`trials.py`). The most
promising ones are simulated on all sampled batches and with the orders of other schedule families; the mean over the
batches decides (Entrain, arXiv 2605.27918: one plan for whole batches is enough).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pipefit.cluster.topology import device_count
from pipefit.plan.assemble.module_parts import host_order, within_hosts
from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.modules.constraints_check import allows_inline, check_constraints, sharing_choices
from pipefit.plan.modules.costing import CostedModule, can_pass_hidden
from pipefit.plan.modules.inline import inline_layouts
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
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.request.sampled_batches import Arrange, SampledBatches
from pipefit.plan.types import Job, SampleArrangement
from pipefit.units import format_seconds

SHORT, ACTIONS = 60, 120_000
"""Layouts that are simulated: at most so many, fewer when their actions come to so many."""

EACH = 12
"""Layouts of every choice of modules that share devices that are simulated at least."""

ORDERED, BEST, TRIED = 12, 4, 24
"""Layouts that are simulated with the orders of OTHERS as well; plans that fit on every sampled batch; those that are
tried for these, or as many as it takes to find one."""

TIGHTER, SPARE, MISSES, FEWER = 6, 0.02, 20, 5
"""How often the short list is made again with more memory kept free because nothing of it fits in one of the
placements, the least part of the memory that is then kept free, and after how many layouts that do not fit; FEWER: of a
placement, where another one has some that do."""

AROUND = 4_000
"""Actions of a layout up to which what is next to it is simulated as well (`polish.py`)."""

OTHERS = ("eager-1f1b", "zb-h1")
"""Families that are tried beside 1F1B; their placement is a stage a lane."""

BESIDE = (("eager-1f1b", 2), ("1f1b", 1))
"""(family, units ahead) for layouts with guests: the first one that fits. A pipeline with room between its forwards and
backwards bears what is put in between."""

BESIDE_OTHERS = (("1f1b", 4), ("eager-1f1b", 4), ("zb-h1", 2), ("zb-h1", 4))
"""Those that are tried with the best of them."""


class SettledPlan(NamedTuple):
    """Of a plan that was simulated on all sampled batches."""

    step_s: float
    "The mean over them."
    order: bool
    "Whether its microbatches are put in order: whether they are faster so."
    before: EvaluatedPlan
    "It on the first batch, microbatches as they stand, as plans are compared that were tried on that alone."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSearchResult:
    """What was found, and how."""

    found: SearchResult
    arranging: SampleArrangement
    "Of the best plan."
    mean_s: Mapping[int, float]
    "Over all batches, of plans that were simulated on all of them, by their identity."
    notes: tuple[str, ...]


def search_modules(
    bench: PlannerContext,
    job: Job,
    pins: Mapping[str, Any],
    samples: SampledBatches,
    arrange: Arrange,
    progress: Any = None,
) -> ModuleSearchResult:
    """The best plans under `pins`, the fastest over all sampled batches first. Raises PlanError for pins that mean
    nothing here, and DoesNotFitError."""
    check_constraints(bench.model, job, pins, samples, device_count(bench.cluster))
    finder = ModuleSearch(bench, job, pins, samples, arrange)
    finder.run_search(progress)
    if not finder.trials.fitting:
        raise finder.trials.no_plan_error(pinned=bool(pins))
    return finder.build_result()


class ModuleSearch:
    def __init__(
        self, bench: PlannerContext, job: Job, pins: Mapping[str, Any], samples: SampledBatches, arrange: Arrange
    ) -> None:
        own = {module.name: _module_constraints(pins, module.name) for module in bench.model.modules}
        self.bench, self.job, self.pins = bench, job, pins
        self.trials = ModuleTrials(bench, job, own, samples, arrange, pins.get("balance", True))
        self.orders_tried = (pins["order"],) if "order" in pins else (False, True)
        "Whether microbatches change places in their pipelines: what of it is tried."
        self.settled: dict[int, SettledPlan] = {}
        "What is known of what was simulated on all sampled batches, by its identity."
        self.combined = self.considered = 0
        self.closed_s = float("inf")
        self.fixed = {
            name: {key: len(value) if key == "replicas" else value for key, value in each.items() if key in FIXED}
            for name, each in own.items()
        }
        each = {module.name: samples.images_per_sample(module.space) for module in bench.model.modules}
        self.images = {name: count for name, count in each.items() if count}
        "Of modules whose samples' images are known, how many an average sample has."
        profiles = [one.profile for one in self.trials.costed]
        self.backbone = profiles[backbone_of(profiles)].name
        able = can_share(profiles)
        self.inline = allows_inline(pins, list(own), able)
        "Whether layouts with the other modules in line with the backbone are looked at."
        alone = "inline" in pins.values()
        self.sharing = [] if alone else sharing_choices(pins, list(own), able)

    def run_search(self, progress: Any) -> None:
        """Simulate the short list, with more memory kept free as long as nothing of it fits in one of the placements;
        then the best of it in other orders, and on every batch."""
        limit = min(float(kind.memory_bytes) for kind in self.bench.network.kinds)
        spare = 0.0
        for _ in range(TIGHTER):
            known = len(self.trials.misfits)
            self.simulate_all(self.short_list(limit - spare), progress)
            lacking = [one.peak_bytes - one.limit_bytes for one in self.trials.misfits[known:]]
            fit = {frozenset(plain_decisions(one).shared_modules) for one in self.trials.fitting}
            if not lacking or all(frozenset(choice.items()) in fit for choice in self.placement_choices()):
                break
            spare = max(2 * spare, min(lacking), SPARE * limit)
        self.try_orders()
        for start in best_of_each(best_of_grids(self.trials.fitting), 1):
            polish_plan(start, self.fitting_neighbours)
        self.rank_on_batches()
        if self.trials.fitting:
            polish_plan(self.settled[id(self.trials.fitting[0])].before, self.fitting_neighbours)
            self.rank_on_batches()

    def fitting_neighbours(self, one: EvaluatedPlan) -> list[EvaluatedPlan]:
        """What differs from it in one thing, as far as it fits; nothing where its actions come to too many."""
        decisions = plain_decisions(one)
        if 2 * decisions.lane_count * decisions.microbatches > AROUND:
            return []
        samples = self.job.batch // decisions.microbatches
        others = neighbour_layouts(decisions, self.trials.costed, samples, self.images, self.pins)
        return [made for other in others if (made := self.trials.simulate_plan(other)) is not None]

    def try_orders(self) -> None:
        """Simulate the best layouts in other orders, too, and of those without guests all whose busiest lane has less
        to do than the best step takes, the least busy first, until their actions come to ACTIONS."""
        known = list(self.trials.fitting)
        best = {id(one): one for one in best_of_each(known, ORDERED)}
        alone = [one for one in known if not plain_decisions(one).guests]
        rest = sorted((one for one in alone if id(one) not in best), key=busiest_s)
        actions = 0
        for one in (*best.values(), *rest):
            fastest_s = min(each.step_s for each in self.trials.fitting)
            if id(one) not in best and (busiest_s(one) >= fastest_s or actions > ACTIONS):
                break
            others = self.other_orders(plain_decisions(one))
            actions += 2 * one.decisions.lane_count * one.decisions.microbatches * len(others)
            for other in others:
                self.trials.simulate_plan(other)

    def other_orders(self, decisions: MultiModuleConfig) -> list[MultiModuleConfig]:
        """The same layout in other orders, as far as none is pinned."""
        if not decisions.guests:
            names = OTHERS if "schedule" not in self.pins else ()
            return [replace(decisions, schedule=name) for name in names]
        return [one for one in self.with_orders(decisions, BESIDE_OTHERS) if one != decisions]

    def with_orders(self, decisions: MultiModuleConfig, of: Sequence[tuple[str, int]]) -> list[MultiModuleConfig]:
        """The layout, which has guests, in these orders with what is pinned in place of theirs."""
        found = {
            (self.pins.get("schedule", name), self.pins.get("ahead", ahead)): None for name, ahead in of
        }  # in their order, each once
        return [replace(decisions, schedule=name, ahead=ahead) for name, ahead in found]

    def short_list(self, limit_bytes: float) -> tuple[ModuleArrangement, ...]:
        """The best layouts by the closed form, within this memory."""
        count = device_count(self.bench.cluster)
        asked: dict[str, Any] = {
            "counts": [self.pins["microbatches"]] if "microbatches" in self.pins else None,
            "passes": [can_pass_hidden(one, two) for one, two in pairwise(self.trials.costed)],
            "fixed": self.fixed,
        }
        given = (
            [one.profile for one in self.trials.costed],
            min(self.pins.get("devices", count), count),
            self.job.batch,
            limit_bytes,
        )
        found = orchestrate_modules(*given, top=SHORT, sharing=self.sharing, **asked)
        inline = inline_layouts(*given, **asked) if self.inline else None
        for each in filter(None, (found, inline)):
            self.considered += each.considered
            self.combined += each.combined
            self.closed_s = min([self.closed_s, *(layout.step_s for layout in each.best[:1])])
        counts: Counter[frozenset[str]] = Counter()
        chosen = []
        for place, one in enumerate(found.best):
            counts[one.guest_names] += 1
            if place < SHORT or counts[one.guest_names] <= EACH:
                chosen.append(one)
        chosen += inline.best if inline else ()
        return tuple(sorted(chosen, key=lambda one: one.step_s))

    def simulate_all(self, layouts: Sequence[ModuleArrangement], progress: Any) -> None:
        """One after the other until their actions come to ACTIONS; then, too, of every placement of which nothing fits
        yet, until something does or MISSES (FEWER) do not. Where the list is made again, of these placements alone."""
        actions, misses = 0, Counter[object]()
        fit = {frozenset(plain_decisions(one).shared_modules) for one in self.trials.fitting}
        again = frozenset(fit)
        for place, layout in enumerate(layouts):
            decisions = self.decisions_for(layout)
            if decisions is None:
                continue
            placement = frozenset(decisions.shared_modules)
            lacking = misses[placement] < FEWER if fit else misses.total() < MISSES
            if placement in again or not (actions <= ACTIONS if placement in fit else lacking):
                continue
            actions += 2 * (decisions.lane_count + len(decisions.guests)) * decisions.microbatches
            tried = self.with_orders(decisions, BESIDE) if decisions.guests else [decisions]
            if any(self.trials.simulate_plan(one) is not None for one in tried):
                fit.add(placement)
            else:
                misses[placement] += 1
            if progress is not None:
                best_s = min((one.step_s for one in self.trials.fitting), default=None)
                progress(len(layouts) - place - 1, self.trials.simulated, best_s)

    def rank_on_batches(self) -> None:
        """The order of the best that fit on all sampled batches, by their mean over these, with their microbatches as
        they stand or put in order; those that do not fit on all are left out. As long as one that was not tried is
        faster on the batch shown than the best of these on all, it is tried, too: what is left out may have been
        fast."""
        settled = [one for one in self.trials.fitting if id(one) in self.settled]
        tried = {id(one) for one in settled}
        while len(tried) < TRIED or not settled:
            rest = [one for one in self.trials.fitting if id(one) not in tried]
            best_s = min((self.settled[id(one)].step_s for one in settled), default=float("inf"))
            faster = [one for one in sorted(rest, key=lambda one: one.rank_key)[:1] if one.step_s < best_s]
            left = best_of_each(rest, BEST - len(settled)) if len(settled) < BEST else faster
            if not left:
                break
            for one in left:
                tried.add(id(one))
                made = {order: self.trials.on_all(one, order) for order in self.orders_tried}
                means_s = {order: float(np.mean([each.step_s for each in own])) for order, own in made.items() if own}
                if means_s:
                    wanted = not plain_decisions(
                        one
                    ).guests  # whose order of actions is made for microbatches as they stand
                    order = min(means_s, key=lambda order: (means_s[order], order != wanted))
                    self.settled[id(made[order][0])] = SettledPlan(means_s[order], order, one)
                    settled.append(made[order][0])
        rest = [one for one in self.trials.fitting if id(one) not in tried]
        settled.sort(key=lambda one: (self.settled[id(one)].step_s, one.rank_key))
        self.trials.fitting = [*settled, *sorted(rest, key=lambda one: one.rank_key)]

    def decisions_for(self, arrangement: ModuleArrangement) -> MultiModuleConfig | None:
        """The choices that a layout stands for; None where its shard groups do not fit into the hosts."""
        own = [layout for layout in arrangement.modules if not layout.shared and not layout.inline]
        hosts = [host.devices for host in self.bench.cluster.hosts]
        devices = host_order([(layout.device_count, layout.shards) for layout in own], hosts)
        if not devices:
            return None
        placed = dict(zip([layout.module for layout in own], devices, strict=True))
        common = {
            "microbatches": arrangement.microbatches,
            "schedule": self.pins.get("schedule", "1f1b"),
            "zero1": self.pins.get("zero1", True),
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
        divided = tuple(name for name in self.images if self.pins.get(f"{name}.divide") == "images")
        made = MultiModuleConfig(
            **common, modules=modules, backbone=self.backbone, guests=guests, inline=arrangement.inline_names,
            multiples=multiples, divided=divided,
        )  # fmt: skip
        return made if within_hosts(made, hosts) else None

    def build_result(self) -> ModuleSearchResult:
        fitting, samples = self.trials.fitting, self.trials.samples
        best = fitting[0]
        mean_s, order, _ = self.settled[id(best)]
        arranging = self.trials.arranging_for(plain_decisions(best), order)
        told_apart = {_plan_key(one): one for one in reversed(fitting)}
        distinct = [one for one in fitting if told_apart[_plan_key(one)] is one]
        first = {plain_decisions(one).shared_modules: one for one in reversed(distinct)}
        others = sorted((one for one in first.values() if one is not best), key=lambda one: one.rank_key)
        known = {id(best), *map(id, others)}
        found = SearchResult(
            fitting=(best, *others, *(one for one in distinct if id(one) not in known)),
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
                f"modules: {each}"
                for each in placement_notes(
                    fitting, self.trials.misfits, self.placement_choices(), self.backbone, self.mean_s()
                )
            ),
            f"modules: {self.considered} layouts of single modules, {self.combined} of all together, the best by the "
            f"closed form simulated: {SHORT}, and {EACH} at least of every choice of modules that share devices, until "
            f"their actions come to {ACTIONS:,} and something of every placement fits",
            f"step: {format_seconds(best.step_s)} for the batch shown, {format_seconds(mean_s)} on average over "
            f"all {samples.batch_count} of them; the closed form says {format_seconds(self.closed_s)} at best",
        )
        return ModuleSearchResult(found=found, arranging=arranging, mean_s=self.mean_s(), notes=notes)

    def mean_s(self) -> dict[int, float]:
        """The mean over all batches of what was simulated on all of them, by its identity."""
        return {one: known.step_s for one, known in self.settled.items()}

    def placement_choices(self) -> list[Mapping[str, str]]:
        """What was looked at: of every choice the modules on shared devices, each with its word."""
        found: list[Mapping[str, str]] = [dict.fromkeys(guests, "shared") for guests in self.sharing]
        names = [one.profile.name for one in self.trials.costed if one.profile.name != self.backbone]
        return [*found, dict.fromkeys(names, "inline")] if self.inline else found


FIXED = ("replicas", "stages", "devices", "multiple")


def _module_constraints(pins: Mapping[str, Any], module: str) -> dict[str, Any]:
    """The pins of one module."""
    return {key.partition(".")[2]: value for key, value in pins.items() if key.startswith(f"{module}.")}


def _plan_key(one: EvaluatedPlan) -> tuple[object, ...]:
    """What tells plans apart: their choices but for how far guests are ahead, and their steps."""
    words = one.decisions.to_constraints(())
    return (*(item for item in words.items() if item[0] not in ("ahead", "schedule")), one.step_s)


def _module_fields(layout: ModuleLayout, costed: CostedModule) -> dict[str, Any]:
    way = next(way for way in costed.ways if (way.shards, way.recompute) == (layout.shards, layout.recompute))
    return {
        "stages": layout.stage_count,
        "cuts": layout.cuts,
        "replicas": (1,) * layout.replicas,
        "shards": (1,) * layout.shards,
        "sharding": way.sharding,
        "recompute": (layout.recompute,),
    }
