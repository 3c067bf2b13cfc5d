"""Monolithic layouts of a multimodal model: every module with the language model's replicas and shards.

What Megatron-LM does with such models by the account of DistTrain (arXiv 2408.04275, section 7): encoder and generator
are stages more in front of and behind the language model's pipeline (`apart`). Where layers may share a device in one
layout they can also lie on the language model's first and last devices (`merged`), its layers cut so that lanes are
even. All are simulated by what the planner simulates with, under the same arrangement of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from pipefit.cluster import Cluster
from pipefit.data.multimodal.planning import arranged_samples
from pipefit.errors import PlanError, ScheduleError
from pipefit.model.graph import Model
from pipefit.plan.assemble.module_parts import module_skeleton
from pipefit.plan.assemble.order import computed_schedule, order_problem
from pipefit.plan.assemble.pipeline_work import PlanSkeleton, pipeline_work
from pipefit.plan.assemble.predict import add_prediction
from pipefit.plan.evaluate.evaluate import simulate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.evaluate.port_contention import contended_costs
from pipefit.plan.modules.costing import CostedModule, ModuleCosting
from pipefit.plan.modules.profile import even_cuts
from pipefit.plan.request.constraints import NO_CONSTRAINTS
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.plan.request.sampled_batches import SampledBatches, StageShares
from pipefit.plan.types import Job, Plan, SampleArrangement
from pipefit.schedule.families import FAMILIES
from pipefit.schedule.modules.inline import inline_order

Ends = Literal["apart", "merged"]

SCHEDULES = ("1f1b", "eager-1f1b", "zb-h1")
RECOMPUTE = ("none", "full")
AGAIN = 2
"""Layouts of each kind that are simulated under every schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One monolithic layout."""

    ends: Ends
    replicas: int
    shards: int
    stages: int
    "Of the language model."
    microbatches: int
    recompute: str
    schedule: str = "1f1b"
    sharded_state: str = "optimizer"

    @property
    def lanes(self) -> int:
        return self.stages + (2 if self.ends == "apart" else 0)

    @property
    def devices(self) -> int:
        return self.lanes * self.replicas * self.shards


@dataclass(frozen=True, slots=True)
class Rated:
    """A layout, as it was simulated."""

    layout: Layout
    step_s: float
    fits: bool


class Monolithic:
    """Makes and simulates such layouts of one model for one job."""

    def __init__(self, model: Model, cluster: Cluster, job: Job, samples: SampledBatches) -> None:
        self.context, self.job, self.samples = PlannerContext(model, cluster), job, samples
        costing = ModuleCosting(self.context.programs, self.context.network, self.context.layers, job, samples)
        self.costed: list[CostedModule] = [costing.profile_module(module, NO_CONSTRAINTS) for module in model.modules]

    def layouts(self, least_devices: int, schedules: Sequence[str] = ("1f1b",)) -> Iterator[Layout]:
        """All of them that take at least so many of the devices, whatever they need of memory."""
        devices, batch = self.context.network.devices, self.job.batch
        layers = len(self.costed[1].profile.ways[0].sample_s)
        for ends in ("apart", "merged"):
            for shards in sorted({way.shards for way in self.costed[1].ways}):
                for stages in range(1, layers + 1):
                    lanes = stages + (2 if ends == "apart" else 0)
                    for replicas in range(1, devices // (lanes * shards) + 1):
                        if lanes * shards * replicas < least_devices:
                            continue
                        for count in (n for n in range(1, batch + 1) if batch % n == 0 and batch // n >= replicas):
                            for recompute in RECOMPUTE:
                                for schedule in schedules:
                                    yield Layout(
                                        ends=ends, replicas=replicas, shards=shards, stages=stages,
                                        microbatches=count, recompute=recompute, schedule=schedule,
                                    )  # fmt: skip

    def simulate(
        self, layout: Layout, batch: int = 0, arranging: SampleArrangement | None = None
    ) -> EvaluatedPlan | None:
        """Its step on one sampled batch, whether it fits or not; None where it cannot be made. `arranging`: as
        given; by default balanced, not ordered."""
        decisions = self.decisions(layout)
        if decisions is None:
            return None
        if arranging is None:
            arranging = replace(self.arranging(layout), order=False)
        shares = [StageShares(own.replicas) for _, own in decisions.modules for _ in range(own.stage_count)]
        order = arranged_samples(self.samples, batch, arranging, shares, layout.microbatches)
        names = dict.fromkeys(["samples", *(module.space for module in self.context.model.modules)])
        spaces = [self.samples.to_space(name, self.job, batch, order) for name in names]
        try:
            parts = module_skeleton(self.context.model, self.context.programs, self.job, decisions, spaces)
            if layout.ends == "merged":
                parts = merged(parts, layout.stages)
            work = pipeline_work(parts, self.context.programs)
            costs = contended_costs(self.context, work)
            if layout.ends == "merged":
                computed = inline_order(FAMILIES[layout.schedule].build, order_problem(parts, costs))
            else:
                computed = computed_schedule(layout.schedule, parts, costs)
            return simulate_candidate(self.context, decisions, parts, work, costs, computed)
        except (PlanError, ScheduleError):
            return None

    def rated(self) -> list[Rated]:
        """All layouts on at least three quarters of the devices under 1F1B; the best of them under other schedules and
        with their optimizer state whole, too, as the planner does."""
        least = -(-3 * self.context.network.devices // 4)
        found = [one for layout in self.layouts(least) if (one := self._rated(layout)) is not None]
        for ends in ("apart", "merged"):
            own = sorted((one for one in found if one.layout.ends == ends and one.fits), key=lambda one: one.step_s)
            for one in own[:AGAIN]:
                ways = [{"schedule": name} for name in SCHEDULES[1:]] + [{"sharded_state": "none"}]
                others = (self._rated(replace(one.layout, **way)) for way in ways)
                found += [other for other in others if other is not None]
        return found

    def _rated(self, layout: Layout) -> Rated | None:
        """By its step on the first batch; it fits if it does on every one of them."""
        made = self.simulate(layout)
        if made is None:
            return None
        others = (self.simulate(layout, batch) for batch in range(1, self.samples.batch_count))
        fits = made.simulation.fits_in_memory and all(
            one is not None and one.simulation.fits_in_memory for one in others
        )
        return Rated(layout, made.step_s, fits)

    def useful_s(self) -> float:
        """Device seconds of a mean batch that nothing can save: what its samples add to one device that holds a module
        whole, recomputes nothing and pays no launch."""
        return sum(self._sample_s(costed) for costed in self.costed) * self.job.batch

    def shares(self) -> dict[str, float]:
        """The part of a sample's useful work of every module."""
        whole = sum(self._sample_s(costed) for costed in self.costed)
        return {costed.profile.name: self._sample_s(costed) / whole for costed in self.costed}

    def _sample_s(self, costed: CostedModule) -> float:
        return float(costed.profile.ways[self._index(costed, 1, "none")].sample_s.sum())

    def efficiency(self) -> dict[str, dict[int, float]]:
        """Module -> shards -> what a device gets done of one average sample, against a device alone."""
        found: dict[str, dict[int, float]] = {}
        for costed in self.costed:
            alone = float(_times(costed, self._index(costed, 1, "none")).sum())
            for index, way in enumerate(costed.profile.ways):
                if way.recompute == "none":
                    part = alone / way.shards / float(_times(costed, index).sum())
                    found.setdefault(costed.profile.name, {})[way.shards] = part
        return found

    def plan(self, layout: Layout, arranging: SampleArrangement | None = None) -> Plan:
        """The plan of a layout that can be made, its samples balanced and ordered, with its prediction for the first
        batch."""
        arranging = arranging or self.arranging(layout)
        found = self.simulate(layout, 0, arranging)
        assert found is not None
        plan = self.context.assemble_plan(found.parts, found.decisions, found.simulation.timeline.schedule)
        return replace(add_prediction(plan, self.context.model, found.simulation, 0.0), arranging=arranging)

    def decisions(self, layout: Layout) -> MultiModuleConfig | None:
        """The choices of a layout, its lanes one behind the other; None where a module has no such way."""
        each = layout.replicas * layout.shards
        common: dict[str, Any] = {
            "microbatches": layout.microbatches,
            "schedule": layout.schedule,
            "sharded_state": layout.sharded_state,
        }
        modules, first = [], 0
        for place, costed in enumerate(self.costed):
            if layout.shards not in [way.shards for way in costed.ways]:
                return None
            way = self._way(place, layout)
            cuts = self.cuts(layout, way) if place == 1 else ()
            stages = len(cuts) + 1
            modules.append(
                (
                    costed.profile.name,
                    ParallelConfig(
                        **common, stages=stages, cuts=cuts, replicas=(1,) * layout.replicas,
                        shards=(1,) * layout.shards, sharding=costed.ways[way].sharding,
                        recompute=(layout.recompute,), devices=tuple(range(first, first + stages * each)),
                    ),
                )
            )  # fmt: skip
            first += 0 if layout.ends == "merged" else stages * each
        return MultiModuleConfig(**common, modules=tuple(modules))

    def cuts(self, layout: Layout, way: int) -> tuple[int, ...]:
        """Where the language model is cut: its slowest lane as fast as can be, with what lies there beside it."""
        seconds = _times(self.costed[1], way)
        if layout.stages > len(seconds):
            return ()
        if layout.ends == "apart":
            return even_cuts(seconds)[layout.stages - 1][1:-1]
        ends = [float(_times(self.costed[place], self._way(place, layout)).sum()) for place in (0, 2)]
        whole = np.concatenate(([ends[0]], seconds, [ends[1]]))
        bounds = even_cuts(whole)[layout.stages - 1][1:-1]
        cuts = tuple(min(max(1, bound - 1), len(seconds) - 1) for bound in bounds)
        return tuple(sorted({*cuts})) if len({*cuts}) == len(cuts) else even_cuts(seconds)[layout.stages - 1][1:-1]

    def _way(self, place: int, layout: Layout) -> int:
        return self._index(self.costed[place], layout.shards, layout.recompute)

    @staticmethod
    def _index(costed: CostedModule, shards: int, recompute: str) -> int:
        ways = costed.ways
        return next(i for i, way in enumerate(ways) if (way.shards, way.recompute) == (shards, recompute))

    def arranging(self, layout: Layout) -> SampleArrangement:
        """What samples cost on every stage."""
        decisions = self.decisions(layout)
        assert decisions is not None
        loads = []
        for place, (costed, (_, own)) in enumerate(zip(self.costed, decisions.modules, strict=True)):
            index = self._way(place, layout)
            seconds, load = costed.profile.ways[index].sample_s, costed.ways[index].load
            whole = float(seconds.sum()) or 1.0
            for start, stop in pairwise((0, *own.cuts, len(seconds))):
                part = float(seconds[start:stop].sum()) / whole
                scaled = {name: getattr(load, name) * part for name in ("row_s", "token_s", "square_s")}
                loads.append(replace(load, **scaled))
        return SampleArrangement(loads=tuple(loads))


def _times(costed: CostedModule, way: int) -> Any:
    own = costed.profile.ways[way]
    return own.fixed_s + own.sample_s


def merged(parts: PlanSkeleton, stages: int) -> PlanSkeleton:
    """The parts with the first module on the language model's first lane, and the last on its last. All lanes have
    the same grid, so edges stay."""
    lanes = (0, *range(stages), stages - 1)
    own = tuple(replace(stage, group=lane) for stage, lane in zip(parts.stages, lanes, strict=True))
    return replace(parts, groups=parts.groups[1:-1], stages=own, placement=lanes)
