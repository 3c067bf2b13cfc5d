"""The lab's part of links.py: `pipefit profile --only links` in labs whose links are given.

Three kinds of labs. What a pair reaches alone (`pipefit.lab.check.requested_rates`) is what the profile should find,
and ports and uplinks beside.

- `own`: every ordered pair has a rate of its own, one host a slow port, and a quarter of the hosts share an uplink.
- `racks`: racks of four with a third of the rate between them, every link 2 % of its own. The rounds are chosen, as for
  clusters of many hosts: the profile is told how many it may take, and what is not measured is predicted.
- `mild`: links alike but for 2 %; a quarter of the hosts share an uplink that carries 0.7 of what they can send, so
  that no pairs of a tournament, in which half of the hosts send, slow each other down.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lab.clusters import SLOW_PORT, drawn
from pipefit.cluster import Cluster, load_cluster
from pipefit.codec import dump_text
from pipefit.lab import check
from pipefit.lab.lifecycle import Lab
from pipefit.lab.spec import HostPort, LabFile, RackUplink

UPLINK = 9e6
LIMIT_S = 280
ALIKE, RACK, OWN, MILD = 6e6, 4, 0.02, 0.7
KINDS = ("own", "racks", "mild")


def given(count: int, kind: str = "own", seed: int = 0) -> LabFile:
    """`count` hosts of one device."""
    cluster = drawn("given", count, 1, seed, "drawn for the measurement of links")
    names = [host.name for host in cluster.hosts]
    rack = tuple(names[-max(2, count // 4) :])
    if kind == "own":
        return LabFile(
            cluster=cluster,
            ports={names[1]: HostPort(send_bytes_per_s=SLOW_PORT, receive_bytes_per_s=SLOW_PORT)},
            uplinks=(RackUplink(name="rack", hosts=rack, up_bytes_per_s=UPLINK, down_bytes_per_s=UPLINK),),
        )
    draw, rail = random.Random(seed), cluster.rails[0]
    rates = [[ALIKE / 3 if kind == "racks" and a // RACK != b // RACK else ALIKE for b in range(count)]
             for a in range(count)]  # fmt: skip
    matrix = tuple(
        tuple(rate * draw.lognormvariate(0, OWN) if a != b else 0.0 for b, rate in enumerate(row))
        for a, row in enumerate(rates)
    )
    cluster = replace(cluster, rails=(replace(rail, bandwidth_bytes_per_s=matrix),))
    carries = MILD * len(rack) * ALIKE
    uplink = RackUplink(name="rack", hosts=rack, up_bytes_per_s=carries, down_bytes_per_s=carries)
    return LabFile(cluster=cluster, uplinks=(uplink,) if kind == "mild" else ())


def measure(count: int, repeats: int, kind: str = "own", rounds: str = "auto") -> dict[str, Any]:
    """One lab: profiled in it, with so many rounds, and compared with what was given."""
    file = given(count, kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lab.json"
        path.write_text(dump_text(file), encoding="utf-8")
        start = time.perf_counter()
        profile = ["pipefit", "profile", "--only", "links", "--link-rounds", str(repeats)]
        profile += ["--host-rounds", rounds, "-o", "cluster.json"]
        done = subprocess.run(
            [sys.executable, "-m", "pipefit", "lab", "run", str(path), "--", *profile],
            cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(
                f"profile in the lab: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        cluster, lab = load_cluster(Path(folder) / "cluster.json"), Lab.open_lab(path)
        seconds = time.perf_counter() - start
        found = compared(cluster, check.requested_rates(lab.file), file)
        return found | {"kind": kind, "host_rounds": rounds, "hosts": count, "seconds": round(seconds, 1)}


def compared(cluster: Cluster, requested: dict[tuple[int, int], float], file: LabFile) -> dict[str, Any]:
    """Errors of the bandwidths (and of the largest message's rate), and what was found of ports and uplinks."""
    rail = cluster.rails[0]
    assert cluster.measured is not None
    curve = cluster.measured.rails[rail.name]
    pairs = [pair for pair in requested if pair[0] != pair[1]]
    wanted = np.array([requested[pair] for pair in pairs])
    fitted = np.array([rail.bandwidth_bytes_per_s[a][b] for a, b in pairs])
    large = np.array([curve.sizes_bytes[-1] / curve.time_s[-1][a][b] for a, b in pairs])
    repeat = np.array([rail.repeatability[a][b] for a, b in pairs])
    sharing, method = curve.sharing, curve.method
    assert sharing is not None and method is not None
    guessed = {(a, b) for a, row in enumerate(curve.predicted) for b in row}
    told = [abs(fit / want - 1) for pair, fit, want in zip(pairs, fitted, wanted, strict=True) if pair in guessed]
    return {
        "predicted": len(told),
        "predicted_mean_error": float(np.mean(told)) if told else None,
        "bandwidth_mean_error": float(np.mean(np.abs(fitted / wanted - 1))),
        "bandwidth_max_error": float(np.max(np.abs(fitted / wanted - 1))),
        "large_message_mean_error": float(np.mean(np.abs(large / wanted - 1))),
        "large_message_max_error": float(np.max(np.abs(large / wanted - 1))),
        "sizes_bytes": list(curve.sizes_bytes),
        "repeatability": float(repeat.mean()),
        "noise": method.noise,
        "order_share": method.order_share,
        "crowded": method.crowded,
        "rounds": method.rounds,
        "full_rounds": method.full_rounds,
        "slow_port_found_bytes_per_s": sharing.out_bytes_per_s[1],
        "slow_port_shared": sharing.out_shared[1],
        "shared_ports": rail.shared_ports,
        "uplinks_given": [[list(each.hosts), each.up_bytes_per_s, each.down_bytes_per_s] for each in file.uplinks],
        "uplinks_found": [[list(each.hosts), each.up_bytes_per_s, each.down_bytes_per_s] for each in sharing.uplinks],
    }


HEAD = (
    "kind   hosts  seconds  rounds  bandwidth: mean, largest  large messages: mean, largest  predicted"
    "  slow port  uplinks found"
)


def row(one: dict[str, Any]) -> str:
    """One line of the table."""
    found = "; ".join(f"{len(hosts)} hosts {_mb(up)} up {_mb(down)} down" for hosts, up, down in one["uplinks_found"])
    return (
        f"{one['kind']:<5}  {one['hosts']:>5}  {one['seconds']:>7}  {one['rounds']:>6}"
        f"  {one['bandwidth_mean_error']:>15.1%}, {one['bandwidth_max_error']:.1%}"
        f"  {one['large_message_mean_error']:>20.1%}, {one['large_message_max_error']:.1%}"
        f"  {one['predicted']:>9}  {one['slow_port_found_bytes_per_s'] / 1e6:>4.2f} MB/s  {found or '-'}"
    )


def _mb(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e6:.1f}"
