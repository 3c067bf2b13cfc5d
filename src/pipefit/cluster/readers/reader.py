"""The reader interface, and parts that several readers share: hosts from names and from the caller's options."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipefit.cluster.catalogue import NAME, network_bandwidth
from pipefit.cluster.kinds import data_sheet_kind
from pipefit.cluster.spec import uniform_rail
from pipefit.cluster.types import Cluster, DeviceKind, Host, Link, Provenance, Rail
from pipefit.errors import ClusterError, FormatError, MissingFactsError
from pipefit.units import format_bandwidth

RAIL_LATENCY_S = 10e-6
"""Assumed between hosts if only a bandwidth is given."""

_DEVICES = re.compile(rf"^(?:(?P<count>\d+)x)?(?P<kind>{NAME})$")


@dataclass(frozen=True, slots=True)
class ReaderInput:
    """One input and its name for messages."""

    where: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """The caller's options beside the files."""

    devices: str = ""
    "`8xA100-80` or `A100-80`; '' if the files contain it."
    network: str = ""
    "`200Gbit/s`, or `8x400Gbit/s` of eight network cards: bandwidth of one host; '' if the files contain it."


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReader:
    """The reader of one tool's output."""

    name: str
    summary: str
    takes: str
    "Description of the expected files."
    read: Callable[[Sequence[ReaderInput], ReaderOptions], Cluster]
    literal: bool = False
    "Whether the text itself may be given instead of a file."


def given_devices(given: ReaderOptions, where: str, count: int | None) -> tuple[DeviceKind, Link, int]:
    """Return (kind, link inside a host, devices of a host) from `--devices`. `count` comes from the files, None if
    absent.

    Raises ClusterError if it is missing, malformed, of an unknown kind, or contradicts the files.
    """
    match = _DEVICES.match(given.devices)
    if match is None:
        raise MissingFactsError(
            "The devices of a host are not known: the input does not name them."
            if not given.devices
            else "This does not name the devices of a host.",
            where=where if not given.devices else "--devices",
            seen=repr(given.devices) if given.devices else None,
            allowed="--devices KIND or COUNTxKIND, for example --devices 8xA100-80",
        )
    kind, link = data_sheet_kind(match["kind"])
    wanted = int(match["count"]) if match["count"] else count
    if wanted is None:
        raise MissingFactsError(
            "The number of devices of a host is not known.",
            where=where,
            next_step=f"say it: --devices 8x{match['kind']}",
        )
    if count is not None and wanted != count:
        raise ClusterError(
            "The input and --devices disagree on the devices of a host.", where=where, seen=count, allowed=str(wanted)
        )
    return kind, link, wanted


def given_rail(given: ReaderOptions, hosts: int, where: str) -> tuple[Rail, ...]:
    """Return one uniform rail from `--network`; none for one host. Raises ClusterError if it is missing."""
    if hosts < 2:
        return ()
    if not given.network:
        raise MissingFactsError(
            "Several hosts need the bandwidth between them; the input does not say it, and none is assumed.",
            where=where,
            seen=f"{hosts} hosts",
            next_step="say it, for example --network 200Gbit/s, or measure it with pipefit profile",
        )
    return (uniform_rail("network", hosts, RAIL_LATENCY_S, network_bandwidth(given.network, "--network")),)


def cluster_of_hosts(
    names: Sequence[str],
    slots: Sequence[int | None],
    given: ReaderOptions,
    where: str,
    tool: str,
    kinds: Sequence[str] = (),
) -> Cluster:
    """Return a data-sheet cluster of named hosts.

    `slots` are their numbers of devices, None if the input omits them. `kinds` are the names of their devices, as users
    type or drivers print them; empty if the input omits them. `--devices` replaces `kinds`. Raises FormatError if there
    is no host, ClusterError for an unknown device.
    """
    if not names:
        raise FormatError("The input names no host with devices.", where=where, allowed="one host or more")
    if given.devices or not kinds:
        options = [given] * len(names)
    else:
        options = [replace(given, devices=data_sheet_kind(kind, where)[0].name) for kind in kinds]
    held = [given_devices(option, where, count) for option, count in zip(options, slots, strict=True)]
    links = {kind.name: link for kind, link, _ in held}
    classes = {kind: "inside" if len(links) == 1 else f"inside {kind}" for kind in links}
    hosts = [
        Host(name=name, kind=kind.name, devices=devices, link=classes[kind.name])
        for name, (kind, _, devices) in zip(names, held, strict=True)
    ]
    rails = given_rail(given, len(hosts), where)
    said = (
        f"; {format_bandwidth(rails[0].bandwidth_bytes_per_s[0][1])} per host as given, 10 us assumed" if rails else ""
    )
    return Cluster(
        name=f"{tool} {where}",
        kinds={kind.name: kind for kind, _, _ in held},
        links={classes[kind]: link for kind, link in links.items()},
        hosts=tuple(hosts),
        rails=rails,
        provenance=Provenance(source="data-sheet", where=f"hosts from {tool} {where}, devices from data sheets{said}"),
    )
