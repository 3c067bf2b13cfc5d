"""Tiers of tests: which of them a mode of `bin/test` runs, how much its property tests draw, and in which order.

`every` holds every test with all of its parameters. `all` holds every test, but only some parameters of those that
take very long with all of them. `default` leaves out more parameters, tests marked `slow`, long tests and most labs.
`quick` takes the short tests of files that cost little, some of every folder.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.support.durations import Durations

TIERS = ("quick", "default", "all", "every")

DEFAULT_BUDGET_S = 750.0
"""Recorded seconds of all tests of the default tier: six minutes and a half on two cores."""

ALL_BUDGET_S = 4500.0
"""Recorded seconds of all tests of the tier `all`, which two cores share."""

FAMILY_S = 0.6
"""Recorded seconds that one test may take in the default tier with all of its parameters; of a test that takes more,
so many parameters run there as fit, evenly spread, and at least one of them."""

ALL_FAMILY_S = 6.0
"""The same for the tier `all`, which continuous integration runs."""

LONGEST_S = 1.5
"""The longest test of the default tier; a file whose tests are all longer keeps its shortest one."""

ALONE_S = 3.0
"""The longest test of the default tier that needs the machine to itself, as labs do: all processes wait for it."""

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


@dataclass(frozen=True)
class Marked:
    """A test with what decides on its tier."""

    nodeid: str
    slow: bool = False
    alone: bool = False
    """Whether it needs the machine to itself."""
    share: float = 1.0
    """The share of its examples that it draws in the default tier."""
    whole_family: bool = False
    """Whether the tier `all` keeps all parameters of the test."""

    @property
    def file(self) -> str:
        """The file that the test is in."""
        return self.nodeid.partition("::")[0]

    @property
    def family(self) -> str:
        """The test without its parameters."""
        return self.nodeid.partition("[")[0]


def cost_by_default(test: Marked, durations: Durations) -> float:
    """Seconds of a test in the default tier. A test that holds up all processes counts for two of them."""
    if test.alone and durations.of_file(test.file) is None:
        return 4.0 * ALONE_S
    return durations.of_test(test.nodeid) * test.share * (2.0 if test.alone else 1.0)


def leave_out(tests: Iterable[Marked], durations: Durations) -> set[str]:
    """Tests that the default tier leaves out: those marked `slow`, parameters beyond the seconds of a family, and long
    tests of files that have shorter ones."""
    tests = list(tests)
    cost = {test.nodeid: cost_by_default(test, durations) for test in tests}
    common = [test for test in tests if not test.slow and not (test.alone and cost[test.nodeid] > 2.0 * ALONE_S)]
    files: dict[str, list[str]] = {}
    for nodeid in spread_parameters(common, cost, FAMILY_S):
        files.setdefault(nodeid.partition("::")[0], []).append(nodeid)
    kept = set[str]()
    for nodeids in files.values():
        short = [nodeid for nodeid in nodeids if cost[nodeid] <= LONGEST_S]
        kept |= set(short or [min(nodeids, key=lambda nodeid: cost[nodeid])])
    return set(cost) - kept


def leave_out_parameters(tests: Iterable[Marked], durations: Durations) -> set[str]:
    """Tests that the tier `all` leaves out: parameters beyond the seconds of a family, of tests without the mark
    `every_parameter`."""
    tests = [test for test in tests if not test.whole_family]
    cost = {test.nodeid: durations.of_test(test.nodeid) for test in tests}
    return set(cost) - set(spread_parameters(tests, cost, ALL_FAMILY_S))


def spread_parameters(tests: Iterable[Marked], cost: Mapping[str, float], limit_s: float) -> list[str]:
    """Tests without the parameters by which a family would take longer than the limit: so many stay as fit, evenly
    spread, and at least one."""
    families: dict[str, list[str]] = {}
    for test in tests:
        families.setdefault(test.family, []).append(test.nodeid)
    chosen = list[str]()
    for nodeids in families.values():
        total_s = sum(cost[nodeid] for nodeid in nodeids)
        count = len(nodeids) if total_s <= limit_s else max(1, int(limit_s * len(nodeids) / total_s))
        chosen.extend(pick_spread(nodeids, count))
    return chosen


def lower_draws(own: int) -> int:
    """Examples that a property test draws below the tier `all`, where it draws `own` in it."""
    return min(own, max(DRAWS_LEAST, math.ceil(own * DRAWS_SHARE)))


def order_groups(seconds: Mapping[str, float], first: Collection[str], lab: str) -> list[str]:
    """Groups of tests in the order in which processes take them: the files that were asked for, then what takes
    longest, so that all processes end at the same time. Labs come last: while others have tests left, a lab waits for
    each of their tests, and they for each lab."""
    return sorted(seconds, key=lambda group: (group == lab, group not in first, -seconds[group], group))
