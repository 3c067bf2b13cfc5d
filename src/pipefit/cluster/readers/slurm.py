"""Slurm node lists: `node[001-004,007]`, `rack[1-2]-n[01-04]`, `a,b[1-3]`, `n[1[0-3],20]`; or the job's variables.

The input is the text itself, or a file with the list, with one name per line (`scontrol show hostnames`), or with
SLURM_JOB_NODELIST=... and SLURM_GPUS_ON_NODE=... or SLURM_TASKS_PER_NODE=8(x3),4 as `env` prints them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipefit.cluster.readers.reader import ClusterReader, ReaderInput, ReaderOptions, cluster_of_hosts
from pipefit.cluster.types import Cluster
from pipefit.errors import FormatError

MOST_HOSTS = 65536

_RANGE = re.compile(r"^(\d+)-(\d+)$")
_NAME = re.compile(r"^[A-Za-z0-9_.-]*$")
_VARIABLE = re.compile(r"^(?:export\s+)?(SLURM_\w+)=(.*)$", re.MULTILINE)
_TASKS = re.compile(r"^(\d+)(?:\(x(\d+)\))?$")


def read(texts: Sequence[ReaderInput], given: ReaderOptions) -> Cluster:
    """Return the cluster of the nodes; their devices come from the variables, or from `--devices`."""
    names: list[str] = []
    slots: list[int | None] = []
    for text in texts:
        listed, counts = _list_nodes(text)
        names += listed
        slots += counts
    twice = {name for name in names if names.count(name) > 1} if len(names) < 4096 else set()
    if twice:
        raise FormatError("A node is listed twice.", where=texts[0].where, seen=", ".join(sorted(twice)[:4]))
    return cluster_of_hosts(names, slots, given, texts[0].where, "slurm")


def expand_nodes(text: str, where: str = "node list") -> list[str]:
    """Return the names in a node list, in order. Raises FormatError if it is malformed."""
    names = [name for part in _split_commas(text.strip(), where, text) for name in _expand_one(part, where, text)]
    for name in names:
        if not _NAME.match(name) or not name:
            raise FormatError(
                "This is not the name of a node.", where=where, seen=repr(name), allowed="letters, digits, . _ -"
            )
    return names


def _list_nodes(text: ReaderInput) -> tuple[list[str], list[int | None]]:
    variables = dict(_VARIABLE.findall(text.text))
    if variables:
        listed = variables.get("SLURM_JOB_NODELIST") or variables.get("SLURM_NODELIST")
        if not listed:
            raise FormatError(
                "The variables do not hold the job's node list.",
                where=text.where,
                seen=", ".join(sorted(variables)),
                allowed="a line SLURM_JOB_NODELIST=...",
            )
        names = expand_nodes(_strip_quotes(listed), text.where)
        return names, _node_slots(variables, len(names), text.where)
    lines = [line.strip() for line in text.text.splitlines() if line.strip() and not line.strip().startswith("#")]
    if not lines:
        raise FormatError("The node list is empty.", where=text.where, allowed="for example node[001-004,007]")
    names = [name for line in lines for name in expand_nodes(line, text.where)]
    return names, [None] * len(names)


def _node_slots(variables: dict[str, str], nodes: int, where: str) -> list[int | None]:
    if "SLURM_GPUS_ON_NODE" in variables:
        value = _strip_quotes(variables["SLURM_GPUS_ON_NODE"])
        if not value.isdigit() or int(value) < 1:
            raise FormatError(
                "This is not a number of GPUs.",
                where=f"{where}: SLURM_GPUS_ON_NODE",
                seen=repr(value),
                allowed="1 or more",
            )
        return [int(value)] * nodes
    if "SLURM_TASKS_PER_NODE" not in variables:
        return [None] * nodes
    slots_where = f"{where}: SLURM_TASKS_PER_NODE"
    counts: list[int | None] = []
    for part in _strip_quotes(variables["SLURM_TASKS_PER_NODE"]).split(","):
        match = _TASKS.match(part.strip())
        if match is None:
            raise FormatError(
                "This is not a list of task counts.", where=slots_where, seen=repr(part), allowed="8(x3),4"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != nodes:
        raise FormatError(
            "There is not one task count for each node.", where=slots_where, seen=len(counts), allowed=str(nodes)
        )
    return counts


def _strip_quotes(value: str) -> str:
    return value.strip().strip("'\"")


def _split_commas(text: str, where: str, whole: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth < 0:
            raise _bracket_error(where, whole, position)
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise _bracket_error(where, whole, len(text))
    parts.append(text[start:])
    if any(not part for part in parts):
        raise FormatError(
            "A part of the node list is empty.", where=where, seen=repr(whole), allowed="names between commas"
        )
    return parts


def _expand_one(text: str, where: str, whole: str) -> list[str]:
    """Expand one name with any number of brackets, which may be nested."""
    start = text.find("[")
    if start < 0:
        return [text]
    depth, stop = 0, start
    for stop in range(start, len(text)):
        depth += (text[stop] == "[") - (text[stop] == "]")
        if depth == 0:
            break
    inner = [
        item
        for part in _split_commas(text[start + 1 : stop], where, whole)
        for item in _bracket_items(part, where, whole)
    ]
    rest = _expand_one(text[stop + 1 :], where, whole)
    if len(inner) * len(rest) > MOST_HOSTS:
        raise _too_many_error(where, whole)
    return [f"{text[:start]}{item}{tail}" for item in inner for tail in rest]


def _bracket_items(part: str, where: str, whole: str) -> list[str]:
    match = _RANGE.match(part)
    if match is None:
        items = _expand_one(part, where, whole)
        for item in items:
            if not item.isdigit():
                raise FormatError(
                    "Only numbers and ranges stand in the brackets of a node list.",
                    where=where,
                    seen=f"{part!r} in {whole!r}",
                    allowed="for example [001-004,007]",
                )
        return items
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise FormatError("The range runs backwards.", where=where, seen=f"{part!r} in {whole!r}")
    if last - first >= MOST_HOSTS:
        raise _too_many_error(where, whole)
    width = len(match[1]) if match[1].startswith("0") else 0
    return [str(number).zfill(width) for number in range(first, last + 1)]


def _too_many_error(where: str, whole: str) -> FormatError:
    return FormatError(
        "The node list has too many nodes.", where=where, seen=repr(whole), allowed=f"at most {MOST_HOSTS}"
    )


def _bracket_error(where: str, whole: str, place: int) -> FormatError:
    return FormatError(
        "The brackets of the node list do not match; it may have been cut short.",
        where=f"{where}, character {place + 1}",
        seen=repr(whole),
        allowed="for example node[001-004,007]",
    )


READER = ClusterReader(
    name="slurm",
    summary="a node list, or a job's SLURM_ variables",
    takes="node list itself (in quotes) or a file that holds it",
    read=read,
    literal=True,
)
