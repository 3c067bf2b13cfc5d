"""The least bubble that any schedule can have, by constraint programming (OR-tools CP-SAT, the extra `exact`).

It shares nothing with the families: start times of all F, I and W, one at a time on a lane, the chain of stages, and at
most `units` stage-microbatches alive on a lane. The bubble is the idle time between a lane's first and last action, on
the lane where it is longest. `optimum.json` holds what it proved; this writes it anew:

    python tests/support/exact_bubbles.py --seconds 60
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from pipefit.schedule import linear_placement, vee_placement

FOUND = Path(__file__).parents[1] / "schedule" / "fit" / "optimum.json"

PLACEMENTS = {"linear": linear_placement, "vee": vee_placement}


def least_bubble(placement: Sequence[int], microbatches: int, units: int, seconds: float) -> int | None:
    """The proven optimum in unit time, in slots; None if it is not proven in so many seconds. One thread."""
    from ortools.sat.python import cp_model

    stages, lanes = len(placement), max(placement) + 1
    work = 3 * microbatches * max(list(placement).count(lane) for lane in range(lanes))
    horizon = work + 8 * stages
    model = cp_model.CpModel()
    start = {
        (kind, stage, m): model.new_int_var(0, horizon, f"{stage}{kind}{m}")
        for kind in "FIW"
        for stage in range(stages)
        for m in range(microbatches)
    }
    alive: list[list[cp_model.IntervalVar]] = [[] for _ in range(lanes)]
    busy: list[list[cp_model.IntervalVar]] = [[] for _ in range(lanes)]
    for (kind, stage, m), begin in start.items():
        busy[placement[stage]].append(model.new_fixed_size_interval_var(begin, 1, ""))
        if m:
            model.add(begin > start[kind, stage, m - 1])
        if kind == "F" and stage:
            model.add(begin > start["F", stage - 1, m])
        if kind == "I":
            model.add(begin > (start["I", stage + 1, m] if stage + 1 < stages else start["F", stage, m]))
        if kind == "W":
            model.add(begin > start["I", stage, m])
            held = model.new_int_var(0, horizon, "")
            first = start["F", stage, m]
            alive[placement[stage]].append(model.new_interval_var(first, held, begin + 1, ""))
    span = model.new_int_var(work, horizon, "span")
    for lane in range(lanes):
        model.add_no_overlap(busy[lane])
        model.add_cumulative(alive[lane], [1] * len(alive[lane]), units)
        held_here = [stage for stage in range(stages) if placement[stage] == lane]
        for one in held_here:
            for other in held_here:
                model.add(span >= start["W", one, microbatches - 1] + 1 - start["F", other, 0])
    model.add(start["F", 0, 0] == 0)
    model.minimize(span)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    return round(solver.objective_value) - work if solver.solve(model) == cp_model.OPTIMAL else None


def main() -> None:
    """Try all small cases and write those that were proven."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    proven = []
    for lanes in range(1, 7):
        v_units = {2 * ((lanes + 4) // 3), 2 * ((lanes + 2) // 2), 2 * lanes}
        cases = {("linear", units) for units in (lanes, 2 * lanes - 1)} | {("vee", units) for units in v_units}
        for placement, units in sorted(cases):
            for microbatches in range(1, 9):
                bubble = least_bubble(PLACEMENTS[placement](lanes), microbatches, units, seconds)
                print(placement, lanes, microbatches, units, bubble, flush=True)
                if bubble is not None:
                    proven.append([placement, lanes, microbatches, units, bubble])
    facts = {
        "command": f"python tests/support/exact_bubbles.py --seconds {seconds:g}",
        "solver": f"ortools {version('ortools')}, CP-SAT, one thread",
        "columns": ["placement", "lanes", "microbatches", "units", "bubble"],
    }
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items())
    FOUND.write_text(f'{{\n{head}"proven": [\n' + ",\n".join(map(json.dumps, proven)) + "\n]\n}\n")


if __name__ == "__main__":
    main()
