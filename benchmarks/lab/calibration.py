"""Does the lab do what its file says? Clusters of 4, 8 and 16 hosts with two devices each, on this machine.

Rates between hosts differ by 6 and from one direction to the other, one host has a slow port, and the larger clusters
have racks with an uplink. Measured with real TCP streams: every pair alone, then streams that share a port or an
uplink against an even share of it; and the pace of all devices at once. Needs root and iproute2.

    python -m benchmarks.lab.calibration --json benchmarks/results/lab_calibration.json
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Outcome, benchmark_parser, run_benchmark
from benchmarks.lab.clusters import SLOW_PORT, drawn
from pipefit.codec import dump_text
from pipefit.lab import check, lifecycle, network, streams
from pipefit.lab.lifecycle import Lab
from pipefit.lab.spec import HostPort, LabFile, RackUplink
from pipefit.lab.tables import DeviceTable

HOSTS = (4, 8, 16)
RACK = 4


def main() -> int:
    """Measure all sizes, print a table, write JSON."""
    parser = benchmark_parser(__doc__, quick="four hosts only, shorter streams")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure a lab of every size."""
    print("hosts  devices  up     links: mean, largest   shared: mean, largest   pace: mean, largest  late")
    labs = []
    for count in HOSTS[:1] if arguments.quick else HOSTS:
        labs.append(measure(skewed(count), 0.5 if arguments.quick else 1.0))
        print(row(labs[-1]), flush=True)
    return Outcome({"labs": labs})


def skewed(count: int, seed: int = 0) -> LabFile:
    """`count` hosts of two devices, every ordered pair with a rate of its own; racks of four where there are more."""
    cluster = drawn("skewed", count, 2, seed, "drawn for the calibration of the lab")
    names = [host.name for host in cluster.hosts]
    racks = [names[start : start + RACK] for start in range(0, count, RACK)] if count > RACK else []
    return LabFile(
        cluster=cluster,
        devices={"small": DeviceTable(flops_per_s=1e9, memory_bytes_per_s=1e9)},
        ports={names[1]: HostPort(send_bytes_per_s=SLOW_PORT, receive_bytes_per_s=SLOW_PORT)},
        uplinks=tuple(
            RackUplink(name=f"rack{i}", hosts=tuple(hosts), up_bytes_per_s=8e6, down_bytes_per_s=8e6)
            for i, hosts in enumerate(racks)
        ),
    )


def measure(file: LabFile, seconds: float) -> dict[str, Any]:
    """One lab: made, calibrated, its contention measured, and taken down."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lab.json"
        path.write_text(dump_text(file), encoding="utf-8")
        lab, start = Lab.open_lab(path), time.perf_counter()
        with lifecycle.hold_lab(lab):
            up_s = time.perf_counter() - start
            found = check.as_data(lab, check.calibrate_lab(lab, seconds=seconds))
            with streams.open_streams(lab) as hosts:
                shared = [contention(hosts, pairs, share, 2 * seconds) for pairs, share in crowds(file)]
    errors = [abs(error) for each in shared for error in each["errors"]]
    return found | {
        "up_s": round(up_s, 2),
        "packet_bytes": network.packet_bytes(file),
        "shared": {"mean_error": sum(errors) / len(errors), "max_error": max(errors), "cases": shared},
    }


def crowds(file: LabFile) -> list[tuple[list[streams.StreamPair], float]]:
    """Streams that fill one thing together, and the even share of each: a port out, a port in, a rack's way up."""
    rates = network.rates_of(file)
    everyone = range(len(rates.pair))
    cases = []
    for h in (0, 1):
        out = [(h, b) for b in everyone if b != h][:3]
        into = [(a, h) for a in everyone if a != h][:3]
        cases += [(out, rates.send[h] / len(out)), (into, rates.receive[h] / len(into))]
    if file.uplinks:
        across = [(a, a + RACK) for a in range(RACK) if a != 1]
        cases.append((across, min(rates.up[0], rates.down[1]) / len(across)))
    slowest = check.requested_rates(file)
    return [(pairs, share) for pairs, share in cases if all(slowest[pair] >= share for pair in pairs)]


def contention(
    hosts: streams.HostStreams, pairs: Sequence[streams.StreamPair], share: float, seconds: float
) -> dict[str, Any]:
    """What streams achieve that should share something evenly."""
    achieved = hosts.measure_rates(pairs, seconds)
    return {"pairs": list(pairs), "share_bytes_per_s": share, "errors": [achieved[pair] / share - 1 for pair in pairs]}


def row(one: dict[str, Any]) -> str:
    """One line of the table."""
    links, shared, pace = one["links"], one["shared"], one["pace"]
    return (
        f"{one['hosts']:>5}  {one['devices']:>7}  {one['up_s']:>3.1f} s"
        f"  {links['mean_error']:>12.2%}, {links['max_error']:.2%}"
        f"  {shared['mean_error']:>15.2%}, {shared['max_error']:.2%}"
        f"  {pace['mean_error']:>13.2%}, {pace['max_error']:.2%}  {pace['late']:>5}"
    )


if __name__ == "__main__":
    sys.exit(main())
