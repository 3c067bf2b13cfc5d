"""Placement moves of plug-ins: neighbours of a placement, tried between the annealings of the search.

The built-in moves are compiled into the annealing loop. A registered move is a Python function that proposes complete
placements. A proposal that the estimate calls faster is simulated, and the fastest placement goes on. Without
registered moves, results of the search are bit-equal to earlier versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from pipefit.cost.types import Ints
from pipefit.errors import PlanError
from pipefit.plan.placement.links import TICK_S
from pipefit.plan.placement.shape import PlacementProblem
from pipefit.plugins import NamedRegistry, iterate_plugin

PlacementMove = Callable[[Ints, PlacementProblem], Iterable[Ints]]
"""(devices, problem) -> placements near it. `devices[slot]` is the device of every (lane, replica, shard), the shard
varying fastest, followed by the idle devices; a proposal is a permutation of it. Equal arguments must give equal
proposals."""

MOVE_SIMULATIONS = 64
"""Maximum number of simulations after one annealing."""

MOVES: NamedRegistry[PlacementMove] = NamedRegistry("placement moves")
"""The registered moves by name, in the order of registration."""


def register_placement_move(name: str, move: PlacementMove) -> PlacementMove:
    """Add a move to every search for a placement, and return it. Raises PipefitError for a name that another move
    has."""
    return MOVES.add_entry(name, move)


def improve_placement(
    problem: PlacementProblem,
    devices: Ints,
    step_s: float,
    estimate_ticks: Callable[[Ints], int],
    simulate: Callable[[Ints], float],
) -> tuple[Ints, float]:
    """Return the best placement that the registered moves reach from this one, and its simulated step in seconds.

    Moves follow each other until none of them is faster, or MOVE_SIMULATIONS is used up. `estimate_ticks` never exceeds
    the simulated step. Raises PlanError for a proposal that is no permutation of the devices, PluginError for a move
    that fails.
    """
    budget, improved = MOVE_SIMULATIONS, True
    while improved and budget > 0:
        improved = False
        for name, move in MOVES.items():
            for proposal in iterate_plugin(MOVES.describe_entry(name), move, devices.copy(), problem):
                moved = _check_proposal(name, proposal, devices)
                if not _kinds_allowed(problem, moved) or estimate_ticks(moved) * TICK_S >= step_s:
                    continue
                moved_s, budget = simulate(moved), budget - 1
                if moved_s < step_s:
                    devices, step_s, improved = moved, moved_s, True
                    break
                if budget == 0:
                    return devices, step_s
    return devices, step_s


def _check_proposal(name: str, proposal: Ints, devices: Ints) -> Ints:
    try:
        moved = np.array(proposal, dtype=np.int64)
    except (TypeError, ValueError):
        moved = np.zeros(0, dtype=np.int64)
    if moved.shape != devices.shape or not np.array_equal(np.sort(moved), np.sort(devices)):
        raise PlanError(
            "A placement move proposes devices that are no permutation of the given ones.",
            where=MOVES.describe_entry(name),
            seen=moved.tolist() if moved.size else repr(proposal),
            allowed=f"arrays, each with {sorted(devices.tolist())} once",
            next_step="mend the move, or go on without plug-ins: PIPEFIT_PLUGINS=off",
        )
    return moved


def _kinds_allowed(problem: PlacementProblem, devices: Ints) -> bool:
    """Return True if every lane, and the idle slots after them, may hold the kinds of these devices."""
    shape = problem.shape
    slots = np.arange(len(devices))
    lanes = np.where(slots < shape.slots, slots // (shape.replicas * shape.shards), shape.lanes)
    return bool(shape.allowed[lanes, shape.kind[devices]].all())
