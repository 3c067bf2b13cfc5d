"""From the words of `pipefit schedule` to a scheduling problem: times, placement, memory.

Memory is counted in units, microbatches (or slices) of one stage, each of which is one byte to the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipefit.cost.types import CostTable
from pipefit.errors import ScheduleError
from pipefit.schedule import ScheduleProblem, uniform_costs

Placement = Callable[[int], tuple[int, ...]]


def named_placements() -> dict[str, Placement]:
    """The placements that can be asked for by name: number of devices -> lane of every stage."""
    from pipefit.schedule import find_family, linear_placement, vee_placement

    return {"linear": linear_placement, "looped": find_family("interleaved-1f1b").placement, "v": vee_placement}


def placement_named(name: str) -> Placement:
    """Raises ScheduleError that lists the names."""
    known = named_placements()
    if name not in known:
        raise ScheduleError(
            "The placement is unknown.", where="--placement", seen=repr(name), allowed=", ".join(sorted(known))
        )
    return known[name]


def costs_of(placement: Sequence[int], times: str, stages: Sequence[str]) -> CostTable:
    """The cost table of `--times` for all stages and `--stage` for single ones. Raises ScheduleError."""
    *every, transfer_s = _parse_times(times)
    by_stage = [list(every) for _ in placement]
    given: dict[int, str] = {}
    for text in stages:
        stage, own = _parse_stage(text, len(placement))
        if stage in given:
            raise ScheduleError(
                f"Stage {stage} is given two times.",
                where="--stage",
                seen=f"{given[stage]!r} and {text!r}",
                allowed="one --stage for each stage",
            )
        given[stage] = text
        by_stage[stage] = own
    forward_s, input_s, weight_s = zip(*by_stage, strict=True)
    return uniform_costs(
        placement, forward_s=forward_s, input_s=input_s, weight_s=weight_s, transfer_s=transfer_s, port_s=transfer_s
    )


def _parse_times(text: str) -> list[float]:
    """F, I, W and the transfer."""
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
    """(stage, [F, I, W]) of `15=42,42,30`."""
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
    """What `--memory` allows a lane, in whole units. Raises ScheduleError where no schedule can keep to it.

    1 is what the first device of 1F1B holds, d microbatches of all that a lane has. A microbatch's forwards pass all
    stages of a lane before its first backward can free anything: that is the least.
    """
    if memory is None:
        return None
    if not 0 < memory < 1e9:
        raise ScheduleError(
            "The memory must be a positive number: 1 is what the first device of 1F1B holds.",
            where="--memory",
            seen=memory,
            allowed="for example 0.5",
        )
    limit, least = memory * full_units(problem), least_units(problem)
    if limit < least - 1e-9:
        raise ScheduleError(
            "No schedule keeps to so little memory.",
            where="--memory",
            seen=f"{memory:g}, which is {limit:.10g} {unit_name(problem, limit)} on every device",
            allowed=f"at least {format_units(least, problem)}, or {least}: what one microbatch holds before its "
            "backward",
            next_step=f"--memory {format_units(least, problem)}, or more devices with smaller stages",
        )
    return math.floor(limit + 1e-9)


def check_limit(problem: ScheduleProblem, name: str, peaks: Sequence[float], limit: int | None) -> None:
    """Raise ScheduleError where a schedule holds more than the limit."""
    peak = max(peaks)
    if limit is None or peak <= limit:
        return
    least = format_units(least_units(problem), problem)
    raise ScheduleError(
        f"{name} needs more memory than it may use.",
        where=f"--memory, device {list(peaks).index(peak)}",
        seen=f"{peak:.15g} {unit_name(problem, peak)}, where {limit} may be held",
        allowed=f"--memory {format_units(peak, problem)} or more for {name}; at least {least} for any schedule",
        next_step="fit, which makes a schedule for the memory there is",
    )


def least_units(problem: ScheduleProblem) -> int:
    """Units that a lane cannot do without: one microbatch in all of its stages."""
    return max(len(problem.lane_stages(lane)) for lane in range(problem.num_lanes)) * problem.slices


def full_units(problem: ScheduleProblem) -> int:
    """Units that 1F1B's first device holds: as many microbatches as there are devices, of a lane's stages."""
    return problem.num_lanes * least_units(problem)


def format_units(units: float, problem: ScheduleProblem) -> str:
    """Units as `--memory` takes them, rounded up."""
    thousandths = -(-units * 1000 // full_units(problem))
    return f"{thousandths / 1000:.15g}"


def unit_name(problem: ScheduleProblem, count: float = 2) -> str:
    """What memory is counted in."""
    one = "slice" if problem.slices > 1 else "microbatch"
    many = "slices" if problem.slices > 1 else "microbatches"
    return (one if count == 1 else many) + (" of a stage" if problem.num_stages > problem.num_lanes else "")
