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
from pipefit.layout import Form
from pipefit.model.graph import size_value
from pipefit.plan.assemble.structure import FormsError
from pipefit.plan.candidates.queue import Candidate
from pipefit.plan.candidates.space import RECOMPUTE
from pipefit.plan.evaluate.outcome import Evaluated, Found
from pipefit.plan.evaluate.planner_context import Workbench
from pipefit.plan.passes.device_groups.group_bounds import Busy, GroupFloors, step_floor_s, step_guess_s
from pipefit.plan.passes.device_groups.hidden_forms import Held, alone, cheapest_forms
from pipefit.plan.passes.device_groups.layouts import FEW, Devices, Layout, layouts, turned
from pipefit.plan.passes.device_groups.program_costs import Ask, Oracle
from pipefit.plan.passes.device_groups.sliced_layouts import with_slices
from pipefit.plan.passes.fitted_orders import FIT, HOPE, choices, fit_layout, tables_of
from pipefit.plan.passes.search import TIE, _Search
from pipefit.plan.request.decisions import Decisions, check_decisions
from pipefit.plan.request.sliceable import document_obstacles
from pipefit.plan.types import Job, Recompute
from pipefit.schedule.families import FAMILIES
from pipefit.shard.synthesize import Synthesized
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
class Grouping:
    """What looking for groups came to."""

    found: Found
    note: str
    "In words, for the plan; '' where nothing was looked for."


@dataclass(frozen=True, slots=True)
class _Hope:
    """A layout that may win."""

    step_s: float
    "A floor, then a guess."
    layout: Layout
    microbatches: int


def with_groups(bench: Workbench, job: Job, pins: Mapping[str, Any], found: Found) -> Grouping:
    """What was found, and the plans with groups that beat it."""
    if not _applies(bench, job, pins):
        return Grouping(found, "")
    looker = _Looker(bench, job, pins, found)
    made = looker.run()
    best = found.fitting[0].step_s if found.fitting else float("inf")
    fitting = sorted((*found.fitting, *made), key=lambda one: one.rank)
    counted = f"groups: {looker.looked} layouts, programs searched for {looker.oracle.searched} groups"
    counted += f", {looker.simulated} simulated"
    if made and made[0].step_s < best * (1 - TIE):
        gain = f"{1 - made[0].step_s / best:.1%} less than without ({format_seconds(best)})" if found.fitting else ""
        note = f"{counted}; {gain or 'nothing fits without'}"
    else:
        note = f"{counted}, none of them faster"
    return Grouping(replace(found, fitting=tuple(fitting)) if made else found, note)


def _applies(bench: Workbench, job: Job, pins: Mapping[str, Any]) -> bool:
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


class _Looker:
    def __init__(self, bench: Workbench, job: Job, pins: Mapping[str, Any], found: Found) -> None:
        self.bench, self.job, self.pins = bench, job, pins
        self.found = found
        self.best_s = next((one.step_s for one in found.fitting if not one.decisions.slices), float("inf"))
        "Of the plans without slices: groups get theirs afterwards."
        self.floors = GroupFloors(bench, job)
        self.oracle = Oracle(bench, job, pins.get("shards", ()))
        self.searcher = _Search(bench, job, pins, 1, None)
        self.looked = 0
        self.spent = 0
        self.over: dict[object, float] = {}
        "What programs cost against their floor, by groups that are alike."
        self.tied = _tied(bench)
        self.divisors = [count for count in range(1, job.batch + 1) if job.batch % count == 0]

    @property
    def simulated(self) -> int:
        return self.searcher.simulated

    def run(self) -> list[Evaluated]:
        """The plans that were found, the fastest first; those that are no faster than what was known among them."""
        hopes = sorted(self.hopes(), key=lambda hope: hope.step_s)
        guessed = sorted(self.searched(hopes), key=lambda hope: hope.step_s)
        kept = self.looked_at(guessed[:LOOKS])
        best = {hope.layout: hope for hope in (*(hope for _, hope in kept[:1]), *guessed[:1])}.values()
        network = self.bench.network
        kept += self.looked_at(replace(hope, layout=one) for hope in best for one in turned(network, hope.layout))
        first = [one for one, _ in kept[:BEST]]
        made = [one for one, _ in sorted(kept, key=lambda one: one[0].rank)]
        first += [one for one in made[:1] if one not in first]
        others = [other for one in first for other in self.other_orders(one)]
        least_s = min((one.step_s for one in (*self.found.fitting[:1], *made[:1])), default=float("inf"))
        sliced, simulated = with_slices(self.bench, self.job, self.pins, made, least_s)
        self.searcher.simulated += simulated
        return sorted((*made, *others, *sliced), key=lambda one: one.rank)

    def hopes(self) -> Iterator[_Hope]:
        """Layouts and numbers of microbatches whose floor lies below the best plan that is known."""
        layers = len(self.bench.module.layers)
        way: Recompute = self.pins["recompute"][0] if "recompute" in self.pins else "none"
        zero1 = self.pins.get("zero1", True)
        for layout in layouts(self.bench.network, self.job.batch, layers, self.pins.get("devices")):
            if not self.obeys(layout) or not self.floors.has_room(layout, zero1):
                continue
            self.looked += 1
            for count in self.counts(layout):
                rows = self.job.batch // count // layout.replicas
                floor_s = step_floor_s(self.floors.busy(layout, rows, count, way), len(layout.lanes), count)
                if floor_s < self.best_s * (1 - TIE):
                    yield _Hope(floor_s, layout, count)

    def obeys(self, layout: Layout) -> bool:
        """Whether the layout is what is pinned."""
        replicas, stages = self.pins.get("replicas"), self.pins.get("stages")
        if replicas is not None and (len(replicas) != layout.replicas or len({*replicas}) > 1):
            return False
        if "shards" in self.pins and any(len(lane[0]) != len(self.pins["shards"]) for lane in layout.lanes):
            return False
        return stages is None or stages == len(layout.lanes)

    def counts(self, layout: Layout) -> list[int]:
        """Numbers of microbatches with as many rows on every replica."""
        pinned = self.pins.get("microbatches")
        each = [pinned] if pinned else self.divisors
        return [count for count in each if self.job.batch % (count * layout.replicas) == 0]

    def searched(self, hopes: Sequence[_Hope]) -> Iterator[_Hope]:
        """Those that may still win when their programs are known, with what 1F1B would take; the most promising ones,
        until enough programs were searched."""
        most = PROGRAMS[self.bench.network.devices > FEW]
        for hope in hopes:
            lanes, count = len(hope.layout.lanes), hope.microbatches
            if step_floor_s(self.busy(hope, self.expected), lanes, count) >= self.best_s * (1 - TIE):
                continue
            if self.oracle.searched >= most:
                return
            if step_floor_s(self.busy(hope, self.least), lanes, count) >= self.best_s * (1 - TIE):
                continue
            busy = self.busy(hope, self.known)
            if step_floor_s(busy, lanes, count) < self.best_s * (1 - TIE):
                yield replace(hope, step_s=step_guess_s(busy, lanes, count))

    def busy(self, hope: _Hope, cost_s: Callable[[tuple[Devices, ...], Ask | None, float], float]) -> Busy:
        """The lanes with a microbatch, where each costs what is said, given what is asked and the floor."""
        rows = self.job.batch // hope.microbatches // hope.layout.replicas
        asks = {self.floors.alike(lane): ask for lane, ask in zip(hope.layout.lanes, self.asks(hope), strict=True)}
        costs = [
            (count, cost_s(lane, asks[self.floors.alike(lane)], self.floors.group_s(lane, rows, hope.microbatches)))
            for lane, count in self.floors.distinct(hope.layout)
        ]
        return self.floors.shared(costs)

    def expected(self, lane: tuple[Devices, ...], ask: Ask | None, floor_s: float) -> float:
        """What the lane's programs likely cost, by what others of its groups do."""
        return floor_s * (1.0 if ask is None else self.over.get(self.floors.alike(lane), 1.0))

    def least(self, lane: tuple[Devices, ...], ask: Ask | None, floor_s: float) -> float:
        """What the lane's programs cost, searched if they have to be, were memory free."""
        if ask is None:
            return floor_s
        cost_s = self.oracle.least_s(ask)
        key = self.floors.alike(lane)
        self.over[key] = min(self.over.get(key, float("inf")), max(1.0, ALIKE * cost_s / floor_s))
        return cost_s

    def known(self, lane: tuple[Devices, ...], ask: Ask | None, floor_s: float) -> float:
        """What the lane's programs cost."""
        if ask is None:
            return floor_s
        best = self.oracle.best(ask)
        return best.cost_s if best is not None else float("inf")

    def asks(self, hope: _Hope) -> list[Ask | None]:
        """What is asked for every lane; None for devices alone."""
        layout, count = hope.layout, hope.microbatches
        rows = self.job.batch // count // layout.replicas
        rates = [1 / self.floors.group_s(lane, rows, count) for lane in layout.lanes]
        return [
            Ask(
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

    def looked_at(self, hopes: Iterable[_Hope]) -> list[tuple[Evaluated, _Hope]]:
        """What becomes of these, the fastest first, as long as they may win and there is something left to spend."""
        kept: list[tuple[Evaluated, _Hope]] = []
        for hope in hopes:
            if self.spent > (ACTIONS if self.best_s < float("inf") else PATIENCE * ACTIONS):
                break
            if hope.step_s > self.best_s * (1 + HOPE):
                break
            new = self.look(hope)
            self.best_s = min((self.best_s, *(one.step_s for one in new)))
            kept += [(one, hope) for one in new]
        return sorted(kept, key=lambda one: one[0].rank)

    def look(self, hope: _Hope) -> list[Evaluated]:
        """Cut and simulate a layout; with more recomputation or split optimizer state until it fits."""
        laid = self.decisions(hope)
        if laid is None:
            return []
        for recompute, zero1 in self.leaner(hope.layout):
            decisions = replace(laid, recompute=recompute, zero1=zero1)
            known = {id(one) for one in self.searcher.fitting}
            self.spent += 3 * decisions.stage_count * decisions.microbatches
            candidate = Candidate(decisions)
            again: float | None = 0.0
            try:
                while again is not None and again < self.best_s * (1 + HOPE):
                    again = self.searcher.look_closer(candidate, again)
            except FormsError:  # of the layers at a cut
                return []
            new = [one for one in self.searcher.fitting if id(one) not in known]
            if new or again is not None:
                return new
        return []

    def leaner(self, layout: Layout) -> Iterator[tuple[tuple[Recompute, ...], bool]]:
        """Ways of recomputing and ZeRO-1, the fastest first."""
        ways = [self.pins["recompute"]] if "recompute" in self.pins else RECOMPUTE
        zeros = [self.pins["zero1"]] if "zero1" in self.pins else [False, True][: 1 + (layout.replicas > 1)]
        for way in ways:
            if len(way) in (1, len(layout.lanes)):
                yield from ((way, zero1) for zero1 in zeros)

    def decisions(self, hope: _Hope) -> Decisions | None:
        """The choices that a layout stands for, its programs with the forms that go together best; None where there are
        none. Nothing is recomputed and no state split."""
        layout, count = hope.layout, hope.microbatches
        rows = self.job.batch // count // layout.replicas
        held: list[Held] = []
        sets: list[Mapping[Form, Synthesized]] = []
        for lane, ask in zip(layout.lanes, self.asks(hope), strict=True):
            if ask is None:
                held.append(alone(lane[0][0], self.floors.group_s(lane, rows, count)))
                sets.append({})
                continue
            forms = self.oracle.forms(ask)
            if not forms:
                return None
            shares = next(iter(forms.values())).shares
            costs = {form: one.cost_s * ask.part for form, one in forms.items()}
            held.append(Held(devices=lane[0], shares=shares, cost_s=costs))
            sets.append(forms)
        placement = tuple(range(len(layout.lanes)))
        width = COMPUTE_BYTES[self.job.precision]
        chosen = cheapest_forms(self.bench.network, held, placement, self.shape(rows), width)
        if chosen is None:
            return None
        found = [forms[form] if forms else None for forms, form in zip(sets, chosen, strict=True)]
        if len(found) == 1 and (ask := self.asks(hope)[0]) is not None:  # nothing is handed on: every layer its form
            found = [self.oracle.whole(ask)]
        recipes = [self.recipes(one) if one else "" for one in found]
        shards = tuple(one.shares if one else lane.shares for one, lane in zip(found, held, strict=True))
        decisions = Decisions(
            stages=len(layout.lanes),
            replicas=(1,) * layout.replicas,
            shards=max(shards, key=len),
            sharding="searched",
            lane_shards=shards,
            recipes=tuple(recipes),
            microbatches=count,
            schedule=self.schedule(len(layout.lanes), count),
            devices=layout.devices,
        )
        return decisions if self.valid(decisions) else None

    def recipes(self, found: Synthesized) -> str:
        """The name of a set of recipes, which the workbench takes up."""
        links = dict(zip((layer.graph for layer in self.bench.module.layers), found.links, strict=True))
        return self.bench.programs.add({graph: link.recipe.text for graph, link in links.items()})

    def schedule(self, lanes: int, count: int) -> str:
        pinned = self.pins.get("schedule", "1f1b")
        return "1f1b" if pinned == FIT else str(pinned)

    def valid(self, decisions: Decisions) -> bool:
        """Whether the job and the schedule allow it."""
        placement = FAMILIES[decisions.schedule].placement(decisions.lanes)
        if placement != decisions.lane_of_stage or decisions.units < FAMILIES[decisions.schedule].least_units(
            decisions.lanes
        ):
            return False
        try:
            check_decisions(decisions, self.job, len(self.bench.module.layers), self.bench.network.devices)
        except PlanError:
            return False
        return True

    def shape(self, rows: int) -> tuple[int, ...]:
        """The hidden state of a microbatch on one replica: of layers that hand on as many dimensions as any does, what
        the one nearest to the middle does."""
        graphs = [self.bench.model.layer_graph(layer) for layer in self.bench.module.layers[:-1]]
        shapes = [graph.tensor(graph.outputs[0]).shape for graph in graphs]
        most = max(map(len, shapes), default=0)
        able = [place for place, shape in enumerate(shapes) if len(shape) == most]
        if not able:
            return ()
        symbols = {"B": rows, "T": self.job.sequence}
        middle = min(able, key=lambda place: abs(2 * place + 1 - len(shapes)))
        return tuple(size_value(size, symbols) for size in shapes[middle])

    def other_orders(self, one: Evaluated) -> Iterator[Evaluated]:
        """The layout of a plan with an order fitted to its memory, where that is faster."""
        if one.decisions.lanes == 1 or self.pins.get("schedule", FIT) != FIT:
            return
        recomputes = choices(self.pins, one.decisions)
        try:
            fitted = fit_layout(self.bench, tables_of(self.bench, self.job, one.decisions, recomputes))
        except PipefitError:
            return
        if fitted is not None and fitted.step_s < one.step_s * (1 - TIE):
            yield fitted


def _tied(bench: Workbench) -> bool:
    """Whether layers share parameters."""
    names = [name for layer in bench.module.layers for name in layer.parameters.values()]
    return len({*names}) < len(names)
