"""Plans whose stages are held by groups of devices: looked for after the rest of the search, and kept where faster.

Every layout of groups (`layouts.py`) has a floor for each number of microbatches (`group_bounds.py`); what cannot beat
the best plan that is known is not looked at again. For the most promising ones the programs are searched
(`program_costs.py`): their costs raise the floors. Then, by what 1F1B would take, the forms of the hidden state
between groups are chosen (`forms.py`), the layers cut and the step simulated as all candidates are; the best ones get
the orders of the other families, and fitted ones, and slices (`sliced_layouts.py`). How much is looked at is counted,
so the plan is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipefit.cost.static_memory import COMPUTE_BYTES
from pipefit.errors import PipefitError, PlanError
from pipefit.layout import TensorForm
from pipefit.model.graph import size_value
from pipefit.plan.assemble.structure import FormsError
from pipefit.plan.candidates.queue import SearchCandidate
from pipefit.plan.candidates.space import RECOMPUTE
from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.device_groups.group_bounds import GroupLowerBounds, LaneLoads, step_bound_s, step_guess_s
from pipefit.plan.passes.device_groups.hidden_forms import LaneForms, cheapest_forms, single_device_lane
from pipefit.plan.passes.device_groups.layouts import FEW, Devices, GroupLayout, iter_layouts, reorder_lanes
from pipefit.plan.passes.device_groups.program_costs import GroupRequest, ProgramOracle
from pipefit.plan.passes.device_groups.sliced_layouts import with_slices
from pipefit.plan.passes.fitted_orders import FIT, HOPE, fit_layout, recompute_choices, tables_of
from pipefit.plan.passes.search import TIE, LayoutSearch
from pipefit.plan.request.decisions import ParallelConfig, check_config
from pipefit.plan.request.sliceable import document_obstacles
from pipefit.plan.types import Job, Recompute
from pipefit.schedule.families import FAMILIES
from pipefit.shard.synthesize import SynthesizedProgram
from pipefit.units import format_seconds

PROGRAMS = (24, 4)
"""Groups that differ, or are asked for different things, whose programs are searched: on few devices, and on many."""

ALIKE = 0.95
"""What programs of a group cost against their floor is taken to be so much for other rows and microbatches of it."""

LOOKS = 12
"""Layouts that are cut and simulated."""

ACTIONS = 6_000
"""Actions of what is simulated, after which no more is."""

PATIENCE = 4
"""So many times more of them as long as nothing fits."""

BEST = 2
"""Layouts that get the orders of other families and fitted ones, and one more whose lanes are better turned."""

UNFIT_PINS = ("placement", "cuts", "inner")
"""With one of these pinned groups are not looked for."""


@dataclass(frozen=True, slots=True)
class GroupingResult:
    """What looking for groups came to."""

    found: SearchResult
    note: str
    "In words, for the plan; '' where nothing was looked for."


@dataclass(frozen=True, slots=True)
class GroupCandidate:
    """A layout that may win."""

    step_s: float
    "A floor, then a guess."
    layout: GroupLayout
    microbatches: int


def search_groups(bench: PlannerContext, job: Job, pins: Mapping[str, Any], found: SearchResult) -> GroupingResult:
    """What was found, and the plans with groups that beat it."""
    if not _groups_apply(bench, job, pins):
        return GroupingResult(found, "")
    looker = GroupSearch(bench, job, pins, found)
    made = looker.run()
    best = found.fitting[0].step_s if found.fitting else float("inf")
    fitting = sorted((*found.fitting, *made), key=lambda one: one.rank_key)
    counted = f"groups: {looker.looked} layouts, programs searched for {looker.oracle.searched_count} groups"
    counted += f", {looker.simulated_count} simulated"
    if made and made[0].step_s < best * (1 - TIE):
        gain = f"{1 - made[0].step_s / best:.1%} less than without ({format_seconds(best)})" if found.fitting else ""
        note = f"{counted}; {gain or 'nothing fits without'}"
    else:
        note = f"{counted}, none of them faster"
    return GroupingResult(replace(found, fitting=tuple(fitting)) if made else found, note)


def _groups_apply(bench: PlannerContext, job: Job, pins: Mapping[str, Any]) -> bool:
    """Whether groups are not left out, the pins leave room for them, and the cluster has any."""
    if not pins.get("groups", True):
        return False
    if bench.network.devices < 2 or any(key in pins for key in UNFIT_PINS) or pins.get("slices", 1) != 1:
        return False
    if pins.get("mapping", "search") not in ("search", "hostname"):
        return False
    if len(pins.get("shards", (1, 1))) < 2 or pins.get("sharding", "searched") != "searched":
        return False
    return not (job.documents == "apart" and any(document_obstacles(bench.model, "--documents")))


class GroupSearch:
    def __init__(self, bench: PlannerContext, job: Job, pins: Mapping[str, Any], found: SearchResult) -> None:
        self.bench, self.job, self.pins = bench, job, pins
        self.found = found
        self.best_s = next((one.step_s for one in found.fitting if not one.decisions.slices), float("inf"))
        "Of the plans without slices: groups get theirs afterwards."
        self.floors = GroupLowerBounds(bench, job)
        self.oracle = ProgramOracle(bench, job, pins.get("shards", ()))
        self.searcher = LayoutSearch(bench, job, pins, 1, None)
        self.looked = 0
        self.spent = 0
        self.over: dict[object, float] = {}
        "What programs cost against their floor, by groups that are alike."
        self.tied = _has_tied_layers(bench)
        self.divisors = [count for count in range(1, job.batch + 1) if job.batch % count == 0]

    @property
    def simulated_count(self) -> int:
        return self.searcher.simulated

    def run(self) -> list[EvaluatedPlan]:
        """The plans that were found, the fastest first; those that are no faster than what was known among them."""
        hopes = sorted(self.promising_candidates(), key=lambda hope: hope.step_s)
        guessed = sorted(self.search_programs(hopes), key=lambda hope: hope.step_s)
        kept = self.evaluate_candidates(guessed[:LOOKS])
        best = {hope.layout: hope for hope in (*(hope for _, hope in kept[:1]), *guessed[:1])}.values()
        network = self.bench.network
        kept += self.evaluate_candidates(
            replace(hope, layout=one) for hope in best for one in reorder_lanes(network, hope.layout)
        )
        first = [one for one, _ in kept[:BEST]]
        made = [one for one, _ in sorted(kept, key=lambda one: one[0].rank_key)]
        first += [one for one in made[:1] if one not in first]
        others = [other for one in first for other in self.other_orders(one)]
        least_s = min((one.step_s for one in (*self.found.fitting[:1], *made[:1])), default=float("inf"))
        sliced, simulated = with_slices(self.bench, self.job, self.pins, made, least_s)
        self.searcher.simulated += simulated
        return sorted((*made, *others, *sliced), key=lambda one: one.rank_key)

    def promising_candidates(self) -> Iterator[GroupCandidate]:
        """Layouts and numbers of microbatches whose floor lies below the best plan that is known."""
        layers = len(self.bench.only_module.layers)
        way: Recompute = self.pins["recompute"][0] if "recompute" in self.pins else "none"
        zero1 = self.pins.get("zero1", True)
        for layout in iter_layouts(self.bench.network, self.job.batch, layers, self.pins.get("devices")):
            if not self.obeys_constraints(layout) or not self.floors.has_room(layout, zero1):
                continue
            self.looked += 1
            for count in self.microbatch_counts(layout):
                rows = self.job.batch // count // layout.replica_count
                floor_s = step_bound_s(self.floors.lane_loads(layout, rows, count, way), len(layout.lanes), count)
                if floor_s < self.best_s * (1 - TIE):
                    yield GroupCandidate(floor_s, layout, count)

    def obeys_constraints(self, layout: GroupLayout) -> bool:
        """Whether the layout is what is pinned."""
        replicas, stages = self.pins.get("replicas"), self.pins.get("stages")
        if replicas is not None and (len(replicas) != layout.replica_count or len({*replicas}) > 1):
            return False
        if "shards" in self.pins and any(len(lane[0]) != len(self.pins["shards"]) for lane in layout.lanes):
            return False
        return stages is None or stages == len(layout.lanes)

    def microbatch_counts(self, layout: GroupLayout) -> list[int]:
        """Numbers of microbatches with as many rows on every replica."""
        pinned = self.pins.get("microbatches")
        each = [pinned] if pinned else self.divisors
        return [count for count in each if self.job.batch % (count * layout.replica_count) == 0]

    def search_programs(self, hopes: Sequence[GroupCandidate]) -> Iterator[GroupCandidate]:
        """Those that may still win when their programs are known, with what 1F1B would take; the most promising ones,
        until enough programs were searched."""
        most = PROGRAMS[self.bench.network.devices > FEW]
        for hope in hopes:
            lanes, count = len(hope.layout.lanes), hope.microbatches
            if step_bound_s(self.lane_loads(hope, self.expected_cost_s), lanes, count) >= self.best_s * (1 - TIE):
                continue
            if self.oracle.searched_count >= most:
                return
            if step_bound_s(self.lane_loads(hope, self.least_cost_s), lanes, count) >= self.best_s * (1 - TIE):
                continue
            busy = self.lane_loads(hope, self.known_cost_s)
            if step_bound_s(busy, lanes, count) < self.best_s * (1 - TIE):
                yield replace(hope, step_s=step_guess_s(busy, lanes, count))

    def lane_loads(
        self, hope: GroupCandidate, cost_s: Callable[[tuple[Devices, ...], GroupRequest | None, float], float]
    ) -> LaneLoads:
        """The lanes with a microbatch, where each costs what is said, given what is asked and the floor."""
        rows = self.job.batch // hope.microbatches // hope.layout.replica_count
        asks = {
            self.floors.lane_key(lane): ask
            for lane, ask in zip(hope.layout.lanes, self.lane_requests(hope), strict=True)
        }
        costs = [
            (count, cost_s(lane, asks[self.floors.lane_key(lane)], self.floors.group_s(lane, rows, hope.microbatches)))
            for lane, count in self.floors.distinct_lanes(hope.layout)
        ]
        return self.floors.shared_loads(costs)

    def expected_cost_s(self, lane: tuple[Devices, ...], ask: GroupRequest | None, floor_s: float) -> float:
        """What the lane's programs likely cost, by what others of its groups do."""
        return floor_s * (1.0 if ask is None else self.over.get(self.floors.lane_key(lane), 1.0))

    def least_cost_s(self, lane: tuple[Devices, ...], ask: GroupRequest | None, floor_s: float) -> float:
        """What the lane's programs cost, searched if they have to be, were memory free."""
        if ask is None:
            return floor_s
        cost_s = self.oracle.least_s(ask)
        key = self.floors.lane_key(lane)
        self.over[key] = min(self.over.get(key, float("inf")), max(1.0, ALIKE * cost_s / floor_s))
        return cost_s

    def known_cost_s(self, lane: tuple[Devices, ...], ask: GroupRequest | None, floor_s: float) -> float:
        """What the lane's programs cost."""
        if ask is None:
            return floor_s
        best = self.oracle.best_programs(ask)
        return best.cost_s if best is not None else float("inf")

    def lane_requests(self, hope: GroupCandidate) -> list[GroupRequest | None]:
        """What is asked for every lane; None for devices alone."""
        layout, count = hope.layout, hope.microbatches
        rows = self.job.batch // count // layout.replica_count
        rates = [1 / self.floors.group_s(lane, rows, count) for lane in layout.lanes]
        return [
            GroupRequest(
                lane=lane,
                rows=rows,
                microbatches=count,
                part=rate / sum(rates),
                tied_whole=self.tied and len(rates) > 1,
            )
            if len(lane[0]) > 1
            else None
            for lane, rate in zip(layout.lanes, rates, strict=True)
        ]

    def evaluate_candidates(self, hopes: Iterable[GroupCandidate]) -> list[tuple[EvaluatedPlan, GroupCandidate]]:
        """What becomes of these, the fastest first, as long as they may win and there is something left to spend."""
        kept: list[tuple[EvaluatedPlan, GroupCandidate]] = []
        for hope in hopes:
            if self.spent > (ACTIONS if self.best_s < float("inf") else PATIENCE * ACTIONS):
                break
            if hope.step_s > self.best_s * (1 + HOPE):
                break
            new = self.evaluate_candidate(hope)
            self.best_s = min((self.best_s, *(one.step_s for one in new)))
            kept += [(one, hope) for one in new]
        return sorted(kept, key=lambda one: one[0].rank_key)

    def evaluate_candidate(self, hope: GroupCandidate) -> list[EvaluatedPlan]:
        """Cut and simulate a layout; with more recomputation or split optimizer state until it fits."""
        laid = self.build_decisions(hope)
        if laid is None:
            return []
        for recompute, zero1 in self.leaner_choices(hope.layout):
            decisions = replace(laid, recompute=recompute, zero1=zero1)
            known = {id(one) for one in self.searcher.fitting}
            self.spent += 3 * decisions.stage_count * decisions.microbatches
            candidate = SearchCandidate(decisions)
            again: float | None = 0.0
            try:
                while again is not None and again < self.best_s * (1 + HOPE):
                    again = self.searcher.raise_level(candidate, again)
            except FormsError:  # of the layers at a cut
                return []
            new = [one for one in self.searcher.fitting if id(one) not in known]
            if new or again is not None:
                return new
        return []

    def leaner_choices(self, layout: GroupLayout) -> Iterator[tuple[tuple[Recompute, ...], bool]]:
        """Ways of recomputing and ZeRO-1, the fastest first."""
        ways = [self.pins["recompute"]] if "recompute" in self.pins else RECOMPUTE
        zeros = [self.pins["zero1"]] if "zero1" in self.pins else [False, True][: 1 + (layout.replica_count > 1)]
        for way in ways:
            if len(way) in (1, len(layout.lanes)):
                yield from ((way, zero1) for zero1 in zeros)

    def build_decisions(self, hope: GroupCandidate) -> ParallelConfig | None:
        """The choices that a layout stands for, its programs with the forms that go together best; None where there are
        none. Nothing is recomputed and no state split."""
        layout, count = hope.layout, hope.microbatches
        rows = self.job.batch // count // layout.replica_count
        held: list[LaneForms] = []
        sets: list[Mapping[TensorForm, SynthesizedProgram]] = []
        for lane, ask in zip(layout.lanes, self.lane_requests(hope), strict=True):
            if ask is None:
                held.append(single_device_lane(lane[0][0], self.floors.group_s(lane, rows, count)))
                sets.append({})
                continue
            forms = self.oracle.programs_by_form(ask)
            if not forms:
                return None
            shares = next(iter(forms.values())).shares
            costs = {form: one.cost_s * ask.part for form, one in forms.items()}
            held.append(LaneForms(devices=lane[0], shares=shares, cost_s=costs))
            sets.append(forms)
        placement = tuple(range(len(layout.lanes)))
        width = COMPUTE_BYTES[self.job.precision]
        chosen = cheapest_forms(self.bench.network, held, placement, self.hidden_shape(rows), width)
        if chosen is None:
            return None
        found = [forms[form] if forms else None for forms, form in zip(sets, chosen, strict=True)]
        if (
            len(found) == 1 and (ask := self.lane_requests(hope)[0]) is not None
        ):  # nothing is handed on: every layer its form
            found = [self.oracle.model_programs(ask)]
        recipes = [self.register_recipes(one) if one else "" for one in found]
        shards = tuple(one.shares if one else lane.shares for one, lane in zip(found, held, strict=True))
        decisions = ParallelConfig(
            stages=len(layout.lanes),
            replicas=(1,) * layout.replica_count,
            shards=max(shards, key=len),
            sharding="searched",
            lane_shards=shards,
            recipes=tuple(recipes),
            microbatches=count,
            schedule=self.schedule_name(len(layout.lanes), count),
            devices=layout.device_order,
        )
        return decisions if self.is_valid(decisions) else None

    def register_recipes(self, found: SynthesizedProgram) -> str:
        """The name of a set of recipes, which the workbench takes up."""
        links = dict(zip((layer.graph for layer in self.bench.only_module.layers), found.links, strict=True))
        return self.bench.programs.add_recipes({graph: link.layer_recipe.recipe_text for graph, link in links.items()})

    def schedule_name(self, lanes: int, count: int) -> str:
        pinned = self.pins.get("schedule", "1f1b")
        return "1f1b" if pinned == FIT else str(pinned)

    def is_valid(self, decisions: ParallelConfig) -> bool:
        """Whether the job and the schedule allow it."""
        placement = FAMILIES[decisions.schedule].placement(decisions.lane_count)
        if placement != decisions.lane_of_stage or decisions.unit_count < FAMILIES[decisions.schedule].least_units(
            decisions.lane_count
        ):
            return False
        try:
            check_config(decisions, self.job, len(self.bench.only_module.layers), self.bench.network.devices)
        except PlanError:
            return False
        return True

    def hidden_shape(self, rows: int) -> tuple[int, ...]:
        """The hidden state of a microbatch on one replica: of layers that hand on as many dimensions as any does, what
        the one nearest to the middle does."""
        graphs = [self.bench.model.layer_graph(layer) for layer in self.bench.only_module.layers[:-1]]
        shapes = [graph.find_tensor(graph.outputs[0]).shape for graph in graphs]
        most = max(map(len, shapes), default=0)
        able = [place for place, shape in enumerate(shapes) if len(shape) == most]
        if not able:
            return ()
        symbols = {"B": rows, "T": self.job.sequence}
        middle = min(able, key=lambda place: abs(2 * place + 1 - len(shapes)))
        return tuple(size_value(size, symbols) for size in shapes[middle])

    def other_orders(self, one: EvaluatedPlan) -> Iterator[EvaluatedPlan]:
        """The layout of a plan with an order fitted to its memory, where that is faster."""
        if one.decisions.lane_count == 1 or self.pins.get("schedule", FIT) != FIT:
            return
        recomputes = recompute_choices(self.pins, one.decisions)
        try:
            fitted = fit_layout(self.bench, tables_of(self.bench, self.job, one.decisions, recomputes))
        except PipefitError:
            return
        if fitted is not None and fitted.step_s < one.step_s * (1 - TIE):
            yield fitted


def _has_tied_layers(bench: PlannerContext) -> bool:
    """Whether layers share parameters."""
    names = [name for layer in bench.only_module.layers for name in layer.parameters.values()]
    return len({*names}) < len(names)
