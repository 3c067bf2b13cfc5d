"""`pipefit schedule`: make a schedule and draw it, print it as CSV for PyTorch or as JSON, or draw its building
block."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from pipefit.cli._options import flag_names, takes_options
from pipefit.errors import PipefitError, ScheduleError

if TYPE_CHECKING:
    from pipefit.schedule import Schedule, ScheduleProblem
    from pipefit.schedule.fit.result import FitResult
    from pipefit.simulate import Timeline

LONGEST_S = 1e9
"""Longest time of a search, in seconds: about 30 years."""

OF_FIT = ("seconds", "solver_seconds", "seed")
"""Options that only `fit_schedule` uses."""

OF_BLOCK = ("name", "devices", "block", "interval", "grid")
"""Options that the drawing of a building block uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """Options of `pipefit schedule`."""

    name: str
    "The schedule family, for example 1f1b or v-half; or fit."
    devices: int = 4
    "Devices of one pipeline."
    microbatches: int = 8
    "Microbatches of one step."
    slices: int = 1
    "Slices that every microbatch's sequences are cut into."
    times: str = "1,1,1"
    "Times of F, I, W and optionally a transfer: F,I,W or F,I,W,T."
    stage: tuple[str, ...] = ()
    "Times of one stage: STAGE=F,I,W. Repeatable."
    memory: float | None = None
    "Memory of a device; 1 is the memory of the first device of 1F1B."
    placement: str | None = None
    "linear, looped or v; the family's own by default, v for fit."
    seconds: float | None = None
    "fit: time of the search; by default a fixed number of moves."
    solver_seconds: float = 0.0
    "fit: time of the exact solver after it (needs ortools)."
    seed: int = 0
    "fit: seed of the search."
    block: bool = False
    "Draw the family's building block instead."
    interval: int | None = None
    "--block: repeat it at this interval of slots, and show collisions."
    grid: bool = False
    "Draw the lanes in time (the default)."
    csv: bool = False
    "Print the compute actions as CSV for torch.distributed.pipelining."
    as_json: bool = False
    "Print the lanes and the simulated figures as JSON."


@takes_options(ScheduleOptions, arguments=("name",))
def command(context: typer.Context, options: ScheduleOptions) -> None:
    """Make the schedule NAME and draw it in time, or print it as CSV or JSON."""
    name, devices, interval = options.name, options.devices, options.interval
    if options.grid + options.csv + options.as_json > 1:
        raise PipefitError("Only one form of output can be asked for.", allowed="--grid, --csv or --json")
    if devices < 1:
        raise ScheduleError("A pipeline has at least one device.", where="--devices", seen=devices, allowed="1 or more")
    as_block = options.block or interval is not None
    _check_given(context, name, as_block)
    if as_block:
        print(_block_text(name, devices, interval))
        return
    from pipefit.cli._schedule_problem import check_limit, costs_of, limit_units
    from pipefit.schedule import ScheduleProblem, check_schedule
    from pipefit.simulate import simulate_schedule

    lanes = _choose_placement(name, options.placement, devices)
    costs = costs_of(lanes, options.times, options.stage)
    problem = ScheduleProblem(placement=lanes, microbatches=options.microbatches, slices=options.slices, costs=costs)
    limit = limit_units(problem, options.memory)
    schedule, fitted = _make_schedule(options, problem, limit)
    check_schedule(schedule)
    timeline = simulate_schedule(schedule, costs)
    check_limit(problem, name, timeline.peak_bytes.tolist(), limit)
    if options.csv:
        from pipefit.schedule.text.csv_io import to_csv

        sys.stdout.write(to_csv(schedule))
    elif options.as_json:
        print(json.dumps(_schedule_facts(timeline, limit, fitted), indent=1))
    else:
        _draw_timeline(problem, timeline, limit, fitted)


def _check_given(context: typer.Context, name: str, block: bool) -> None:
    """Raise ScheduleError if an option was given that would have no effect."""
    options = [
        parameter
        for parameter in context.params
        if getattr(context.get_parameter_source(parameter), "name", "") == "COMMANDLINE"
    ]
    for parameter in options:
        option = flag_names(parameter, None)[0]
        if block and parameter not in OF_BLOCK:
            raise ScheduleError(
                "A building block has no such option: it is one microbatch in slots, drawn as text.",
                where=option,
                allowed="--devices and --interval beside --block",
                next_step=f"leave out {option}, or the block: pipefit schedule {name}",
            )
        if parameter in OF_FIT and not _is_fitted(name):
            raise ScheduleError(
                "Only fit searches; the order of a family is fixed.",
                where=option,
                seen=f"{option} with {name}",
                allowed=f"{option} with fit",
            )


def _is_fitted(name: str) -> bool:
    """Return whether this family searches its order."""
    from pipefit.schedule import FAMILIES

    return name in FAMILIES and FAMILIES[name].is_fitted


def _choose_placement(name: str, asked: str | None, devices: int) -> tuple[int, ...]:
    from pipefit.cli._schedule_problem import placement_named
    from pipefit.schedule import find_family, vee_placement

    default = vee_placement if _is_fitted(name) else find_family(name).placement
    return (default if asked is None else placement_named(asked))(devices)


def _make_schedule(
    options: ScheduleOptions, problem: ScheduleProblem, limit: int | None
) -> tuple[Schedule, FitResult | None]:
    """Return the schedule and, if it was fitted, the result of the fit."""
    from pipefit.schedule import find_family

    if not _is_fitted(options.name):
        return find_family(options.name)(problem), None
    from pipefit.schedule.fit.fit_budget import FIT_BUDGET
    from pipefit.schedule.fit.search import fit_schedule

    seconds = options.seconds
    _check_search(seconds, options.solver_seconds, options.seed)
    fitted = fit_schedule(
        replace(problem, limit_bytes=None if limit is None else (limit,) * problem.num_lanes),
        moves=FIT_BUDGET.moves if seconds is None else 10**9,
        seconds=seconds,
        exact_seconds=options.solver_seconds,
        seed=options.seed,
        objective="span",
    )
    return fitted.schedule, fitted


def _check_search(seconds: float | None, solver_seconds: float, seed: int) -> None:
    for option, value in (("--seconds", seconds), ("--solver-seconds", solver_seconds)):
        if value is not None and not value < LONGEST_S:
            raise ScheduleError(
                "The time of a search is too long.",
                where=option,
                seen=value,
                allowed=f"less than {LONGEST_S:g} seconds",
            )
        if value is not None and value < 0:
            raise ScheduleError(
                "The time of a search is not negative.", where=option, seen=value, allowed="for example 10"
            )
    if not 0 <= seed < 2**63:
        raise ScheduleError(
            "A seed is a whole number that is not negative.", where="--seed", seen=seed, allowed="0 to 2^63 - 1"
        )


def _block_text(name: str, devices: int, interval: int | None) -> str:
    """Return the family's building block as text. Raises ScheduleError, with a drawing, if passes collide."""
    from pipefit.schedule import FAMILIES, find_family
    from pipefit.schedule.blocks.building_block import check_block, describe_block

    build = find_family(name).block
    if build is None:
        raise ScheduleError(
            f"{name} is not made of a building block.",
            where="--block" if interval is None else "--interval",
            allowed=", ".join(sorted(family.name for family in FAMILIES.values() if family.block is not None)),
        )
    building_block = build(devices)
    if interval is not None:
        if interval < 1:
            raise ScheduleError(
                "An interval is at least one slot.", where="--interval", seen=interval, allowed="1 or more"
            )
        building_block = replace(building_block, interval=interval)
    check_block(building_block)
    return describe_block(building_block)


def _schedule_facts(timeline: Timeline, limit: int | None, fitted: FitResult | None) -> dict[str, Any]:
    """Return the output of --json."""
    from pipefit.schedule import format_lanes

    schedule, actions = timeline.schedule, timeline.costs.actions
    times: dict[str, Any] = {kind: table.time_s.reshape(-1).tolist() for kind, table in actions.items()}
    alike = all(len(set(values)) == 1 for values in times.values())
    transfer_s = float(timeline.costs.edges[0].forward_s[0, 0]) if timeline.costs.edges else 0.0
    facts = {
        "name": schedule.name,
        "placement": schedule.placement,
        "microbatches": schedule.microbatches,
        "slices": schedule.slices,
        "lanes": format_lanes(schedule.lanes),
        "times": {kind: values[0] if alike else values for kind, values in times.items()} | {"transfer": transfer_s},
        "makespan": timeline.makespan_s,
        "bubble": timeline.bubble_share,
        "peak_units": timeline.peak_bytes.tolist(),
        "limit_units": limit,
    }
    if fitted is not None:
        facts["fit"] = {
            "span": fitted.time_s,
            "bound": fitted.bound_s,
            "gap": fitted.relative_gap,
            "bubble_of_busiest": fitted.bubble,
            "how": fitted.how,
            "moves": fitted.moves,
            "notes": fitted.notes,
        }
    return facts


def _draw_timeline(problem: ScheduleProblem, timeline: Timeline, limit: int | None, fitted: FitResult | None) -> None:
    from pipefit.cli._schedule_problem import unit_name
    from pipefit.schedule.text.grid import draw_grid

    peaks = [f"{units:.15g}" for units in timeline.peak_bytes]
    held = [peak if limit is None else f"{peak}/{limit}" for peak in peaks]
    _print_grid(draw_grid(timeline.schedule, timeline.costs, colour=sys.stdout.isatty(), held=held))
    allowed = "" if limit is None else f"; {limit} allowed"
    print(
        f"time {timeline.makespan_s:g}, bubble {timeline.bubble_share:.1%}; "
        f"most {unit_name(problem)} alive per lane: {' '.join(peaks)}{allowed}"
    )
    if fitted is not None:
        print(
            f"longest lane {fitted.time_s:g}, of which {fitted.bubble:.1%} is more than the busiest lane's work; "
            f"no schedule takes less than {fitted.bound_s:g} ({fitted.relative_gap:.1%} below)"
        )
        print("\n".join((f"found by {fitted.how}", *fitted.notes)))


def _print_grid(text: str) -> None:
    """Print a grid, coloured on a terminal and plain into a pipe. Rows are never wrapped, so columns stay aligned."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console

    Console(soft_wrap=True).print(text, highlight=False)
