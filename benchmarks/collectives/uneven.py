"""Padded, grouped, and all-to-all-v: measured on both sides of where they cross, beside what the cost model predicts.

Two labs of four hosts, whose links alone take time. In `far` two hosts reach each other slowly: the ring of padded
collectives goes round that link, all-to-all-v over it, so that it pays as soon as these two hold little. In `port` one
host has a slow port: broadcasts send its part twice, the others three times, so that they pay where it holds much.
Links and even collectives are measured first, as `pipefit profile` does it; nothing else is known to the prediction.

    python -m benchmarks.collectives.uneven --json benchmarks/results/uneven_collectives.json

Needs root and iproute2.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from benchmarks.lab.runs import profiled, small_model
from pipefit.cluster import Cluster, DeviceKind, Host, Link, Provenance, Rail
from pipefit.codec import dump_text
from pipefit.cost.comm.lowerings import LOWERINGS, CollectiveLowerings
from pipefit.cost.comm.network import Network
from pipefit.errors import PipefitError
from pipefit.lab import launch, lifecycle
from pipefit.lab.lifecycle import Lab
from pipefit.lab.spec import HostPort, LabFile

RANKS = Path(__file__).parent / "uneven_ranks.py"
UNITS = 48
BYTES = 4 * UNITS**2 * 160
"""Of every whole tensor: 1.5 MB."""

SIZES = (8, 32_768, 262_144, 1_048_576)
"""Bytes of the messages that links are measured with."""

MOST_ERROR, MOST_LOST = 0.10, 0.03
"""Targets: of every prediction; of what the lowering that is predicted to be the best takes against the best one."""

FAST, FAR, SLOW_PORT = 12e6, 2e6, 3e6

CASES: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "far": [
        ("all_gather", (12, 12, 12, 12)), ("all_gather", (8, 16, 8, 16)), ("all_gather", (4, 20, 4, 20)),
        ("all_gather", (0, 24, 0, 24)), ("reduce_scatter", (12, 12, 12, 12)), ("reduce_scatter", (4, 20, 4, 20)),
        ("all_to_all", (12, 12, 12, 12)), ("all_to_all", (4, 20, 4, 20)),
    ],
    "port": [
        ("all_gather", (12, 12, 12, 12)), ("all_gather", (21, 9, 9, 9)), ("all_gather", (30, 6, 6, 6)),
        ("all_gather", (42, 2, 2, 2)), ("reduce_scatter", (12, 12, 12, 12)), ("reduce_scatter", (42, 2, 2, 2)),
    ],
}  # fmt: skip
"""Lab -> (operation, parts of 48)."""

TABLE = TextTable(
    ("lab", "<6"), ("operation", "<16"), ("parts", "<13"), ("how", "<10"), ("measured", ">10"), ("predicted", ">10"),
    ("error", ">8"),
)  # fmt: skip


def main() -> int:
    """Measure both labs, print a table, write JSON."""
    parser = benchmark_parser(__doc__, quick="two cases of one lab, one repetition")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure the cases of every lab."""
    labs = []
    TABLE.print_head()
    for name in ("far",) if arguments.quick else CASES:
        labs.append(measure(name, CASES[name][:3:2] if arguments.quick else CASES[name], quick=arguments.quick))
        show(labs[-1])
    cases = [case for lab in labs for case in lab["cases"]]
    errors = [abs(way["error"]) for case in cases for way in case["ways"].values()]
    mean_error, max_error, max_lost = statistics.mean(errors), max(errors), max(case["lost"] for case in cases)
    print(f"mean error {mean_error:.1%}, largest {max_error:.1%} (wanted: {MOST_ERROR:.0%})")
    print(f"lost by what was predicted to be the best: at most {max_lost:.1%} (wanted: {MOST_LOST:.0%})")
    figures = {"mean_error": mean_error, "max_error": max_error, "max_lost": max_lost}
    return Outcome({"bytes": BYTES, "units": UNITS, "labs": labs, **figures})


def measure(name: str, cases: Sequence[tuple[str, tuple[int, ...]]], *, quick: bool) -> dict[str, Any]:
    """One lab: its links profiled, every lowering of every case measured and predicted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lab.json"
        path.write_text(dump_text(lab_file(name)), encoding="utf-8")
        lab = Lab.open_lab(path)
        with lifecycle.hold_lab(lab):
            cluster = profiled(
                lab, small_model(1), 64, quick=quick, layers=False, sizes_bytes=SIZES[::3] if quick else SIZES
            )
            tasks = [
                {"operation": operation, "parts": parts, "lowering": how, "bytes": BYTES}
                for operation, parts in cases
                for how in LOWERINGS
            ]
            times = run(lab, tasks, repeats=1 if quick else 7)
    lowerings = CollectiveLowerings(Network(cluster), [range(len(cluster.hosts))])
    found = []
    for index, (operation, parts) in enumerate(cases):
        fractions = tuple(part / UNITS for part in parts)
        cut = (fractions,) * (2 if operation == "all_to_all" else 1)
        ways = {}
        for place, how in enumerate(LOWERINGS):
            predicted_s = lowerings.collective_time_s(operation, how, float(BYTES), *cut)
            seconds = times[index * len(LOWERINGS) + place]
            ways[how] = {
                "measured_s": statistics.median(seconds),
                "spread": (max(seconds) - min(seconds)) / min(seconds),
                "predicted_s": predicted_s,
                "error": predicted_s / statistics.median(seconds) - 1,
            }
        best = {what: min(ways, key=lambda how: ways[how][f"{what}_s"]) for what in ("measured", "predicted")}
        chosen_s, least_s = ways[best["predicted"]]["measured_s"], ways[best["measured"]]["measured_s"]
        case = {"operation": operation, "parts": parts, "ways": ways, "best": best, "lost": chosen_s / least_s - 1}
        found.append(case)
    return {"lab": name, "cases": found}


def lab_file(name: str) -> LabFile:
    """Four hosts of one device each, which is not paced."""
    matrix = [[FAST if a != b else 0.0 for b in range(4)] for a in range(4)]
    if name == "far":
        matrix[0][2] = matrix[2][0] = FAR
    kind = DeviceKind(
        name="plain",
        memory_bytes=1 << 30,
        peak_flops_per_s=dict.fromkeys(("float64", "float32", "bfloat16"), 1e9),
        memory_bandwidth_bytes_per_s=1e9,
    )
    slow = HostPort(send_bytes_per_s=SLOW_PORT, receive_bytes_per_s=SLOW_PORT)
    return LabFile(
        cluster=Cluster(
            name=name,
            kinds={"plain": kind},
            links={"inside": Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9)},
            hosts=tuple(Host(name=f"host{h}", kind="plain", devices=1, link="inside") for h in range(4)),
            rails=(
                Rail(
                    name="network",
                    latency_s=((0.0,) * 4,) * 4,
                    bandwidth_bytes_per_s=tuple(map(tuple, matrix)),
                    shared_ports=name == "port",
                ),
            ),
            provenance=Provenance(source="assumed", where="written for this benchmark"),
        ),
        ports={"host0": slow} if name == "port" else {},
    )


def run(lab: Lab, cases: Sequence[dict[str, Any]], *, repeats: int) -> list[list[float]]:
    """Seconds of every repetition of every case: from when the first rank began it until the last one was done."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps({"cases": list(cases), "repeats": repeats}), encoding="utf-8")
        said: list[str] = []
        done = launch.run_judged(lab, ["python", str(RANKS), str(folder)], say=said.append)
        if done.code:
            raise PipefitError("The lab's collectives failed.", where=str(lab.path), seen="\n".join(said[-12:]))
        everyone = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    return [
        [max(stop for _, stop in each) - min(start for start, _ in each) for each in zip(*ranks, strict=True)]
        for ranks in everyone
    ]


def show(one: dict[str, Any]) -> None:
    """The rows of one lab."""
    for case in one["cases"]:
        for how, way in case["ways"].items():
            marks = "".join(mark for mark, what in (("*", "measured"), ("+", "predicted")) if case["best"][what] == how)
            times = (f"{way[side] * 1e3:.1f} ms" for side in ("measured_s", "predicted_s"))
            parts = ":".join(map(str, case["parts"]))
            TABLE.print_row(one["lab"], case["operation"], parts, how, *times, f"{way['error']:.1%}", note=f" {marks}")


if __name__ == "__main__":
    sys.exit(main())
