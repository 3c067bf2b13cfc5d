"""Tiers of tests: which of them a mode of `bin/test` runs, how much its property tests draw, and in which order.

`all` holds every test. `default` leaves out tests marked `slow` and, of tests marked `few`, all parameters but the
named ones. `quick` takes the short tests of files that cost little, some of every folder.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tests.support.durations import Durations

TIERS = ("quick", "default", "all")

DEFAULT_BUDGET_S = 1080.0
"""Recorded seconds of all tests of the default tier: nine minutes on two cores."""

DEFAULT_LONGEST_S = 15.0
"""The longest test of the default tier; longer ones are marked `slow`, or listed in `LONGER`."""

LONGER: dict[str, str] = {}
"""Longer tests of the default tier, each with the reason why it stays there."""

ONLY_IN_ALL: dict[str, str] = {}
"""Files without a test in the default tier, each with the reason."""

DRAWS_SHARE = 0.25
DRAWS_LEAST = 10
"""Examples of a property test below the tier `all`: this share of its own number, but at least so many."""

QUICK_TEST_S = 0.25
QUICK_FILE_S = 3.0
QUICK_BUDGET_S = 60.0
"""The longest test of the tier `quick`, the most a file may cost there, and what all of them may."""


def folder_of(file: str) -> str:
    """The folder right below `tests/` that a test file is in."""
    parts = file.split("/")
    return parts[1] if len(parts) > 2 else ""


def quick_cost(durations: Durations, file: str) -> float:
    """Seconds of a file's short tests."""
    recorded = durations.of_file(file)
    if recorded is None:
        return QUICK_FILE_S
    return recorded.small_s + sum(seconds for seconds in recorded.listed.values() if seconds <= QUICK_TEST_S)


def choose_quick_files(durations: Durations, files: Iterable[str], budget_s: float = QUICK_BUDGET_S) -> list[str]:
    """Files whose short tests the tier `quick` runs: those that cost least, from all folders in turn."""
    queues: dict[str, list[tuple[float, str]]] = {}
    for file in files:
        cost = quick_cost(durations, file)
        if cost <= QUICK_FILE_S:
            queues.setdefault(folder_of(file), []).append((cost, file))
    for queue in queues.values():
        queue.sort(reverse=True)
    chosen, left_s = [], budget_s
    while queues:
        for folder in sorted(queues):
            cost, file = queues[folder].pop()
            if cost <= left_s:
                chosen.append(file)
                left_s -= cost
            if not queues[folder]:
                del queues[folder]
    return sorted(chosen)


def pick_spread(names: Sequence[str], count: int) -> list[str]:
    """So many of the names, evenly spread, the first among them."""
    count = min(count, len(names))
    return [names[math.floor(k * len(names) / count)] for k in range(count)]


def leave_out(tests: Iterable[tuple[str, bool, tuple[Any, ...] | None]]) -> set[str]:
    """Tests that the default tier leaves out, of (nodeid, whether marked slow, arguments of the mark `few`)."""
    left_out, families = set[str](), dict[str, list[str]]()
    wanted: dict[str, tuple[Any, ...]] = {}
    for nodeid, slow, few in tests:
        if slow:
            left_out.add(nodeid)
        elif few is not None:
            families.setdefault(nodeid.partition("[")[0], []).append(nodeid)
            wanted[nodeid.partition("[")[0]] = few
    for name, nodeids in families.items():
        left_out |= set(nodeids) - set(_keep_few(nodeids, wanted[name]))
    return left_out


def _keep_few(nodeids: Sequence[str], few: tuple[Any, ...]) -> list[str]:
    """Tests that `few(2)` or `few("first", "third")` keeps: names are those of parameters, in brackets after the test.
    For a name that is gone some other test stays."""
    if len(few) == 1 and isinstance(few[0], int):
        return pick_spread(nodeids, few[0])
    kept = [nodeid for nodeid in nodeids if nodeid.partition("[")[2].removesuffix("]") in few]
    others = [nodeid for nodeid in nodeids if nodeid not in kept]
    return kept + pick_spread(others, len(few) - len(kept)) if len(kept) < len(few) else kept


def lower_draws(own: int) -> int:
    """Examples that a property test draws below the tier `all`, where it draws `own` in it."""
    return min(own, max(DRAWS_LEAST, math.ceil(own * DRAWS_SHARE)))


def order_groups(seconds: Mapping[str, float], first: Collection[str], lab: str) -> list[str]:
    """Groups of tests in the order in which processes take them: labs, which hold up everyone; the files that were
    asked for; then what takes longest, so that all processes end at the same time."""
    return sorted(seconds, key=lambda group: (group != lab, group not in first, -seconds[group], group))
