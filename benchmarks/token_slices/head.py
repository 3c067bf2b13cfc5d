"""The head's logits shrink with the slice: the measured peak of the last stage (`head_memory.py`) as a section
of the proof."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.token_slices.head_memory import LIMIT, head_peaks, print_table
from benchmarks.token_slices.targets import at_most

NEAR = 1.1
"""How far above 1 / s of a whole sequence's peak that of s slices may lie: the head holds more than logits."""


def measure(quick: bool = False) -> dict[str, Any]:
    """The rows of `head_peaks`, and what is asked of the last one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    found = head_peaks(tokens=256, width=32, vocabulary=4096) if quick else head_peaks()
    most = found["rows"][-1]
    worst = max(row["difference"] for row in found["rows"])
    what = f"the head's measured peak with {most['slices']} slices, of that without"
    return found | {
        "targets": [
            at_most(what, most["share"], NEAR / most["slices"]),
            at_most("the head's counted peak against the measured one", worst, LIMIT),
        ]
    }


def show(found: dict[str, Any]) -> None:
    """The table."""
    print_table(found)
