"""`pipefit schedule`: make a schedule and draw it, or print it as CSV for PyTorch or as JSON."""

from __future__ import annotations

import json
import sys

import typer

from pipefit.errors import PipefitError, ScheduleError


def command(
    name: str = typer.Argument(help="The schedule family, for example 1f1b or gpipe."),
    devices: int = typer.Option(4, help="Devices of one pipeline."),
    microbatches: int = typer.Option(8, help="Microbatches of one step."),
    slices: int = typer.Option(1, help="Slices that every microbatch's sequences are cut into."),
    times: str = typer.Option("1,1,1", help="Times of F, I and W, and after them of a transfer: F,I,W or F,I,W,T."),
    grid: bool = typer.Option(False, "--grid", help="Draw the lanes in time (the default)."),
    csv: bool = typer.Option(False, "--csv", help="Print the compute actions as torch.distributed.pipelining reads."),
    as_json: bool = typer.Option(False, "--json", help="Print the lanes and what the simulator says as JSON."),
) -> None:
    """Make the schedule NAME and draw it in time, or print it as CSV or JSON."""
    from pipefit.schedule import Problem, check, family, uniform_costs

    if grid + csv + as_json > 1:
        raise PipefitError("Only one form of output can be asked for.", allowed="--grid, --csv or --json")
    if devices < 1:
        raise ScheduleError("A pipeline has at least one device.", where="--devices", seen=devices, allowed="1 or more")
    forward_s, input_s, weight_s, transfer_s = _times(times)
    made = family(name)
    placement = made.placement(devices)
    costs = uniform_costs(
        placement, forward_s=forward_s, input_s=input_s, weight_s=weight_s, transfer_s=transfer_s, port_s=transfer_s
    )
    schedule = made(Problem(placement=placement, microbatches=microbatches, slices=slices, costs=costs))
    check(schedule)
    if csv:
        from pipefit.schedule.csv_io import to_csv

        sys.stdout.write(to_csv(schedule))
        return
    from pipefit.simulate import simulate

    timeline = simulate(schedule, costs)
    if as_json:
        from pipefit.schedule import format_lanes

        facts = {
            "name": schedule.name,
            "placement": schedule.placement,
            "microbatches": microbatches,
            "slices": slices,
            "lanes": format_lanes(schedule.lanes),
            "times": {"F": forward_s, "I": input_s, "W": weight_s, "B": input_s + weight_s, "transfer": transfer_s},
            "makespan": timeline.makespan_s,
            "bubble": timeline.bubble,
            "peak_units": timeline.peak_bytes.tolist(),
        }
        print(json.dumps(facts, indent=1))
        return
    from pipefit.schedule.grid import draw_grid

    _print_grid(draw_grid(schedule, costs, colour=sys.stdout.isatty()))
    peaks = " ".join(f"{units:g}" for units in timeline.peak_bytes)
    unit = "slices" if slices > 1 else "microbatches"
    if schedule.stages > len(schedule.lanes):
        unit += " of a stage"
    print(f"time {timeline.makespan_s:g}, bubble {timeline.bubble:.1%}; most {unit} alive per lane: {peaks}")


def _times(text: str) -> tuple[float, float, float, float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if (
        len(values) not in (3, 4)
        or not all(value > 0 for value in values[:3])
        or not all(0 <= v < 1e18 for v in values)
    ):
        raise ScheduleError(
            "The times must be three positive numbers, and may have a fourth that is not negative.",
            where="--times",
            seen=repr(text),
            allowed="F,I,W or F,I,W,T, for example 28,28,20,4",
        )
    return values[0], values[1], values[2], values[3] if len(values) == 4 else 0.0


def _print_grid(text: str) -> None:
    """In colour on a terminal; plain into a pipe. Rows are never wrapped, so that columns stay columns."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console

    Console(soft_wrap=True).print(text, highlight=False)
