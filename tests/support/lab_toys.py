"""Small labs for tests, and what stands in the kernel before and after."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipefit.cluster import Cluster, DeviceKind, Host, Link, Provenance, Rail
from pipefit.codec import dump_text
from pipefit.lab import netns
from pipefit.lab.lifecycle import lab_id
from pipefit.lab.spec import LabFile
from pipefit.lab.tables import DeviceTable

_WHY_NOT = netns.unavailable_reason()


def needs_lab(test: Any) -> Any:
    """Mark a test that makes namespaces: skipped by name, with the reason, where none can be made."""
    skips = pytest.mark.skipif(bool(_WHY_NOT), reason=f"no lab can be made here: {_WHY_NOT}")
    return pytest.mark.netns(skips(test))


def toy_cluster(hosts: int = 2, devices: int = 2, rate: Callable[[int, int], float] = lambda a, b: 1e7) -> Cluster:
    """Hosts of one kind; `rate(a, b)` in bytes/s from host a to host b."""
    kind = DeviceKind(
        name="slow",
        memory_bytes=1 << 30,
        peak_flops_per_s={"float64": 1e9, "float32": 1e9, "bfloat16": 1e9},
        memory_bandwidth_bytes_per_s=1e9,
    )
    matrix = tuple(tuple(float(rate(a, b)) if a != b else 0.0 for b in range(hosts)) for a in range(hosts))
    return Cluster(
        name="toy",
        kinds={"slow": kind},
        links={"inside": Link(latency_s=1e-5, bandwidth_bytes_per_s=1e8)},
        hosts=tuple(Host(name=f"n{h}", kind="slow", devices=devices, link="inside") for h in range(hosts)),
        rails=(Rail(name="net", latency_s=((0.0,) * hosts,) * hosts, bandwidth_bytes_per_s=matrix),),
        provenance=Provenance(source="assumed", where="a test"),
    )


def toy_lab(cluster: Cluster | None = None, **fields: Any) -> LabFile:
    """A lab with one table."""
    table = DeviceTable(flops_per_s=2e9, memory_bytes_per_s=2e9)
    return replace(LabFile(cluster=cluster or toy_cluster(), devices={"slow": table}), **fields)


def lab_path(folder: Path, lab: LabFile) -> Path:
    """The lab as a file."""
    path = folder / "toy.lab.json"
    path.write_text(dump_text(lab), encoding="utf-8")
    return path


def kernel_state(path: Path) -> tuple[str, str]:
    """(namespaces of the lab of this file, links of the machine): what must be the same before and after."""
    names = sorted(line.split()[0] for line in _say("ip", "netns", "list").splitlines())
    links = sorted(line.split()[0] for line in _say("ip", "-br", "link").splitlines())
    prefix = f"{netns.PREFIX}{lab_id(path)}-"
    return " ".join(name for name in names if name.startswith(prefix)), " ".join(links)


def _say(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
