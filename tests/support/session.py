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

COLLECTED = pytest.StashKey[list[tuple[str, bool]]]()
"""Tests that were collected before a tier left some out: (nodeid, whether it is in the default tier)."""


def together(nodeid: str) -> str:
    """What one process runs from end to end: a file, whose tests share its fixtures; all that make a lab."""
    file = nodeid.partition("::")[0]
    return LAB if file.startswith("tests/lab/") else file


def arrange_items(config: pytest.Config, items: list[pytest.Item], root: Path) -> None:
    """Leave out what the tier leaves out, draw less in its property tests, and put what takes longest first."""
    tier, recorded = config.getoption("tier"), read_durations(root)
    marks = [(item.nodeid, item.get_closest_marker("slow"), item.get_closest_marker("few")) for item in items]
    left_out = tiers.leave_out((nodeid, slow is not None, few.args if few else None) for nodeid, slow, few in marks)
    config.stash[COLLECTED] = [(item.nodeid, item.nodeid not in left_out) for item in items]
    if tier == "all":
        left_out = set()
    elif tier == "quick":
        left_out |= {item.nodeid for item in items if recorded.of_test(item.nodeid) > tiers.QUICK_TEST_S}
    files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]
    seconds: dict[str, float] = {}
    for item in items:
        group = together(item.nodeid)
        seconds[group] = seconds.get(group, 0.0) + recorded.of_test(item.nodeid)
        if tier != "all":
            draw_less(item)
    first = {together(file) for file in files[: config.getoption("own_first")]}
    rank = {group: k for k, group in enumerate(tiers.order_groups(seconds, first, LAB))}
    items.sort(key=lambda item: rank[together(item.nodeid)])


def draw_less(item: Any) -> None:
    """Lower the number of examples of a property test; the tier `all` draws the number that the test names."""
    test = getattr(item, "obj", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None:
        less = settings(own, max_examples=tiers.lower_draws(own.max_examples))
        getattr(test, "__func__", test)._hypothesis_internal_use_settings = less
