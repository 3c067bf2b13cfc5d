"""What PyTorch's placement of receives costs on one schedule, by the orders alone: no process, no noise.

PyTorch's own lowering and ours of the same compute actions, replayed (`stock_order.replay`) on devices with lognormal
chunks (sigma 0.3, seeds 0 to 19): PyTorch's by gloo's rule (a stream per directed pair of devices) and by NCCL's as
PyTorch uses it (one stream per pair), ours on a stream per directed pair, which is what our runtime makes on both.
`posted` is ours over the same order with all receives posted beforehand, which no placement can beat.
`throughput.py` measures some of these instances.

    python -m benchmarks.runtime.receive_orders [--quick] [--json PATH]
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import numpy as np

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from benchmarks.processes.paced import uneven_times
from benchmarks.runtime.sides import computed, our_lowering
from benchmarks.runtime.stock_order import posted_beforehand, replay, stock_lanes

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "v-min", "v-half", "zb-v", "dualpipe-v")
SHARES = (0.15, 0.5, 1.0)
"""A transfer's time over the mean forward of one chunk; two chunks, and two microbatches, a device."""
DEVICES = (4, 8)
SEEDS = 20

TABLE = TextTable(
    ("schedule", "<18"), ("devices", ">7"), ("transfer", ">10"), ("gloo", ">24"), ("NCCL", ">24"), ("posted", ">8")
)


def main() -> int:
    parser = benchmark_parser(__doc__, quick="four devices, three seeds")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Replay all instances."""
    seeds = range(3 if arguments.quick else SEEDS)
    print("PyTorch's step time over ours, mean (least to most) of all instances")
    TABLE.print_head()
    rows = []
    for devices in DEVICES[:1] if arguments.quick else DEVICES:
        for share in SHARES:
            for name in SCHEDULES:
                rows.append(survey(name, devices, share, seeds))
                print_row(rows[-1])
    return Outcome({"seeds": len(seeds), "rows": rows})


def survey(name: str, devices: int, share: float, seeds: range) -> dict[str, Any]:
    """One row: ratios over the instances by both rules."""
    ratios = np.array([ratios_of(name, devices, share, seed) for seed in seeds])
    mean = np.exp(np.log(ratios).mean(0))
    return {
        "schedule": name,
        "devices": devices,
        "transfer_share": share,
        **{
            rule: {"mean": float(mean[i]), "least": float(ratios[:, i].min()), "most": float(ratios[:, i].max())}
            for i, rule in enumerate(("gloo", "nccl"))
        },
        "posted": float(ratios[:, 2].max()),
    }


def ratios_of(name: str, devices: int, share: float, seed: int) -> tuple[float, float, float]:
    """Of one instance: PyTorch's makespan over ours, by gloo's rule and by NCCL's; ours over `posted_beforehand`."""
    schedule = computed(name, devices, 2 * devices)
    times = uneven_times(f"lognormal-{seed}", 2 * devices, schedule.num_stages, 1.0)
    ours, theirs = our_lowering(schedule, times, share).lanes, stock_lanes(schedule)

    def makespan(lanes: Any, streams: Any) -> float:
        return replay(lanes, schedule.placement, times, share, streams).makespan_s

    own = makespan(ours, "directed")
    least = makespan(posted_beforehand(ours, schedule.placement), "directed")
    return makespan(theirs, "directed") / own, makespan(theirs, "pair") / own, own / least


def print_row(row: dict[str, Any]) -> None:
    cells = (f"{row[r]['mean']:.3f} ({row[r]['least']:.3f} to {row[r]['most']:.3f})" for r in ("gloo", "nccl"))
    share, posted = f"{row['transfer_share']:.2f}", f"{row['posted']:.3f}"
    TABLE.print_row(row["schedule"], row["devices"], share, *cells, posted)


if __name__ == "__main__":
    sys.exit(main())
