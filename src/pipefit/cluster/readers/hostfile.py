"""Hostfiles: `host slots=8` (Open MPI, DeepSpeed), `host:8` (MPICH), or bare names with the count from the caller.

`#` starts a comment. `max_slots=` is accepted and ignored. A bare name that is repeated n times has n slots, as in Open
MPI; a repeated name with slots is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipefit.cluster.readers.reader import ClusterReader, ReaderInput, ReaderOptions, cluster_of_hosts
from pipefit.cluster.types import Cluster
from pipefit.errors import FormatError

_LINE = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+)(?::(?P<mpich>-?\d+))?(?P<rest>(?:\s+\S+)*)$")
_OPTION = re.compile(r"^(?P<key>[A-Za-z_-]+)=(?P<value>\S+)$")
_KEYS = ("slots", "max_slots", "max-slots")


def read(texts: Sequence[ReaderInput], given: ReaderOptions) -> Cluster:
    """Return the cluster of the hosts in these files; the kind of device comes from `--devices`."""
    slots: dict[str, int | None] = {}
    for text in texts:
        for name, count in parse_hosts(text).items():
            if name in slots:
                raise FormatError("A host is listed twice.", where=text.where, seen=name)
            slots[name] = count
    return cluster_of_hosts(list(slots), list(slots.values()), given, texts[0].where, "hostfile")


def parse_hosts(text: ReaderInput) -> dict[str, int | None]:
    """Return slots by host, None if the file omits them. Raises FormatError naming the line."""
    hosts: dict[str, int | None] = {}
    bare: dict[str, int] = {}
    for number, line in enumerate(text.text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        where = f"{text.where}, line {number}"
        name, count = _parse_host(line, where)
        if name in hosts and (count is not None or name not in bare):
            raise FormatError("A host is listed twice.", where=where, seen=name)
        if count is None:
            bare[name] = bare.get(name, 0) + 1
        hosts[name] = count
    if not hosts:
        raise FormatError("The hostfile names no host.", where=text.where, allowed="lines such as: node1 slots=8")
    return hosts | {name: count for name, count in bare.items() if count > 1}


def _parse_host(line: str, where: str) -> tuple[str, int | None]:
    match = _LINE.match(line)
    if match is None:
        raise _line_error(line, where)
    options = {}
    for word in match["rest"].split():
        option = _OPTION.match(word)
        if option is None or option["key"] not in _KEYS:
            raise _line_error(line, where)
        options[option["key"]] = option["value"]
    slots = options.get("slots", match["mpich"])
    if slots is None:
        return match["name"], None
    if not re.fullmatch(r"-?\d+", slots):
        raise FormatError(
            "The line does not say a number of slots; it may have been cut short.", where=where, seen=repr(line)
        )
    if int(slots) < 1:
        raise FormatError("A host has at least one slot.", where=where, seen=repr(line), allowed="slots=1 or more")
    return match["name"], int(slots)


def _line_error(line: str, where: str) -> FormatError:
    return FormatError(
        "This is not a line of a hostfile.", where=where, seen=repr(line), allowed="host slots=8, host:8, or host"
    )


READER = ClusterReader(
    name="hostfile",
    summary="`host slots=8` lines of Open MPI, DeepSpeed or MPICH",
    takes="hostfile",
    read=read,
)
