"""Which device does what: simulated annealing over permutations of the devices, decided by the simulator.

The search works on an estimate of the simulated iteration that never lies above it: the largest of the critical paths
met so far (`paths`), over the times of all transfers and all stages' collectives, which are kept up
incrementally as devices change places (`kernel`). What a round of annealing finds is simulated, its critical
path joins the estimate, and the next round goes on with what the estimate has learned. Seeded and deterministic as
long as the budget is counted in moves. Pipette (arXiv 2405.18093) chose servers by annealing too, with one formula.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipefit.cost.portable import portable_log, portable_power
from pipefit.plan.placement.chains import chain_arrays
from pipefit.plan.placement.kernels.arena import CONSTANT, DEVICE, LEADING, USED, VALUE, WEIGHT, X
from pipefit.plan.placement.kernels.compile import kernel_functions
from pipefit.plan.placement.kernels.state import CUTS, new_state, set_moves
from pipefit.plan.placement.links import Ints
from pipefit.plan.placement.paths import CriticalPaths
from pipefit.plan.placement.shape import PlacementProblem
from pipefit.plan.placement.starts import (
    block_moves,
    chain_order,
    cluster_order,
    host_distance,
    in_host_order,
    spectral_order,
    tile_devices,
    tile_shapes,
)
from pipefit.simulate import Timeline

PROBES = 24
"""Paths that are looked for before the search begins, each with one entry of x made much larger."""

CHUNK, TASKS_A_MOVE = (500, 2500), 8
"""Moves between two simulations, and looks at the clock: within these limits, one for so many tasks of the simulation,
whose time grows with them. The more often the estimate learns, the less the search is led by paths it lacks."""

LONGER = 8
"""Times as many moves at most, while simulations teach the estimate nothing: twice as many after each of them."""

COMPILED_FROM = 20_000
"""Moves from which it pays to import numba, and to compile on the first use on a machine."""

EXPONENTIAL = -portable_log((np.arange(4096) + 0.5) / 4096)
"""Equally likely values of the exponential distribution, so that no exp is called."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementBudget:
    """How long to search: whichever comes first. Only a budget without seconds gives the same placement always."""

    moves: int = 100_000
    seconds: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementResult:
    """What a search found."""

    devices: tuple[int, ...]
    "[slot]: for every (lane, replica, shard), the last fastest."
    step_s: float
    "Simulated, in the order of actions of the candidate."
    given_s: float
    "The same with the devices as they were given."
    moves: int
    simulated: int
    "Placements that were simulated."
    cuts: int
    "Critical paths that were met."


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnealingMode:
    """How one kind of annealing goes."""

    loop: str
    "The compiled function (`compile`)."
    hot: float
    "The first temperature, as a share of what is placed."
    cold: float
    "The last one, as a share of the first."
    stages: tuple[tuple[int, float, float], ...]
    "How many placements are annealed, the best so far; with which part of the moves in all; from which part of `hot`."
    round_moves: int
    "Moves of a round; `round_s` where the budget counts seconds."
    round_s: float

    def round_count(self, budget: PlacementBudget) -> int:
        """How often all is done from the start."""
        if budget.seconds is not None:
            return max(1, round(budget.seconds / self.round_s))
        return max(1, budget.moves // self.round_moves)


DEVICES_WAY = AnnealingMode(
    loop="anneal",
    hot=0.02,
    cold=0.003,
    stages=((6, 0.4, 1.0), (2, 0.3, 0.5), (1, 0.3, 0.25)),
    round_moves=250_000,
    round_s=0.5,
)
SETS_WAY = AnnealingMode(
    loop="anneal_sets", hot=0.01, cold=0.03, stages=((6, 0.3, 0.2), (1, 0.7, 1.0)), round_moves=500_000, round_s=2.5
)
"""Over devices one by one, and over sets of them (`sets`), which find more in fewer and longer rounds."""

FEW_DEVICES = 24
"""Devices up to which they are searched one by one: a matching has the slowest pair as fast as can be, but of all such
it is only one, and with few sets another one may be the best."""


class PlacementSearch:
    """The state of one search."""

    def __init__(self, question: PlacementProblem, timeline: Timeline, compiled: bool) -> None:
        self.question = question
        self.paths = CriticalPaths(question, timeline)
        self.run = kernel_functions(compiled)
        chain = chain_arrays(question)
        self.way = DEVICES_WAY if chain is None or len(question.devices) <= FEW_DEVICES else SETS_WAY
        self.arena = new_state(question, chain)
        self.known: set[bytes] = set()
        self.step_s: dict[bytes, float] = {}
        "Simulated times of the placements that were looked at."
        self.best, self.best_s = question.devices, float("inf")
        self.moves = 0
        self.chunk = max(CHUNK[0], min(CHUNK[1], self.paths.graph.size // TASKS_A_MOVE))
        "Moves between two simulations."

    @property
    def entry_ticks(self) -> Ints:
        """The times of the placement that the state stands at: a copy."""
        return self.arena.array_view(X).copy()

    def estimate_ticks(self, device: Ints) -> int:
        """The estimate of a placement in ticks; the state stands there afterwards."""
        self.arena.fill_array(DEVICE, device)
        return int(self.run["recompute"](self.arena.whole, self.arena.real, self.arena.at))

    def simulate_placement(self, device: Ints) -> float:
        """The simulated time of a placement, whose critical path joins the estimate."""
        name = device[: self.question.shape.slots].tobytes()
        if name not in self.step_s:
            self.estimate_ticks(device)
            step_s, weight, constant = self.paths.critical_cut(self.entry_ticks)
            self.add_cut(weight, constant)
            self.step_s[name] = step_s
            if step_s < self.best_s:
                self.best, self.best_s = device.copy(), step_s
        return self.step_s[name]

    def add_cut(self, weight: Ints, constant: int) -> None:
        """One more path in the estimate, in the place of the least if there is no room."""
        name = weight.tobytes() + constant.to_bytes(8, "little")
        if name in self.known:
            return
        self.known.add(name)
        used = int(self.arena.at[USED])
        cut = used if used < CUTS else int(self.arena.array_view(VALUE).argmin())
        self.arena.at[USED] = max(used, cut + 1)
        self.arena.array_view(WEIGHT).reshape(-1, CUTS)[:, cut] = weight
        self.arena.array_view(CONSTANT)[cut] = constant

    def probe_entries(self, device: Ints) -> None:
        """Paths that would be critical if one flow or term were the slow one."""
        self.estimate_ticks(device)
        x, flows = self.entry_ticks, self.question.flow_count
        entries = [[flow, flows + flow] for flow in range(flows)]
        entries += [[2 * flows + term] for term in range(len(self.question.shape.passes))]
        for some in entries[:: max(1, -(-len(entries) // PROBES))]:
            slow = x.copy()
            slow[some] = 3 * slow[some] + int(x[: 2 * flows].max(initial=0))
            self.add_cut(*self.paths.critical_cut(slow)[1:])

    def placed_ticks(self) -> float:
        """What transfers and collectives take on the largest cut where the state stands."""
        leading = self.arena.array_view(WEIGHT).reshape(-1, CUTS)[:, self.arena.at[LEADING]]
        return float((leading * self.arena.array_view(X)).sum())

    def run_annealing(
        self, start: Ints, start_s: float, racks: Sequence[Sequence[int]], course: AnnealingRun
    ) -> tuple[Ints, float]:
        """(best placement, its simulated time) of an annealing from `start`. Every chunk of moves the best placement
        since the last time is simulated, and the estimate learns from it."""
        question = self.question
        set_moves(self.arena, block_moves(start, question.shape, question.links, racks))
        self.estimate_ticks(start)
        hot = max(course.heat * self.placed_ticks(), 2.0)
        span = max(self.way.cold, 1.0 / hot)
        factor = 1.0 if course.seconds is not None else portable_power(span, 1.0 / max(1, course.moves))
        arrays, made, began = (self.arena.whole, self.arena.real, self.arena.at), 0, course.clock()
        found, found_s, progress, chunk = start, start_s, 0.0, self.chunk
        while made < course.moves and progress < 1.0:
            count = min(chunk, course.moves - made)
            best, control = start.copy(), np.array([hot * portable_power(span, progress), factor, np.inf])
            self.run[self.way.loop](count, control, course.random, EXPONENTIAL, best, *arrays)
            made += count
            progress = made / course.moves
            if course.seconds is not None:
                progress = max(progress, (course.clock() - began) / max(course.seconds, 1e-9))
            if np.isfinite(control[2]):
                now, known = self.arena.array_view(DEVICE).copy(), len(self.known)
                step_s = self.simulate_placement(best)
                chunk = self.chunk if len(self.known) > known else min(2 * chunk, LONGER * self.chunk)
                if step_s < found_s:
                    found, found_s = best, step_s
                self.estimate_ticks(now)
        self.moves += made
        return found, found_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnealingRun:
    """One annealing."""

    moves: int
    heat: float
    "The first temperature, as a share of what transfers and collectives take of the estimate."
    random: Ints
    seconds: float | None
    "It ends after so many; the temperature falls by the clock then, else by the moves."
    clock: Clock


def search_placement(
    question: PlacementProblem,
    timeline: Timeline,
    budget: PlacementBudget | None = None,
    *,
    compiled: bool | None = None,
    clock: Clock = time.perf_counter,
) -> PlacementResult:
    """The best placement found for a candidate, never slower in the simulator than the given one.

    `compiled` forces numba on or off; the result is the same. `clock` is what `budget.seconds` is counted by.
    """
    budget = budget or PlacementBudget()
    began = clock()
    if compiled is None:
        compiled = budget.moves >= COMPILED_FROM or "numba" in sys.modules
    searcher = PlacementSearch(question, timeline, compiled)
    rounds = searcher.way.round_count(budget)

    given = question.devices
    given_s = searcher.simulate_placement(given)
    starts, racks = starting_placements(question)
    if question.shape.slots > 1:
        searcher.probe_entries(given)
        ranked = sorted(starts, key=lambda name: (searcher.estimate_ticks(starts[name]), name))[
            : searcher.way.stages[0][0]
        ]
        random = np.array([12345 + budget.seed, 67890 + 7 * budget.seed], dtype=np.int64)
        chosen = [starts[name] for name in ranked]
        for index in range(rounds):
            left = None if budget.seconds is None else max(0.0, budget.seconds - (clock() - began)) / (rounds - index)
            _run_round(searcher, chosen, racks, random, budget.moves // rounds, left, clock)
    return PlacementResult(
        devices=tuple(searcher.best[: question.shape.slots].tolist()),
        step_s=searcher.best_s,
        given_s=given_s,
        moves=searcher.moves,
        simulated=len(searcher.step_s),
        cuts=len(searcher.known),
    )


def _run_round(
    searcher: PlacementSearch,
    starts: Sequence[Ints],
    racks: Sequence[Sequence[int]],
    random: Ints,
    moves: int,
    seconds: float | None,
    clock: Clock,
) -> None:
    """The stages once, from these placements; the searcher keeps the best of all. `random` goes on."""
    began, over = clock(), 1.0
    lines = [(searcher.simulate_placement(device), number, device) for number, device in enumerate(starts)]
    for count, share, heat in searcher.way.stages:
        lines = sorted(lines, key=lambda line: line[:2])[:count]
        left = None if seconds is None else max(0.0, seconds - (clock() - began)) * share / (over * len(lines))
        course = AnnealingRun(
            moves=max(1, int(moves * share / len(lines))),
            heat=searcher.way.hot * heat,
            random=random,
            seconds=left,
            clock=clock,
        )
        for index, (step_s, number, device) in enumerate(lines):
            device, step_s = searcher.run_annealing(device, step_s, racks, course)
            lines[index] = (step_s, number, device)
        over -= share


SPECTRAL = 256
"""Hosts up to which eigenvectors are worked out: their time grows with the cube."""


def starting_placements(question: PlacementProblem) -> tuple[dict[str, Ints], list[list[int]]]:
    """(placements to start from by name, racks)."""
    links, shape = question.links, question.shape
    size = max([float(b) for b in shape.bytes] + [1e6])
    distance = host_distance(links, size)
    clustered, racks = cluster_order(distance)
    orders = {
        "hostname order": list(range(len(distance))),
        "nearest neighbours": chain_order(distance),
        "clusters": clustered,
        **({"spectral": spectral_order(distance)} if len(distance) <= SPECTRAL else {}),
        "fastest first": np.argsort(np.median(distance, axis=1), kind="stable").tolist(),
    }
    per_host = int(np.bincount(links.host).min())
    starts: dict[str, Ints] = {"given": question.devices}
    for name, order in orders.items():
        devices = in_host_order(order, links)
        for tile in tile_shapes(shape, per_host):
            for lanes_first in (False, True):
                words = "pipelines" if lanes_first else "stages"
                starts[f"{name}, {words} next to each other, {tile[0]} x {tile[1]} a host"] = tile_devices(
                    devices, shape, tile, lanes_first
                )
    return starts, racks
