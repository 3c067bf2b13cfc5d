"""Assignment of devices: simulated annealing over permutations of the devices, decided by the simulator.

The search uses an estimate that never exceeds the simulated step: the maximum of the critical paths seen so far
(`paths`), over the times of all transfers and all stages' collectives, which are updated incrementally as devices are
swapped (`kernels`). The result of each round of annealing is simulated, its critical path joins the estimate, and the
next round continues with it. Seeded and deterministic if the budget counts moves. Pipette (arXiv 2405.18093) also
assigns servers by annealing, with one formula.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipefit.cost.portable import portable_log, portable_power
from pipefit.cost.types import Ints
from pipefit.plan.placement.chains import chain_arrays
from pipefit.plan.placement.kernels.compile import kernel_functions
from pipefit.plan.placement.kernels.state import CUTS, new_tables, with_moves
from pipefit.plan.placement.kernels.tables import LEADING, USED
from pipefit.plan.placement.moves import improve_placement
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

EXPONENTIAL = -portable_log((np.arange(4096) + 0.5) / 4096)
"""Equally likely values of the exponential distribution, so that no exp is called."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementBudget:
    """Limit of a search: whichever comes first. The placement is reproducible only without a limit in seconds."""

    moves: int = 100_000
    seconds: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnealingBudget:
    """The work between two simulations of a search, and the sizes at which its method changes."""

    probe_paths: int = 24
    "Paths collected before the search begins, each with one entry of x made much larger."
    min_chunk_moves: int = 500
    """Least number of moves between two simulations and clock readings. Frequent simulations keep the search from
    being misled by missing paths."""
    max_chunk_moves: int = 2500
    "Largest number of moves between two simulations."
    tasks_per_move: int = 8
    "Within these limits, one move for every so many tasks of the simulation, whose time grows with them."
    max_chunk_factor: int = 8
    "Maximum factor on a chunk while simulations add no path to the estimate: it doubles after each of them."
    single_move_devices: int = 24
    """Devices up to which they are moved one by one: a matching minimises the slowest pair but is only one of several
    such, and with few sets another one may be better."""
    spectral_hosts: int = 256
    "Hosts up to which eigenvectors are computed: their time grows with the cube."
    compiled_moves: int = 20_000
    "Moves from which importing numba, and compiling on the first use on a machine, pays off."

    def chunk_moves(self, tasks: int) -> int:
        """Return the moves between two simulations of this many tasks."""
        return max(self.min_chunk_moves, min(self.max_chunk_moves, tasks // self.tasks_per_move))


ANNEALING_BUDGET = AnnealingBudget()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementResult:
    """Result of a search."""

    devices: tuple[int, ...]
    "[slot]: device of every (lane, replica, shard), the shard varying fastest."
    step_s: float
    "Simulated step, in the order of actions of the candidate."
    given_s: float
    "The same with the devices as given."
    moves: int
    simulated: int
    "Number of placements that were simulated."
    cuts: int
    "Number of distinct critical paths."


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnealingMode:
    """Parameters of one kind of annealing."""

    loop: str
    "Name of the compiled function (`compile`)."
    hot: float
    "Initial temperature, relative to the placed times."
    cold: float
    "Final temperature, relative to the initial one."
    stages: tuple[tuple[int, float, float], ...]
    "(number of the best placements so far to anneal; fraction of all moves; initial fraction of `hot`)."
    round_moves: int
    "Moves of a round; `round_s` if the budget counts seconds."
    round_s: float

    def round_count(self, budget: PlacementBudget) -> int:
        """Return the number of rounds from the start."""
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
"""Annealing over single devices, and over sets of them (`sets`), which finds more in fewer and longer rounds."""


class PlacementSearch:
    """The state of one search."""

    def __init__(self, question: PlacementProblem, timeline: Timeline, compiled: bool) -> None:
        self.question = question
        self.paths = CriticalPaths(question, timeline)
        self.run = kernel_functions(compiled)
        chain = chain_arrays(question)
        self.way = (
            DEVICES_WAY if chain is None or len(question.devices) <= ANNEALING_BUDGET.single_move_devices else SETS_WAY
        )
        self.tables = new_tables(question, chain)
        self.known: set[bytes] = set()
        self.step_s: dict[bytes, float] = {}
        "Simulated times by placement."
        self.best, self.best_s = question.devices, float("inf")
        self.moves = 0
        self.chunk = ANNEALING_BUDGET.chunk_moves(self.paths.graph.size)
        "Moves between two simulations."

    @property
    def entry_ticks(self) -> Ints:
        """A copy of the times of the current placement."""
        return self.tables.state.x.copy()

    def estimate_ticks(self, device: Ints) -> int:
        """Return the estimate of a placement in ticks; it becomes the current placement."""
        self.tables.state.device[:] = device
        return int(self.run["recompute"](self.tables))

    def simulate_placement(self, device: Ints) -> float:
        """Return the simulated time of a placement, and add its critical path to the estimate."""
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
        """Add a path to the estimate, replacing the smallest one if there is no room."""
        name = weight.tobytes() + constant.to_bytes(8, "little")
        if name in self.known:
            return
        self.known.add(name)
        state = self.tables.state
        used = int(state.counters[USED])
        cut = used if used < CUTS else int(state.value.argmin())
        state.counters[USED] = max(used, cut + 1)
        state.weight[:, cut] = weight
        state.constant[cut] = constant

    def probe_entries(self, device: Ints) -> None:
        """Add paths that would be critical if one flow or term were slow."""
        self.estimate_ticks(device)
        x, flows = self.entry_ticks, self.question.flow_count
        entries = [[flow, flows + flow] for flow in range(flows)]
        entries += [[2 * flows + term] for term in range(len(self.question.shape.passes))]
        for slowed_entries in entries[:: max(1, -(-len(entries) // ANNEALING_BUDGET.probe_paths))]:
            slow = x.copy()
            slow[slowed_entries] = 3 * slow[slowed_entries] + int(x[: 2 * flows].max(initial=0))
            self.add_cut(*self.paths.critical_cut(slow)[1:])

    def placed_ticks(self) -> float:
        """Return the time of transfers and collectives on the largest cut of the current placement."""
        state = self.tables.state
        return float((state.weight[:, state.counters[LEADING]] * state.x).sum())

    def run_annealing(
        self, start: Ints, start_s: float, racks: Sequence[Sequence[int]], course: AnnealingRun
    ) -> tuple[Ints, float]:
        """Return (best placement, its simulated time) of an annealing from `start`.

        After every chunk of moves the best placement since the last simulation is simulated and updates the estimate.
        """
        question = self.question
        self.tables = with_moves(self.tables, block_moves(start, question.shape, question.links, racks))
        self.estimate_ticks(start)
        hot = max(course.heat * self.placed_ticks(), 2.0)
        span = max(self.way.cold, 1.0 / hot)
        factor = 1.0 if course.seconds is not None else portable_power(span, 1.0 / max(1, course.moves))
        moves_done, began = 0, course.clock()
        best_placement, found_s, progress, chunk = start, start_s, 0.0, self.chunk
        while moves_done < course.moves and progress < 1.0:
            count = min(chunk, course.moves - moves_done)
            best, control = start.copy(), np.array([hot * portable_power(span, progress), factor, np.inf])
            self.run[self.way.loop](count, control, course.random, EXPONENTIAL, best, self.tables)
            moves_done += count
            progress = moves_done / course.moves
            if course.seconds is not None:
                progress = max(progress, (course.clock() - began) / max(course.seconds, 1e-9))
            if np.isfinite(control[2]):
                now, known = self.tables.state.device.copy(), len(self.known)
                step_s = self.simulate_placement(best)
                chunk = (
                    self.chunk
                    if len(self.known) > known
                    else min(2 * chunk, ANNEALING_BUDGET.max_chunk_factor * self.chunk)
                )
                if step_s < found_s:
                    best_placement, found_s = best, step_s
                self.estimate_ticks(now)
        self.moves += moves_done
        return best_placement, found_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnealingRun:
    """One annealing."""

    moves: int
    heat: float
    "Initial temperature, relative to the transfers and collectives in the estimate."
    random: Ints
    seconds: float | None
    "Time limit; the temperature then falls with the clock, else with the moves."
    clock: Clock


def search_placement(
    question: PlacementProblem,
    timeline: Timeline,
    budget: PlacementBudget | None = None,
    *,
    compiled: bool | None = None,
    clock: Clock = time.perf_counter,
) -> PlacementResult:
    """Return the best placement found for a candidate, never slower in the simulator than the given one.

    `compiled` forces numba on or off; the result is the same. `clock` measures `budget.seconds`.
    """
    budget = budget or PlacementBudget()
    began = clock()
    if compiled is None:
        compiled = budget.moves >= ANNEALING_BUDGET.compiled_moves or "numba" in sys.modules
    searcher = PlacementSearch(question, timeline, compiled)
    rounds = searcher.way.round_count(budget)

    given_devices = question.devices
    given_s = searcher.simulate_placement(given_devices)
    starts, racks = starting_placements(question)
    if question.has_choice:
        searcher.probe_entries(given_devices)
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
    """Run all stages once from these placements; the searcher keeps the best of all. `random` is advanced."""
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
            device, step_s = improve_placement(
                searcher.question, device, step_s, searcher.estimate_ticks, searcher.simulate_placement
            )
            lines[index] = (step_s, number, device)
        over -= share


def starting_placements(question: PlacementProblem) -> tuple[dict[str, Ints], list[list[int]]]:
    """Return (initial placements by name, racks)."""
    links, shape = question.links, question.shape
    size = max([float(b) for b in shape.bytes] + [1e6])
    distance = host_distance(links, size)
    clustered, racks = cluster_order(distance)
    orders = {
        "hostname order": list(range(len(distance))),
        "nearest neighbours": chain_order(distance),
        "clusters": clustered,
        **({"spectral": spectral_order(distance)} if len(distance) <= ANNEALING_BUDGET.spectral_hosts else {}),
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
