"""Convert the options of `pipefit schedule` to a scheduling problem: times, placement, memory.

Memory is counted in units: the activations of one microbatch (or slice) of one stage. A unit is one byte in the
simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipefit.cost.types import CostTable
from pipefit.errors import ScheduleError
from pipefit.schedule import ScheduleProblem, uniform_costs

Placement = Callable[[int], tuple[int, ...]]


def named_placements() -> dict[str, Placement]:
    """Return the named placements. Each maps a number of devices to the lane of every stage."""
    from pipefit.schedule.problem import linear_placement, looped_placement, vee_placement

    return {"linear": linear_placement, "looped": looped_placement, "v": vee_placement}


def placement_named(name: str) -> Placement:
    """Return a placement by name. Raises ScheduleError that lists the names."""
    known = named_placements()
    if name not in known:
        raise ScheduleError(
            "The placement is unknown.", where="--placement", seen=repr(name), allowed=", ".join(sorted(known))
        )
    return known[name]


def costs_of(placement: Sequence[int], times: str, stages: Sequence[str]) -> CostTable:
    """Build the cost table from `--times` for all stages and `--stage` for single ones. Raises ScheduleError."""
    *stage_times, transfer_s = _parse_times(times)
    by_stage = [list(stage_times) for _ in placement]
    text_of_stage: dict[int, str] = {}
    for text in stages:
        stage, times_of_stage = _parse_stage(text, len(placement))
        if stage in text_of_stage:
            raise ScheduleError(
                f"Stage {stage} is given twice.",
                where="--stage",
                seen=f"{text_of_stage[stage]!r} and {text!r}",
                allowed="one --stage for each stage",
            )
        text_of_stage[stage] = text
        by_stage[stage] = times_of_stage
    forward_s, input_s, weight_s = zip(*by_stage, strict=True)
    return uniform_costs(
        placement, forward_s=forward_s, input_s=input_s, weight_s=weight_s, transfer_s=transfer_s, port_s=transfer_s
    )


def _parse_times(text: str) -> list[float]:
    """Parse `F,I,W` or `F,I,W,T` into four numbers; the transfer time T defaults to 0."""
    values = _parse_numbers(text)
    if len(values) not in (3, 4) or not _all_positive(values[:3]) or not all(0 <= value < 1e18 for value in values):
        raise ScheduleError(
            "The times must be three positive numbers, and may have a fourth that is not negative.",
            where="--times",
            seen=repr(text),
            allowed="F,I,W or F,I,W,T, for example 28,28,20,4",
        )
    return [*values, 0.0][:4]


def _parse_stage(text: str, count: int) -> tuple[int, list[float]]:
    """Parse `15=42,42,30` into (stage, [F, I, W])."""
    name, _, times = text.partition("=")
    values = _parse_numbers(times)
    if not name.strip().isdecimal() or len(values) != 3 or not _all_positive(values):
        raise ScheduleError(
            "The times of a stage are its number and three positive numbers.",
            where="--stage",
            seen=repr(text),
            allowed="STAGE=F,I,W, for example 15=42,42,30",
        )
    if int(name) >= count:
        raise ScheduleError(
            "There is no such stage.", where="--stage", seen=repr(text), allowed=f"stages 0 to {count - 1}"
        )
    return int(name), values


def _parse_numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return []


def _all_positive(values: Sequence[float]) -> bool:
    return all(0 < value < 1e18 for value in values)


def limit_units(problem: ScheduleProblem, memory: float | None) -> int | None:
    """Return the limit of `--memory` per lane, in whole units. Raises ScheduleError if no schedule can satisfy it.

    1 is the memory of the first device of 1F1B: d microbatches of all stages of a lane. The least possible is one
    microbatch in all stages of a lane, because its forwards pass all of them before its first backward frees memory.
    """
    if memory is None:
        return None
    if not 0 < memory < 1e9:
        raise ScheduleError(
            "The memory must be a positive number: 1 is the memory of the first device of 1F1B.",
            where="--memory",
            seen=memory,
            allowed="for example 0.5",
        )
    limit, least = memory * full_units(problem), least_units(problem)
    if limit < least - 1e-9:
        raise ScheduleError(
            "No schedule fits into this little memory.",
            where="--memory",
            seen=f"{memory:g}, which is {limit:.10g} {unit_name(problem, limit)} on every device",
            allowed=f"at least {format_units(least, problem)}, or {least}: one microbatch before its backward",
            next_step=f"--memory {format_units(least, problem)}, or more devices with smaller stages",
        )
    return math.floor(limit + 1e-9)


def check_limit(problem: ScheduleProblem, name: str, peaks: Sequence[float], limit: int | None) -> None:
    """Raise ScheduleError if a schedule holds more than the limit."""
    peak = max(peaks)
    if limit is None or peak <= limit:
        return
    least = format_units(least_units(problem), problem)
    raise ScheduleError(
        f"{name} needs more memory than it may use.",
        where=f"--memory, device {list(peaks).index(peak)}",
        seen=f"{peak:.15g} {unit_name(problem, peak)}, where {limit} may be held",
        allowed=f"--memory {format_units(peak, problem)} or more for {name}; at least {least} for any schedule",
        next_step="fit, which makes a schedule for a memory limit",
    )


def least_units(problem: ScheduleProblem) -> int:
    """Return the least units of a lane: one microbatch in all of its stages."""
    return max(len(problem.lane_stages(lane)) for lane in range(problem.num_lanes)) * problem.slices


def full_units(problem: ScheduleProblem) -> int:
    """Return the units of 1F1B's first device: one microbatch per device, each in all stages of a lane."""
    return problem.num_lanes * least_units(problem)


def format_units(units: float, problem: ScheduleProblem) -> str:
    """Format units for `--memory`, rounded up."""
    thousandths = -(-units * 1000 // full_units(problem))
    return f"{thousandths / 1000:.15g}"


def unit_name(problem: ScheduleProblem, count: float = 2) -> str:
    """Return the name of the memory unit."""
    singular = "slice" if problem.slices > 1 else "microbatch"
    plural = "slices" if problem.slices > 1 else "microbatches"
    return (singular if count == 1 else plural) + (" of a stage" if problem.num_stages > problem.num_lanes else "")
