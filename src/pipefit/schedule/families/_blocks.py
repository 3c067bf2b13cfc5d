"""Functions shared by the families made of building blocks: from a block to the schedule of a problem."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Action, Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock
from pipefit.schedule.blocks.passes import Lanes, name_actions, order_slices, repeat_block, squeeze_lanes
from pipefit.schedule.blocks.pull import pull_forward
from pipefit.schedule.blocks.reorder import peak_held, reorder_cool_down, reorder_warm_up, without_weights
from pipefit.schedule.problem import ScheduleProblem, vee_placement

Named = tuple[tuple[Action, ...], ...]


def make_schedule(name: str, problem: ScheduleProblem, lanes: Named) -> Schedule:
    """Build the computed schedule of these lanes."""
    return Schedule(
        name=name,
        placement=problem.placement,
        microbatches=problem.microbatches,
        slices=problem.slices,
        lanes=lanes,
    )


def require_vee(title: str, problem: ScheduleProblem) -> int:
    """Return the number of lanes. Raises ScheduleError unless lane i of d holds stages i and 2d-1-i."""
    if problem.placement != vee_placement(problem.num_lanes):
        raise ScheduleError(
            f"{title} is written for the V placement: lane i of d holds stages i and 2d-1-i.",
            where="placement",
            seen=",".join(map(str, problem.placement)),
            allowed=",".join(map(str, vee_placement(problem.num_lanes))),
            next_step="use gpipe, which takes any placement, or a schedule made for this placement",
        )
    return problem.num_lanes


def block_for_dag(title: str, problem: ScheduleProblem, block: Callable[[int], BuildingBlock]) -> BuildingBlock:
    """Return the block for a DAG with one stage per lane, from the block of a chain of a given length.

    A stage gets the offsets of the chain's stage at the same distance from the end. Raises ScheduleError if a lane
    holds several stages.
    """
    if problem.num_lanes != problem.num_stages:
        crowded = max(range(problem.num_lanes), key=lambda lane: len(problem.lane_stages(lane)))
        raise ScheduleError(
            f"{title} is written for one stage per lane.",
            where="placement",
            seen=f"lane {crowded} holds stages {', '.join(map(str, problem.lane_stages(crowded)))}",
            allowed=f"{problem.num_lanes} stages for {problem.num_lanes} lanes",
            next_step="use gpipe, which takes any placement, or a schedule made for this placement",
        )
    depths = problem.stage_depths()
    of_chain = block(max(depths))
    positions = [max(depths) - depth for depth in depths]
    return BuildingBlock(
        placement=problem.placement,
        interval=of_chain.interval,
        forward=tuple(of_chain.forward[position] for position in positions),
        backward=tuple(of_chain.backward[position] for position in positions),
        weight=tuple(of_chain.weight[position] for position in positions),
    )


@lru_cache(maxsize=64)
def repeat_actions(block: BuildingBlock, microbatches: int, slices: int) -> Named:
    """Return the order of the repeated block as it is."""
    return name_actions(order_slices(repeat_block(block, microbatches * slices), slices, block.interval), slices)


@lru_cache(maxsize=64)
def pull_actions(block: BuildingBlock, microbatches: int, slices: int) -> Named:
    """Return the repeated block with every pass as early as gaps and the block's peak allow."""
    lanes = pull_forward(repeat_block(block, microbatches * slices), block.placement)
    return actions_by_slice(lanes, block.placement, slices, block.interval)


@lru_cache(maxsize=64)
def control_actions(block: BuildingBlock, microbatches: int, slices: int) -> Named:
    """Return the repeated V block with its warm-up and cool-down reordered within its own peak."""
    units = microbatches * slices
    lanes = squeeze_lanes(repeat_block(block, units), block.placement)
    lanes = reorder_warm_up(lanes, max(map(peak_held, lanes)))
    if 2 * units <= max(map(peak_held, repeat_block(block, 2 * block.num_lanes))):
        lanes = squeeze_lanes(without_weights(lanes), block.placement)
    lanes = reorder_cool_down(lanes, max(map(peak_held, lanes)))
    return actions_by_slice(lanes, block.placement, slices, block.interval)


def actions_in_order(lanes: Lanes, placement: tuple[int, ...], slices: int) -> Named:
    """Return the actions of lanes with two stages each, given as an order of units without times."""
    return actions_by_slice(squeeze_lanes(lanes, placement) if slices > 1 else lanes, placement, slices, interval=6)


def actions_by_slice(lanes: Lanes, placement: tuple[int, ...], slices: int, interval: int) -> Named:
    """Return the actions of lanes with two stages each that are in time, backwards by descending slice.

    Passes that slices delay are pulled forward again as far as the memory allows.
    """
    if slices > 1:
        lanes = pull_forward(order_slices(lanes, slices, interval), placement, slices)
    return name_actions(lanes, slices)
