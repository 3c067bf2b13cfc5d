"""What schedules with slices hold and idle in unit time, beside what was published.

Every stage takes one second a slice for each of F, I and W, transfers take none, and a stage's slice of a sequence is
one unit of memory; A, the activations of one sequence in the whole model, are p v s of them. Peaks are those of the
device that holds most. Called by `sections.py`; alone:

    python -m benchmarks.token_slices.peaks [--quick] [--json PATH]
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from benchmarks.token_slices.targets import at_most
from pipefit.schedule.families import find_family
from pipefit.schedule.problem import ScheduleProblem, linear_placement, uniform_costs, vee_placement
from pipefit.schedule.problem import looped_placement as looped
from pipefit.simulate import simulate_schedule

Shape = tuple[int, int, int, int]
"""p devices, v stages on each, s slices, m sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A published formula, and where it holds."""

    title: str
    family: str
    source: str
    peak: Callable[[int, int, int, int], float]
    "(p, v, s, m) -> share of A."
    bubble: Callable[[int, int, int, int], float] | None
    "Idle share of the time."
    holds: Callable[[int, int, int, int], bool]
    placed: str = "linear"


def filling(p: int, v: int, s: int, m: int) -> float:
    """(p - 1) / (m v s + p - 1): the devices idle while the first slice fills the pipeline and the last leaves it."""
    return (p - 1) / (m * v * s + p - 1)


FORMS = (
    Form(
        title="all forwards first",
        family="gpipe",
        source="TeraPipe, arXiv 2102.07988",
        peak=lambda p, v, s, m: m / p,
        bubble=filling,
        holds=lambda p, v, s, m: v == 1,
    ),
    Form(
        title="1F1B",
        family="1f1b",
        source="arXiv 2006.09503",
        peak=lambda p, v, s, m: 1.0,
        bubble=filling,
        holds=lambda p, v, s, m: v == s == 1 and m >= p,
    ),
    Form(
        title="slice-1F1B",
        family="1f1b",
        source="Seq1F1B, arXiv 2406.03488",
        peak=lambda p, v, s, m: (s + p - 1) / (s * p),
        bubble=filling,
        holds=lambda p, v, s, m: v == 1 < s and m * s >= s + p - 1,
    ),
    Form(
        title="eager slice-1F1B",
        family="eager-1f1b",
        source="arXiv 2211.05322 for s = 1",
        peak=lambda p, v, s, m: (s + 2 * (p - 1)) / (s * p),
        bubble=filling,
        holds=lambda p, v, s, m: v == 1 and m * s >= s + 2 * (p - 1),
    ),
    Form(
        title="interleaved 1F1B",
        family="interleaved-1f1b",
        source="arXiv 2104.04473",
        peak=lambda p, v, s, m: 1 + (p - 1) / (p * v),
        bubble=filling,
        holds=lambda p, v, s, m: v > 1 == s and m % p == 0 and m * v >= v * p + p - 1,
        placed="looped",
    ),
    Form(
        title="uniform-slice interleaved 1F1B",
        family="interleaved-1f1b",
        source="SlimPipe, arXiv 2504.14519",
        peak=lambda p, v, s, m: (1 + 2 * (p - 1) / (s * v)) / p,
        bubble=filling,
        holds=lambda p, v, s, m: v > 1 and s > 1 and s % p == 0 and m * s * v >= s * v + 2 * (p - 1),
        placed="looped",
    ),
    Form(
        title="SVPP",
        family="svpp",
        source="MEPipe, EuroSys 2025",
        peak=lambda p, v, s, m: (v * max(p, s) + min(p, s) - 1) / (v * s * p),
        bubble=filling,
        holds=lambda p, v, s, m: (
            m * s % max(p, s) == 0 == max(p, s) % min(p, s) and m * s * v >= v * max(p, s) + min(p, s) - 1
        ),
        placed="looped",
    ),
    Form(
        title="slice-ZB-H1",
        family="zb-h1",
        source="arXiv 2401.10241 for s = 1; with slices as slice-1F1B",
        peak=lambda p, v, s, m: (s + p - 1) / (s * p),
        bubble=lambda p, v, s, m: (p - 1) / (3 * m * s + p - 1),
        holds=lambda p, v, s, m: v == 1 and m * s >= 2 * p + s - 1,
    ),
    Form(
        title="slice-V (V-ZB)",
        family="v-zb",
        source="a slice on two stages is a unit: 2 (p + s - 1) of 2 p s",
        peak=lambda p, v, s, m: (p + s - 1) / (s * p),
        bubble=None,
        holds=lambda p, v, s, m: v == 2 and m * s >= 2 * p + s - 1,
        placed="v",
    ),
)

GRID: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "quick": ((2, 4), (1, 2), (1, 2, 4), (4, 8)),
    "full": ((2, 4, 8), (1, 2, 4), (1, 2, 4, 8, 16), (4, 8, 16)),
}
"""Values of p, v, s and m."""


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Every form at every shape of the grid at which it is said to hold: simulated beside published."""
    for form in FORMS:
        for shape in product(*GRID["quick" if quick else "full"]):
            if form.holds(*shape):
                yield {"form": form.title, "family": form.family} | compared(form, shape)


def compared(form: Form, shape: tuple[int, ...]) -> dict[str, Any]:
    """One row."""
    p, v, s, m = shape
    placement = {"linear": linear_placement(p), "looped": looped(p, v), "v": vee_placement(p)}[form.placed]
    schedule = find_family(form.family)(ScheduleProblem(placement=placement, microbatches=m, slices=s))
    timeline = simulate_schedule(schedule, uniform_costs(placement))
    makespan_s = timeline.makespan_s
    return {
        "devices": p,
        "stages": v,
        "slices": s,
        "sequences": m,
        "peak": float(timeline.peak_bytes.max()) / (p * v * s),
        "published_peak": form.peak(p, v, s, m),
        "bubble": 1 - float(timeline.busy_s.max()) / makespan_s,
        "published_bubble": form.bubble(p, v, s, m) if form.bubble is not None else None,
    }


def measure(quick: bool) -> dict[str, Any]:
    """The rows, and for every form the largest difference to what was published, of peaks and of bubbles."""
    found = list(rows(quick))
    forms, targets = [], []
    for form in FORMS:
        own = [row for row in found if row["form"] == form.title]
        off = {"peak": farthest(own, "peak"), "bubble": farthest(own, "bubble") if form.bubble is not None else None}
        forms.append({"form": form.title, "family": form.family, "source": form.source, "shapes": len(own), "off": off})
        for what, most in off.items():
            if most is not None:
                targets.append(at_most(f"{what} of {form.title} less published, over {len(own)} shapes", most, 1e-9))
    return {"forms": forms, "rows": found, "targets": targets}


def farthest(rows: Sequence[Mapping[str, Any]], what: str) -> float:
    """The largest difference to what was published."""
    return max(abs(row[what] - row[f"published_{what}"]) for row in rows)


def show(found: Mapping[str, Any]) -> None:
    """The forms as a table, each at its largest shape."""
    TABLE.print_head()
    for form in found["forms"]:
        row = [row for row in found["rows"] if row["form"] == form["form"]][-1]
        shape = (row[name] for name in ("devices", "stages", "slices", "sequences"))
        peaks = f"{row['peak']:.4f}", f"{row['published_peak']:.4f}"
        TABLE.print_row(form["form"], form["family"], *shape, *peaks, f"{row['bubble']:.2%}", form["shapes"])


TABLE = TextTable(
    ("", "<32"), ("family", "<18"), ("p", ">3"), ("v", ">3"), ("s", ">3"), ("m", ">4"), ("peak / A", ">10"),
    ("published", ">11"), ("bubble", ">9"), ("shapes", ">8"),
)  # fmt: skip


def main() -> int:
    return run_benchmark(benchmark_parser(__doc__, quick="a smaller grid"), measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Simulate every published form."""
    found = measure(arguments.quick)
    show(found)
    for target in found["targets"]:
        print(f"  {'met' if target['met'] else 'MISSED'}: {target['what']}: {target['reached']:.2g}")
    return Outcome(found)


if __name__ == "__main__":
    sys.exit(main())
