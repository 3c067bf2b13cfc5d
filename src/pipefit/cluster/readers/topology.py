"""`nvidia-smi topo -m`: the connections between the GPUs of a host. One file for each host, named like the host.

Columns are found by the header: GPUs, then network cards (`NIC0` with a legend, `mlx5_0` in older versions), then
affinities, which are not read. The matrix gives the type of a path, not its speed. The device's file has the speeds of
an NVLink (`nvlink_gb_per_s`) and of the PCIe slot, which stands for everything else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipefit.cluster.catalogue import device_sheets, find_sheet
from pipefit.cluster.kinds import GB
from pipefit.cluster.readers.reader import ClusterReader, ReaderInput, ReaderOptions, given_devices, given_rail
from pipefit.cluster.types import Cluster, Host, Link, Provenance
from pipefit.errors import ClusterError, FormatError

LATENCY_S = 5e-6
"""Assumed inside a host."""

CONNECTIONS = {
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "the processor's PCIe host bridge",
    "NODE": "host bridges of one processor",
    "SYS": "the link between processors",
    "SOC": "the link between processors",
}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NVLINK = re.compile(r"^NV(\d+)$")


@dataclass(frozen=True, slots=True)
class HostTopology:
    """The matrix of one host."""

    gpus: tuple[str, ...]
    cards: tuple[str, ...]
    "Network cards."
    ways: tuple[tuple[str, ...], ...]
    "[gpu][gpu, then card]: X, NV12, PIX, PXB, PHB, NODE, SYS."


def parse_topology(text: str, where: str) -> HostTopology:
    """Return the matrix in the output. Raises FormatError if it is missing, cut short, or contradictory."""
    lines = [_ESCAPES.sub("", line) for line in text.splitlines()]
    start = next((i for i, line in enumerate(lines) if re.match(r"^\s+GPU0\b", line)), None)
    if start is None:
        raise FormatError(
            "There is no topology matrix in this file.",
            where=where,
            seen=repr(text.strip().splitlines()[0][:60]) if text.strip() else "an empty file",
            allowed="the output of: nvidia-smi topo -m",
        )
    columns = re.split(r"\bCPU Affinity\b", lines[start])[0].split()
    gpus = tuple(name for name in columns if name.startswith("GPU"))
    cards = tuple(name for name in columns if not name.startswith("GPU"))
    if columns != [*gpus, *cards]:
        raise FormatError(
            "The columns of the matrix are in an unknown order.",
            where=f"{where}, line {start + 1}",
            seen=" ".join(columns),
        )
    rows = {
        line.split()[0]: (number, line.split()[1:])
        for number, line in enumerate(lines[start + 1 :], start + 2)
        if line.strip()
    }
    matrix = []
    for gpu in gpus:
        if gpu not in rows:
            raise _truncation_error(where, f"no row for {gpu}")
        number, cells = rows[gpu]
        if len(cells) < len(columns):
            raise _truncation_error(f"{where}, line {number}", f"{len(cells)} of {len(columns)} entries")
        matrix.append(tuple(_parse_cell(cell, f"{where}, line {number}") for cell in cells[: len(columns)]))
    _check_matrix(gpus, matrix, where)
    return HostTopology(gpus, cards, tuple(matrix))


def read(texts: Sequence[ReaderInput], given: ReaderOptions) -> Cluster:
    """Return the cluster of these hosts: devices of the kind in `--devices`, links by the slowest path between two
    GPUs."""
    hosts, links, kinds, said = [], {}, {}, []
    for text in texts:
        topology = parse_topology(text.text, text.where)
        kind, _, count = given_devices(given, text.where, len(topology.gpus))
        kinds[kind.name] = kind
        slowest = slowest_path(topology)
        name = f"{slowest} of {kind.name}"
        links[name] = Link(latency_s=LATENCY_S, bandwidth_bytes_per_s=path_bytes_per_s(slowest, kind.name, text.where))
        hosts.append(Host(name=Path(text.where).stem, kind=kind.name, devices=count, link=name))
        said.append(f"{hosts[-1].name}: {describe_topology(topology, slowest)}")
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise ClusterError("Two files describe the same host: their names are equal.", where=", ".join(names))
    return Cluster(
        name="topology of " + ", ".join(names),
        kinds=kinds,
        links=links,
        hosts=tuple(hosts),
        rails=given_rail(given, len(hosts), texts[0].where),
        provenance=Provenance(
            source="data-sheet", where=f"nvidia-smi topo -m; speeds from data sheets, 5 us assumed; {'; '.join(said)}"
        ),
    )


def slowest_path(topology: HostTopology) -> str:
    """The slowest path between two GPUs: fewest NVLinks, else the longest path over PCIe."""
    order = list(CONNECTIONS)
    paths = [path for i, row in enumerate(topology.ways) for j, path in enumerate(row[: len(topology.gpus)]) if i != j]
    if not paths:
        return "NV0"
    slow = [path for path in paths if path in order]
    if slow:
        return max(slow, key=order.index)
    return min(paths, key=lambda path: int(path[2:]))


def path_bytes_per_s(way: str, kind: str, where: str) -> float:
    """The speed of a path for that kind of device. Raises ClusterError for NVLinks on a kind that is not known to have
    them."""
    nvlink, sheet = _NVLINK.match(way), find_sheet(kind, where)
    single = way == "NV0" and sheet.nvlink_gb_per_s is None
    if nvlink is None or single:
        return sheet.slot_gb_per_s * GB
    if sheet.nvlink_gb_per_s is None:
        raise ClusterError(
            "The matrix shows NVLinks; their speed on this kind of device is not known.",
            where=where,
            seen=f"{way} on {kind}",
            allowed=", ".join(name for name, known in device_sheets().items() if known.nvlink_gb_per_s is not None),
            next_step="measure the links with pipefit profile, or add nvlink_gb_per_s to the device's file "
            "(docs/reference/devices.md)",
        )
    return max(1, int(nvlink[1])) * sheet.nvlink_gb_per_s * GB


def describe_topology(topology: HostTopology, way: str) -> str:
    """`8 GPUs, 4 network cards, slowest way SYS (the link between processors)`."""
    meaning = CONNECTIONS.get(way, f"{way[2:]} NVLinks")
    return f"{len(topology.gpus)} GPUs, {len(topology.cards)} network cards, slowest way {way} ({meaning})"


def _parse_cell(cell: str, where: str) -> str:
    if cell == "X" or cell in CONNECTIONS or _NVLINK.match(cell):
        return cell
    raise FormatError(
        "The matrix holds an entry that is not known; it may be of another version, or cut short.",
        where=where,
        seen=repr(cell),
        allowed="X, NV1 and so on, " + ", ".join(CONNECTIONS),
    )


def _check_matrix(gpus: Sequence[str], matrix: Sequence[Sequence[str]], where: str) -> None:
    for i, row in enumerate(matrix):
        for j in range(len(gpus)):
            if (row[j] == "X") != (i == j) or row[j] != matrix[j][i]:
                raise FormatError(
                    "The matrix contradicts itself.",
                    where=where,
                    seen=f"{gpus[i]} to {gpus[j]} is {row[j]}, {gpus[j]} to {gpus[i]} is {matrix[j][i]}",
                    allowed="X on the diagonal alone, the same entry both ways",
                )


def _truncation_error(where: str, seen: str) -> FormatError:
    return FormatError(
        "The matrix is incomplete: the file was cut short.",
        where=where,
        seen=seen,
        next_step="save the whole output of: nvidia-smi topo -m",
    )


READER = ClusterReader(
    name="nvidia-smi-topo",
    summary="`nvidia-smi topo -m`, a file for each host",
    takes="saved output of nvidia-smi topo -m, one file a host",
    read=read,
)
