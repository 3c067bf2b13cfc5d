"""The lab's part of link_measurement.py: `pipefit profile --only links` in labs whose links are given.

Every ordered pair has a rate of its own, one host a slow port, and some hosts share an uplink: what a pair reaches
alone (`pipefit.lab.check.requested`) is what the profile should find, and the port and the uplink beside.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from lab_clusters import SLOW_PORT, drawn
from pipefit.cluster import Cluster, load
from pipefit.codec import dump_text
from pipefit.lab import check
from pipefit.lab.lifecycle import Lab
from pipefit.lab.spec import LabFile, Port, Uplink

UPLINK = 9e6
LIMIT_S = 280


def given(count: int, seed: int = 0) -> LabFile:
    """`count` hosts of one device; host 1 has a slow port, the last quarter (two at least) share an uplink."""
    cluster = drawn("given", count, 1, seed, "drawn for the measurement of links")
    names = [host.name for host in cluster.hosts]
    rack = tuple(names[-max(2, count // 4) :])
    return LabFile(
        cluster=cluster,
        ports={names[1]: Port(send_bytes_per_s=SLOW_PORT, receive_bytes_per_s=SLOW_PORT)},
        uplinks=(Uplink(name="rack", hosts=rack, up_bytes_per_s=UPLINK, down_bytes_per_s=UPLINK),),
    )


def measure(count: int, repeats: int) -> dict[str, Any]:
    """One lab: profiled in it, and compared with what was given."""
    file = given(count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lab.json"
        path.write_text(dump_text(file), encoding="utf-8")
        start = time.perf_counter()
        profile = ["pipefit", "profile", "--only", "links", "--link-rounds", str(repeats), "-o", "cluster.json"]
        done = subprocess.run(
            [sys.executable, "-m", "pipefit", "lab", "run", str(path), "--", *profile],
            cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(
                f"profile in the lab: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        cluster, lab = load(Path(folder) / "cluster.json"), Lab.open(path)
        seconds = time.perf_counter() - start
        return compared(cluster, check.requested(lab.file), file) | {"hosts": count, "seconds": round(seconds, 1)}


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
    return {
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


HEAD = "hosts  seconds  rounds  bandwidth: mean, largest  large messages: mean, largest  slow port  uplinks found"


def row(one: dict[str, Any]) -> str:
    """One line of the table."""
    found = "; ".join(f"{len(hosts)} hosts {_mb(up)} up {_mb(down)} down" for hosts, up, down in one["uplinks_found"])
    return (
        f"{one['hosts']:>5}  {one['seconds']:>7}  {one['rounds']:>6}"
        f"  {one['bandwidth_mean_error']:>15.1%}, {one['bandwidth_max_error']:.1%}"
        f"  {one['large_message_mean_error']:>20.1%}, {one['large_message_max_error']:.1%}"
        f"  {one['slow_port_found_bytes_per_s'] / 1e6:>4.2f} MB/s  {found or '-'}"
    )


def _mb(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e6:.1f}"
