"""What others published about V schedules in closed form or in tables, replayed with pipefit's families.

Peaks and bubbles in unit time: Qi et al. 2024 (arXiv 2405.15362): V-Min, V-Half and V-ZB hold 2 floor((d+4)/3),
2 floor((d+2)/2) and 2 d chunk units, and at a peak of k no V schedule idles less than max(0, 6 d - 3 k - 1) slots.
Zero Bubble (arXiv 2401.10241): ZB-H1 idles (d-1)(F+I-W), ZB-H2 nothing in unit time. Bubbles at other times were
measured with the authors' program on its own fixed patterns (d=8; m=16, 32, 64).
"""

from __future__ import annotations

from typing import Any

from pipefit.schedule import FAMILIES, ScheduleProblem, uniform_costs
from pipefit.simulate import Timeline, simulate_schedule

Record = dict[str, Any]

PEAKS = {
    "v-min": lambda d: 2 * ((d + 4) // 3),
    "v-half": lambda d: 2 * ((d + 2) // 2),
    "v-zb": lambda d: 2 * d,
    "zb-v": lambda d: 2 * d,
    "zb-h1": lambda d: d,
    "zb-h2": lambda d: 2 * d - 1,
}
"""Devices -> units on a device that holds most."""
IDLE = {
    "v-min": lambda d: max(0, 6 * d - 3 * PEAKS["v-min"](d) - 1),
    "v-half": lambda d: max(0, 6 * d - 3 * PEAKS["v-half"](d) - 1),
    "v-zb": lambda d: 0,
    "zb-v": lambda d: 0,
    "zb-h1": lambda d: d - 1,
    "zb-h2": lambda d: 0,
}
"""Devices -> idle slots of the device that idles longest."""
FIXED = {
    (1, 1, 1, 0): {"v-min": (22.0, 12.3, 6.6), "v-half": (15.0, 8.1, 4.2), "zb-v": (0.0, 0.0, 0.0)},
    (28, 28, 20, 4): {"v-min": (37.0, 29.3, 24.7), "v-half": (23.3, 13.2, 7.1), "zb-v": (9.7, 5.1, 2.6)},
    (3, 4, 2, 0): {"v-min": (38.9, 32.6, 29.0), "v-half": (22.0, 12.3, 6.6), "zb-v": (8.3, 4.3, 2.2)},
    (20, 30, 10, 2): {"v-min": (47.9, 42.9, 40.0), "v-half": (31.0, 22.1, 16.7), "zb-v": (15.4, 8.4, 4.4)},
}
"""F, I, W, transfer -> family -> per cent of bubble for d=8 and 16, 32 and 64 microbatches."""


def replay_published(quick: bool) -> Record:
    """Every published figure beside ours. Prints what differs."""
    unit = [unit_time(name, d, 2 * d) for name in PEAKS for d in range(2, 7 if quick else 17)]
    fixed = [
        fixed_times(name, times, m, published)
        for times, by_family in FIXED.items()
        for name, row in by_family.items()
        for m, published in zip((16, 32, 64), row, strict=True)
        if m == 16 or not quick
    ]
    same = sum(row["peak"] == row["published_peak"] and row["idle"] == row["published_idle"] for row in unit)
    print(
        f"  unit time: {same} of {len(unit)} peaks and bubbles as published (d = 2 to {unit[-1]['devices']}, m = 2 d)"
    )
    close = [row for row in fixed if abs(row["points"]) <= 0.1]
    print(f"  d=8 with other times: {len(close)} of {len(fixed)} bubbles as measured with the authors' program; else:")
    for row in fixed:
        if row not in close:
            print(f"    {row['family']:<8}{row['times']!s:<18} m={row['microbatches']}: {row['bubble']:.1%}, "
                  f"theirs {row['published']:.1%}")  # fmt: skip
    return {"unit_time": unit, "other_times": fixed, "unit_time_equal": same, "other_times_equal": len(close)}


def unit_time(name: str, devices: int, microbatches: int) -> Record:
    timeline = replay(name, devices, microbatches, (1, 1, 1, 0))
    spans = [stop[-1] - start[0] for start, stop in zip(timeline.starts_s, timeline.stops_s, strict=True)]
    return {
        "family": name,
        "devices": devices,
        "microbatches": microbatches,
        "peak": int(max(timeline.peak_bytes)),
        "published_peak": PEAKS[name](devices),
        "idle": round(max(span - busy for span, busy in zip(spans, timeline.busy_s, strict=True))),
        "published_idle": IDLE[name](devices),
    }


def fixed_times(name: str, times: tuple[int, int, int, int], microbatches: int, published: float) -> Record:
    timeline = replay(name, 8, microbatches, times)
    span = max(stop[-1] - start[0] for start, stop in zip(timeline.starts_s, timeline.stops_s, strict=True))
    bubble = float(1 - max(timeline.busy_s) / span)
    return {
        "family": name,
        "times": times,
        "microbatches": microbatches,
        "bubble": bubble,
        "published": published / 100,
        "points": 100 * bubble - published,
    }


def replay(name: str, devices: int, microbatches: int, times: tuple[int, int, int, int]) -> Timeline:
    placement = FAMILIES[name].placement(devices)
    costs = uniform_costs(placement, forward_s=times[0], input_s=times[1], weight_s=times[2], transfer_s=times[3])
    return simulate_schedule(FAMILIES[name](ScheduleProblem(placement=placement, microbatches=microbatches)), costs)
