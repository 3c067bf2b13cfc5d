"""The work that the search for device groups may spend. It counts devices, layouts and actions, never seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBudget:
    """Budgets of the search for device groups (`plan/passes/device_groups/`)."""

    exhaustive_devices: int = 8
    "Devices up to which every cut of a row of them is tried, and more programs are searched."
    host_orders: int = 24
    "Host orders that are tried."
    widest_group_devices: int = 64
    "Devices up to which all of them form one group."
    block_devices: tuple[int, ...] = (2, 4, 8, 16)
    "Sizes of groups inside hosts on many devices."
    block_lanes: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
    "Numbers of lanes of blocks on many devices."
    lane_orders: int = 4
    "Maximum number of other lane orders of a layout."
    examined_lane_orders: int = 120
    "Maximum number of lane orders that are examined for these."
    programs: int = 24
    "Maximum number of distinct groups or requests whose programs are searched, up to `exhaustive_devices`."
    programs_on_many: int = 4
    "The same on more devices."
    ratio_discount: float = 0.95
    "A group's ratio of program cost to lower bound, times this, is assumed for its other rows and microbatches."
    layouts: int = 12
    "Layouts that are cut and simulated."
    simulated_actions: int = 6_000
    "Simulated actions after which no further layout is simulated."
    infeasible_factor: int = 4
    "`simulated_actions` is multiplied by this as long as nothing fits."
    fitted_layouts: int = 2
    "Layouts that get the orders of other families and fitted ones; one more if its lanes were reordered."
    sliced_layouts: int = 2
    "Layouts that get slices: those with the smallest step time excluding the pipeline bubble."
    slicing_devices: int = 128
    "On more devices than this groups get no slices: every evaluation costs more."


GROUP_BUDGET = GroupBudget()
