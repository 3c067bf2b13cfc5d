"""Which device does what: simulated annealing over permutations of the devices, decided by the simulator.

The search works on an estimate of the simulated iteration that never lies above it: the largest of the critical paths
met so far (`placement_paths`), over the times of all transfers and all stages' collectives, which are kept up
incrementally as devices change places (`placement_kernel`). What a round of annealing finds is simulated, its critical
path joins the estimate, and the next round goes on with what the estimate has learned. Seeded and deterministic as
long as the budget is counted in moves. Pipette (arXiv 2405.18093) chose servers by annealing too, with one formula.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipefit.plan.placement_arena import CONSTANT, DEVICE, LEADING, USED, VALUE, WEIGHT, X
from pipefit.plan.placement_compile import functions
from pipefit.plan.placement_links import Ints
from pipefit.plan.placement_paths import Paths
from pipefit.plan.placement_shape import Question
from pipefit.plan.placement_starts import (
    Moves,
    block_moves,
    chain_order,
    cluster_order,
    host_distance,
    in_host_order,
    spectral_order,
    tiled,
    tiles,
)
from pipefit.plan.placement_state import CUTS, new_state, set_moves
from pipefit.simulate import Timeline

PROBES = 24
"""Paths that are looked for before the search begins, each with one entry of x made much larger."""

CHUNK = 500
"""Moves between two looks at the clock."""

COMPILED_FROM = 20_000
"""Moves from which it pays to import numba, and to compile on the first use on a machine."""

EXPONENTIAL = -np.log((np.arange(4096) + 0.5) / 4096)
"""Equally likely values of the exponential distribution, so that no exp is called."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long to search: whichever comes first. Only a budget without seconds gives the same placement always."""

    moves: int = 100_000
    seconds: float | None = None
    starts: int = 4
    "Placements to start from, the best by the estimate."
    rounds: int = 6
    "Rounds of annealing after the starts, each with what the simulator said of the one before."
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What a search found."""

    devices: tuple[int, ...]
    "[slot]: for every (lane, replica, shard), the last fastest."
    step_s: float
    "Simulated, in the order of actions of the candidate."
    given_s: float
    "The same with the devices as they were given."
    moves: int
    rounds: int
    cuts: int
    start: str
    "The construction that the result grew from."


class Searcher:
    """The state of one search."""

    def __init__(self, question: Question, timeline: Timeline, compiled: bool) -> None:
        self.question = question
        self.paths = Paths(question, timeline)
        self.run = functions(compiled)
        self.arena = new_state(question)
        self.known: set[bytes] = set()
        self.step_s: dict[bytes, float] = {}
        "Simulated times of the placements that were looked at."

    @property
    def x(self) -> Ints:
        """The times of the placement that the state stands at: a copy."""
        return self.arena.ints(X).copy()

    def estimate(self, device: Ints) -> int:
        """The estimate of a placement in ticks; the state stands there afterwards."""
        self.arena.put(DEVICE, device)
        return int(self.run["recompute"](self.arena.whole, self.arena.real, self.arena.at))

    def simulate(self, device: Ints) -> float:
        """The simulated time of a placement, whose critical path joins the estimate."""
        name = device[: self.question.shape.slots].tobytes()
        if name not in self.step_s:
            self.estimate(device)
            step_s, weight, constant = self.paths.cut(self.x)
            self.add_cut(weight, constant)
            self.step_s[name] = step_s
        return self.step_s[name]

    def add_cut(self, weight: Ints, constant: int) -> None:
        """One more path in the estimate, in the place of the least if there is no room."""
        name = weight.tobytes() + constant.to_bytes(8, "little")
        if name in self.known:
            return
        self.known.add(name)
        used = int(self.arena.at[USED])
        cut = used if used < CUTS else int(self.arena.ints(VALUE).argmin())
        self.arena.at[USED] = max(used, cut + 1)
        self.arena.ints(WEIGHT).reshape(-1, CUTS)[:, cut] = weight
        self.arena.ints(CONSTANT)[cut] = constant

    def probe(self, device: Ints) -> None:
        """Paths that would be critical if one flow or term were the slow one."""
        self.estimate(device)
        x, flows = self.x, self.question.flows
        entries = [[flow, flows + flow] for flow in range(flows)]
        entries += [[2 * flows + term] for term in range(len(self.question.shape.passes))]
        for some in entries[:: max(1, -(-len(entries) // PROBES))]:
            slow = x.copy()
            slow[some] = 3 * slow[some] + int(x[: 2 * flows].max(initial=0))
            self.add_cut(*self.paths.cut(slow)[1:])

    def placed_ticks(self) -> float:
        """What transfers and collectives take on the largest cut where the state stands."""
        leading = self.arena.ints(WEIGHT).reshape(-1, CUTS)[:, self.arena.at[LEADING]]
        return float((leading * self.arena.ints(X)).sum())

    def anneal(
        self, device: Ints, moves: Moves, count: int, hot: float, cold: float, random: Ints, late: Callable[[], bool]
    ) -> tuple[Ints, int]:
        """(best placement by the estimate, moves made) of `count` moves from `device`, between these temperatures."""
        best = np.array(device, dtype=np.int64)
        set_moves(self.arena, moves)
        control = np.array([hot, (cold / hot) ** (1.0 / max(1, count)), float(self.estimate(device))])
        made = 0
        while made < count and not (made and late()):
            some = min(CHUNK, count - made)
            arrays = (self.arena.whole, self.arena.real, self.arena.at)
            self.run["anneal"](some, control, random, EXPONENTIAL, best, *arrays)
            made += some
        return best, made


def place(
    question: Question,
    timeline: Timeline,
    budget: Budget | None = None,
    *,
    compiled: bool | None = None,
    clock: Clock = time.perf_counter,
) -> Placed:
    """The best placement found for a candidate, never slower in the simulator than the given one.

    `compiled` forces numba on or off; the result is the same. `clock` is what `budget.seconds` is counted by.
    """
    budget = budget or Budget()
    began = clock()
    if compiled is None:
        compiled = budget.moves >= COMPILED_FROM or "numba" in sys.modules
    searcher = Searcher(question, timeline, compiled)

    def late() -> bool:
        return budget.seconds is not None and clock() - began > budget.seconds

    given = question.devices
    given_s = searcher.simulate(given)
    searcher.probe(given)
    starts, racks = constructions(question)
    ranked = sorted(((searcher.estimate(device), name) for name, device in starts.items()))
    best, best_s, origin, made, rounds = given, given_s, "given", 0, 0
    if question.shape.slots < 2:
        ranked = []
    random = np.array([12345 + budget.seed, 67890 + 7 * budget.seed], dtype=np.int64)
    half = budget.moves // 2
    tries = ranked[: budget.starts]
    for _, name in tries:
        found, more = _round(searcher, starts[name], racks, half // len(tries), 1.0, random, late)
        made += more
        for device, label in ((starts[name], name), (found, name)):
            step_s = searcher.simulate(device)
            if step_s < best_s:
                best, best_s, origin = device, step_s, label
        if late():
            break
    heat = 0.3
    while tries and rounds < budget.rounds and not late():
        found, more = _round(searcher, best, racks, half // budget.rounds, heat, random, late)
        made, rounds, heat = made + more, rounds + 1, heat * 0.7
        step_s = searcher.simulate(found)
        if step_s < best_s:
            best, best_s = found, step_s
    return Placed(
        devices=tuple(best[: question.shape.slots].tolist()),
        step_s=best_s,
        given_s=given_s,
        moves=made,
        rounds=rounds,
        cuts=int(searcher.arena.at[USED]),
        start=origin,
    )


def _round(
    searcher: Searcher,
    device: Ints,
    racks: Sequence[Sequence[int]],
    count: int,
    heat: float,
    random: Ints,
    late: Callable[[], bool],
) -> tuple[Ints, int]:
    question = searcher.question
    moves = block_moves(device, question.shape, question.links, racks)
    searcher.estimate(device)
    hot = max(heat * HOT * searcher.placed_ticks(), 2.0)
    return searcher.anneal(device, moves, count, hot, max(hot * COLD, 1.0), random, late)


HOT, COLD = 0.02, 0.002
"""The first temperature, as a share of what transfers and collectives take of the estimate; the last one, of that."""


def constructions(question: Question) -> tuple[dict[str, Ints], list[list[int]]]:
    """(placements to start from by name, racks)."""
    links, shape = question.links, question.shape
    size = max([float(b) for b in shape.bytes] + [1e6])
    distance = host_distance(links, size)
    clustered, racks = cluster_order(distance)
    orders = {
        "hostname order": list(range(len(distance))),
        "nearest neighbours": chain_order(distance),
        "clusters": clustered,
        "spectral": spectral_order(distance),
    }
    per_host = int(np.bincount(links.host).min())
    starts: dict[str, Ints] = {"given": question.devices}
    for name, order in orders.items():
        devices = in_host_order(order, links)
        for tile in tiles(shape, per_host):
            for lanes_first in (False, True):
                words = "pipelines" if lanes_first else "stages"
                starts[f"{name}, {words} next to each other, {tile[0]} x {tile[1]} a host"] = tiled(
                    devices, shape, tile, lanes_first
                )
    return starts, racks
