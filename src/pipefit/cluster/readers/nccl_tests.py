"""nccl-tests output (all_reduce_perf, sendrecv_perf and similar): parses the table, and makes clusters from tables.

Columns are found by the header, so files with and without `root`, with `#wrong` or the older `error`, read alike. The
list of ranks at the head of a file gives hosts, devices and their names. Bus bandwidth is the bandwidth of a link for
every operation (nccl-tests, doc/PERFORMANCE.md). The latency of a step is the smallest time over the number of steps of
a ring.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from pipefit.cluster.catalogue import reported_device
from pipefit.cluster.kinds import data_sheet_kind
from pipefit.cluster.readers.reader import (
    RAIL_LATENCY_S,
    ClusterReader,
    ReaderInput,
    ReaderOptions,
    given_devices,
)
from pipefit.cluster.types import Cluster, DeviceKind, Host, Link, Provenance, Rail
from pipefit.errors import ClusterError, FormatError, MissingFactsError
from pipefit.units import parse_bandwidth

RING_STEPS = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "alltoall": 1,
    "broadcast": 1,
    "reduce": 1,
    "gather": 1,
    "scatter": 1,
    "hypercube": 1,
}
"""Number of passes round the ring, each of (ranks - 1) steps. sendrecv is one step."""

_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+(\d+)\s+\[[^\]]*\]\s+(.+?)\s*$")
_NAMES = "|".join(("sendrecv", *RING_STEPS))
_TEST = re.compile(rf"\b({_NAMES})_perf\b")
_FILE = re.compile(rf"(?:^|[^a-z])({_NAMES})(?![a-z])")
_FIELDS = {"time": "us", "algbw": "GB/s", "busbw": "GB/s"}


@dataclass(frozen=True, slots=True)
class RankLine:
    """One line of the list of devices."""

    rank: int
    host: str
    device: int
    name: str


@dataclass(frozen=True, slots=True)
class RowTiming:
    """The out-of-place or in-place half of a row."""

    time_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class SizeRow:
    """The timings of one message size."""

    size_bytes: int
    out_of_place: RowTiming
    in_place: RowTiming | None
    "None if the test has no in-place variant (N/A)."


@dataclass(frozen=True, slots=True)
class NcclTable:
    """The table of one file."""

    where: str
    operation: str
    ranks: tuple[RankLine, ...]
    rows: tuple[SizeRow, ...]

    @property
    def host_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))


def parse_table(text: str, where: str) -> NcclTable:
    """Return the table of one file. Raises FormatError if it has another format, is cut short, or holds impossible
    figures."""
    lines = text.splitlines()
    ranks = tuple(
        RankLine(int(match[1]), match[2], int(match[3]), match[4]) for line in lines if (match := _RANK.match(line))
    )
    header = next((i for i, line in enumerate(lines) if _split_words(line)[:2] == ["size", "count"]), None)
    if header is None:
        raise FormatError(
            "There is no nccl-tests table in this file.",
            where=where,
            seen=repr(lines[0][:60]) if lines else "an empty file",
            allowed="the whole output of all_reduce_perf, sendrecv_perf, ... with the line: size count type ...",
        )
    columns = _split_words(lines[header])
    _check_units(lines[header + 1] if header + 1 < len(lines) else "", columns, f"{where}, line {header + 2}")
    rows = []
    for number, line in enumerate(lines[header + 2 :], header + 3):
        if line.strip() and not line.lstrip().startswith("#"):
            rows.append(_parse_row(line.split(), columns, f"{where}, line {number}"))
    if not rows or not any("Avg bus bandwidth" in line for line in lines):
        raise FormatError(
            "The table ends without its summary: the file was cut short.",
            where=where,
            seen=f"{len(rows)} rows",
            allowed="a last line: # Avg bus bandwidth",
            next_step="save the whole output of the test again",
        )
    if not ranks:
        raise FormatError(
            "The file does not list its devices, so its machines are not known.",
            where=where,
            allowed="lines such as: #  Rank  0 ... on node1 device  0 [0x07] NVIDIA A100-SXM4-80GB",
        )
    return NcclTable(where, _parse_operation(text, where), ranks, tuple(rows))


def read(texts: Sequence[ReaderInput], given: ReaderOptions) -> Cluster:
    """Make one cluster of several files. Files within a host give its links, files on two hosts that pair's link. Files
    on more hosts give the links of every pair without its own file."""
    tables = [parse_table(text.text, text.where) for text in texts]
    devices: dict[str, dict[int, str]] = {}
    for table in tables:
        for rank in table.ranks:
            devices.setdefault(rank.host, {})[rank.device] = rank.name
    kinds: dict[str, DeviceKind] = {}
    hosts, links = [], {}
    for name, device_names in devices.items():
        kind, sheet_link, count = _kind_of(name, device_names, given, tables[0].where)
        kinds[kind.name] = kind
        host_tables = [table for table in tables if table.host_names == (name,) and len(table.ranks) > 1]
        label = f"inside {name}" if host_tables else f"inside {kind.name}"
        links[label] = link_of(host_tables[-1]) if host_tables else sheet_link
        hosts.append(Host(name=name, kind=kind.name, devices=count, link=label))
    rails = _build_rails([host.name for host in hosts], tables, given)
    return Cluster(
        name="nccl-tests of " + ", ".join(devices),
        kinds=kinds,
        links=links,
        hosts=tuple(hosts),
        rails=rails,
        provenance=Provenance(
            source="measured",
            where=f"nccl-tests: {'; '.join(map(_table_words, tables))}; what no file measures is from data sheets",
        ),
    )


def _table_words(table: NcclTable) -> str:
    return f"{table.operation} on {len(table.ranks)} ranks of {', '.join(table.host_names)} ({table.where})"


def link_of(table: NcclTable) -> Link:
    """Latency: smallest out-of-place time over the steps of a ring. Bandwidth: the best bus bandwidth of the table."""
    ranks = len(table.ranks)
    steps = 1 if table.operation == "sendrecv" else RING_STEPS[table.operation] * max(1, ranks - 1)
    smallest = min(table.rows, key=lambda row: row.size_bytes)
    return Link(
        latency_s=smallest.out_of_place.time_s / steps,
        bandwidth_bytes_per_s=max(row.out_of_place.bus_bytes_per_s for row in table.rows),
    )


def _build_rails(names: Sequence[str], tables: Sequence[NcclTable], given: ReaderOptions) -> tuple[Rail, ...]:
    if len(names) < 2:
        return ()
    pairs: dict[tuple[str, str], Link] = {}
    for table in sorted(tables, key=lambda table: -len(table.host_names)):
        for a, b in combinations(table.host_names, 2):
            pairs[a, b] = pairs[b, a] = link_of(table)
    missing = [f"{a} -- {b}" for a, b in combinations(names, 2) if (a, b) not in pairs]
    if missing and not given.network:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise MissingFactsError(
            f"No file measures these hosts with each other: {', '.join(missing[:4])}{more}.",
            where=", ".join(table.where for table in tables),
            next_step="add a file of sendrecv_perf on those two hosts or of all_reduce_perf on all, or give --network",
        )
    bandwidth = parse_bandwidth(given.network, "--network") if given.network else 0.0
    default = Link(latency_s=RAIL_LATENCY_S, bandwidth_bytes_per_s=bandwidth)
    loopback = Link(latency_s=0.0, bandwidth_bytes_per_s=0.0)
    table_of = [[loopback if a == b else pairs.get((a, b), default) for b in names] for a in names]
    return (
        Rail(
            name="network",
            latency_s=tuple(tuple(link.latency_s for link in row) for row in table_of),
            bandwidth_bytes_per_s=tuple(tuple(link.bandwidth_bytes_per_s for link in row) for row in table_of),
        ),
    )


def _kind_of(host: str, devices: Mapping[int, str], given: ReaderOptions, where: str) -> tuple[DeviceKind, Link, int]:
    names = set(devices.values())
    if len(names) > 1:
        raise ClusterError(
            "A host holds devices of several kinds.", where=f"host {host}", seen=", ".join(sorted(names))
        )
    name = next(iter(names))
    sheet = reported_device(name)
    if given.devices:
        return given_devices(given, where, None if re.match(r"\d+x", given.devices) else len(devices))
    if sheet is None:
        raise ClusterError(
            f"No data sheet is known for {name!r}.",
            where=f"host {host}",
            next_step="say which kind it resembles: --devices 8xA100-80",
        )
    kind, link = data_sheet_kind(sheet)
    return kind, link, len(devices)


def _split_words(line: str) -> list[str]:
    return line.lstrip("# ").split()


def _check_units(line: str, columns: Sequence[str], where: str) -> None:
    units = [word.strip("()") for word in _split_words(line)]
    wanted = ["B", "elements", *(_FIELDS[column] for column in columns if column in _FIELDS)]
    if units != wanted:
        raise FormatError(
            "The units of the table are not the ones of nccl-tests.",
            where=where,
            seen=" ".join(units) or "nothing",
            allowed="(B) (elements) (us) (GB/s) (GB/s) (us) (GB/s) (GB/s)",
        )


def _parse_row(words: Sequence[str], columns: Sequence[str], where: str) -> SizeRow:
    names = list(columns)
    for optional in ("redop", "root"):  # blank in the rows of some tests of some versions
        if len(words) < len(names) and optional in names:
            names.remove(optional)
    blank = len(names) < len(columns)
    named = sum(re.fullmatch(r"-?[\d.]+", word) is None for word in words[2:5])
    if len(words) != len(names) or names.count("busbw") != 2 or (blank and named != 1 + ("redop" in names)):
        raise FormatError(
            "The row does not fit the header: it was cut short, or is of another version.",
            where=where,
            seen=f"{len(words)} entries for {len(columns)} columns",
            allowed=" ".join(columns),
        )
    second = names.index("time", names.index("time") + 1)
    first = dict(zip(names[:second], words[:second], strict=True))
    if first.get("#wrong", "0") not in ("0", "N/A"):
        raise FormatError("The test itself found wrong results.", where=where, seen=f"{first['#wrong']} wrong values")
    out_of_place = _parse_timing(first, where)
    if out_of_place is None:
        raise FormatError("The row has no time.", where=where, seen="N/A")
    rest = dict(zip(names[second:], words[second:], strict=True))
    return SizeRow(int(_parse_number(first, "size", where)), out_of_place, _parse_timing(rest, where))


def _parse_timing(cells: Mapping[str, str], where: str) -> RowTiming | None:
    if cells["time"] == "N/A":
        return None
    time_us = _parse_number(cells, "time", where)
    if time_us == 0:
        raise FormatError("A message cannot take no time.", where=where, seen=cells["time"])
    return RowTiming(
        time_us * 1e-6, _parse_number(cells, "algbw", where) * 1e9, _parse_number(cells, "busbw", where) * 1e9
    )


def _parse_number(cells: Mapping[str, str], column: str, where: str) -> float:
    try:
        value = float(cells[column])
    except ValueError:
        raise FormatError(
            "The entry is no number.", where=f"{where}, column {column}", seen=repr(cells[column])
        ) from None
    if not 0 <= value < float("inf"):
        raise FormatError(
            "The entry is impossible.", where=f"{where}, column {column}", seen=cells[column], allowed="0 or above"
        )
    return value


def _parse_operation(text: str, where: str) -> str:
    match = _TEST.search(text) or _FILE.search(where.lower())
    if match is None:
        raise FormatError(
            "The file does not say which test it is of.",
            where=where,
            allowed="its name or its text holds all_reduce_perf, sendrecv_perf, ...",
            next_step="rename the file, for example to all_reduce_perf.txt",
        )
    return match[1]


READER = ClusterReader(
    name="nccl-tests",
    summary="output of all_reduce_perf, sendrecv_perf and the like",
    takes="saved outputs, any number: of one host, of pairs of hosts, of all",
    read=read,
)
