"""Hosts of one device each with equal links that take time: a lab (`pipefit.lab`), or this machine as it is.

with shaped_hosts(4, 100e6) as hosts:
    subprocess.Popen([*hosts[0].prefix, "python", ...])
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipefit import cluster
from pipefit.codec import dump_text
from pipefit.lab import lifecycle, netns, network
from pipefit.lab.spec import LabFile


@dataclass(frozen=True, slots=True)
class Host:
    """Where one process runs."""

    address: str
    interface: str
    "By which gloo finds it."
    prefix: tuple[str, ...] = ()
    "Put before a command to run it there."


def cannot_shape() -> str:
    """Why links cannot be shaped here; empty where they can."""
    return netns.unavailable_reason()


@contextmanager
def loopback_hosts(count: int) -> Iterator[list[Host]]:
    """All on this machine as it is."""
    yield [Host("127.0.0.1", "lo")] * count


@contextmanager
def shaped_hosts(count: int, bytes_per_s: float) -> Iterator[list[Host]]:
    """`count` hosts, every port and every link of which carries that many bytes a second each way."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lab.json"
        path.write_text(dump_text(_file(count, bytes_per_s)), encoding="utf-8")
        lab = lifecycle.Lab.open_lab(path)
        with lifecycle.hold_lab(lab):
            yield [
                Host(
                    network.device_address(host),
                    network.device_interface(0),
                    tuple(netns.exec_words(lab.namespace_of(host))),
                )
                for host in range(count)
            ]


def _file(count: int, bytes_per_s: float) -> LabFile:
    kind = cluster.DeviceKind(
        name="emulated",
        memory_bytes=1 << 30,
        peak_flops_per_s=dict.fromkeys(("float64", "float32", "bfloat16"), 1e9),
        memory_bandwidth_bytes_per_s=1e9,
    )
    matrix = tuple(tuple(bytes_per_s if a != b else 0.0 for b in range(count)) for a in range(count))
    return LabFile(
        cluster=cluster.Cluster(
            name="equal",
            kinds={"emulated": kind},
            links={"inside": cluster.Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9)},
            hosts=tuple(cluster.Host(name=f"host{h}", kind="emulated", devices=1, link="inside") for h in range(count)),
            rails=(cluster.Rail(name="network", latency_s=((0.0,) * count,) * count, bandwidth_bytes_per_s=matrix),),
            provenance=cluster.Provenance(source="assumed", where="drawn for this benchmark"),
        ),
        packet_bytes=9000,
    )
