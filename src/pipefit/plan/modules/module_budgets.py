"""The work that the search over several modules may spend. It counts layouts and actions, never seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisionBudget:
    """Budgets of the closed form that divides devices among modules."""

    step_slack: float = 0.15
    "A layout stays on the short list if its step is at most this fraction longer than the best."
    bound_ranges: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, float("inf"))
    "Fractions above the bound within which layouts are searched, one after the other."
    combined_layouts: int = 1 << 16
    "Layouts of two modules that are combined at once."
    compared_layouts: int = 512
    "Layouts of one module that are compared with each other at once."
    compared_stage_counts: int = 3
    "Smaller counts of stages that a count is compared with."
    every_replica_count: int = 8
    "Replicas up to which every count is considered."
    slower_sharing_layouts: int = 12
    "Length of the short list for a choice of sharing modules that is slower than another one."
    inline_layouts: int = 16
    "Inline layouts returned by each of three measures (`inline.py`)."
    equal_inline_layouts: int = 2
    "Of these, the maximum for the same grid and stages of the backbone in the third measure."
    free_inline_devices: int = 64
    """Devices up to which every inline module chooses its shards and recomputation freely. On more, all modules but the
    backbone have the same shards, and the same recomputation if all modules have the choice."""
    cached_loads: int = 1 << 22
    "Maximum number of cached values of filled bins: 32 MiB."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSearchBudget:
    """Budgets of the simulations (`search.py`, `trials.py`, `polish.py`)."""

    layouts: int = 60
    "Maximum number of layouts of the short list that are simulated."
    total_actions: int = 120_000
    "Maximum number of actions of these layouts together."
    layouts_per_sharing: int = 12
    "Minimum number of simulated layouts for every choice of modules that share devices."
    reordered_layouts: int = 12
    "Layouts that are also simulated with the orders of other families."
    settled_plans: int = 4
    "Plans that fit on every sampled batch."
    settling_trials: int = 24
    "Plans tried for these, or more until one fits."
    plans_per_placement: int = 2
    "Minimum number of the best plans with separate devices, with guests, and with inline modules."
    short_lists: int = 6
    """Number of times the short list is computed, each time with more memory reserved, if none of it fits in one of the
    placements."""
    reserved_fraction: float = 0.02
    "Smallest fraction of the memory reserved then."
    misfits: int = 20
    "Layouts that do not fit before the search gives up."
    misfits_per_placement: int = 5
    "The same for a placement if another one has layouts that fit."
    polished_actions: int = 4_000
    "Actions of a layout up to which its neighbours are simulated as well."
    polishing_rounds: int = 8
    "Moves to a faster neighbour."
    divided_devices: int = 32
    """Maximum number of devices over which images are divided: any two may meet in some step, and NCCL has a
    communicator for each pair."""


DIVISION_BUDGET = DivisionBudget()
MODULE_SEARCH_BUDGET = ModuleSearchBudget()
