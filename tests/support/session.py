"""A run of pytest in one tier: the tests it keeps, in which order, and how much they draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.support import tiers
from tests.support.durations import read_durations

LAB = "lab"
"""Labs are made of what a machine has once, its network namespaces and the time of its cores: one after the other."""

COLLECTED = pytest.StashKey[dict[str, float | None]]()
"""Tests that were collected before a tier left some out, and their seconds in the default tier; None: not in it."""

CONTINUOUS = pytest.StashKey[float]()
"""Recorded seconds of the collected tests in the tier `all`, which continuous integration runs."""


def together(nodeid: str) -> str:
    """What one process runs from end to end: a file, whose tests share its fixtures; all that make a lab."""
    file = nodeid.partition("::")[0]
    return LAB if "/lab/" in file else file


def arrange_items(config: pytest.Config, items: list[pytest.Item], root: Path) -> None:
    """Leave out what the tier leaves out, draw less in its property tests, and put what takes longest first."""
    tier, recorded = config.getoption("tier"), read_durations(root)
    marked = [_read_marks(item) for item in items]
    left_out = tiers.leave_out(marked, recorded)
    cost = {test.nodeid: tiers.cost_by_default(test, recorded) for test in marked}
    config.stash[COLLECTED] = {nodeid: None if nodeid in left_out else seconds for nodeid, seconds in cost.items()}
    few = tiers.leave_out_parameters(marked, recorded) & left_out
    config.stash[CONTINUOUS] = sum(
        recorded.of_test(test.nodeid) * (2.0 if test.alone else 1.0) for test in marked if test.nodeid not in few
    )
    if tier == "every":
        left_out = set()
    elif tier == "all":
        left_out = few
    elif tier == "quick":
        left_out |= {item.nodeid for item in items if recorded.of_test(item.nodeid) > tiers.QUICK_TEST_S}
    files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]
    seconds: dict[str, float] = {}
    for item in items:
        group = together(item.nodeid)
        seconds[group] = seconds.get(group, 0.0) + recorded.of_test(item.nodeid)
        if tier in ("quick", "default"):
            draw_less(item)
    first = {together(file) for file in files[: config.getoption("own_first")]}
    rank = {group: k for k, group in enumerate(tiers.order_groups(seconds, first, LAB))}
    items.sort(key=lambda item: rank[together(item.nodeid)])


def _read_marks(item: pytest.Item) -> tiers.Marked:
    """What decides on the tier of a test."""
    own = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
    share = tiers.lower_draws(own.max_examples) / own.max_examples if own is not None else 1.0
    slow, alone, whole = (item.get_closest_marker(name) is not None for name in ("slow", "netns", "every_parameter"))
    return tiers.Marked(item.nodeid, slow, alone, share, whole)


def draw_less(item: Any) -> None:
    """Lower the number of examples of a property test; `all` and `every` draw the number that the test names."""
    test = getattr(item, "obj", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None:
        less = settings(own, max_examples=tiers.lower_draws(own.max_examples))
        getattr(test, "__func__", test)._hypothesis_internal_use_settings = less
