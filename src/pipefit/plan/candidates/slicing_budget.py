"""The slicings that a layout search may consider. Limits count grids, slices and actions, never seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicingBudget:
    """Budgets of sliced candidates (`sliced_grids.py`, `slicings.py`)."""

    order_actions: int = 12_000
    """Largest number of actions of an order with slices. Longer orders take too long to evaluate, and more slices gain
    little."""
    least_tiles: int = 8
    "Minimum tiles of a slice before tiles are halved: rounding to larger tiles would cost more than they save."
    costed_lengths: int = 8
    "Slice lengths at which layers are costed for equal-cost cuts, at the start and at the end of the sequence."
    positions: int = 256
    "Largest number of positions at which a search cuts a sequence; a longer one uses coarser multiples."
    grids: int = 192
    "Maximum number of grids for which sliced candidates are built."
    least_grids: int = 12
    "The same on the largest clusters, which have thousands of grids."
    slicings: int = 512
    "Maximum number of slicings costed layer by layer."
    least_slicings: int = 32
    "The same on the largest clusters."
    ranked_slices: int = 8
    "Number of slices assumed when grids are ranked."


SLICING_BUDGET = SlicingBudget()
