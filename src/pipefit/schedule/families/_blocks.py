"""What the families made of building blocks share: from a block to the schedule of a problem."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Action, Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock
from pipefit.schedule.blocks.passes import Lanes, actions, order_slices, repeat, squeeze
from pipefit.schedule.blocks.pull import pull_forward
from pipefit.schedule.blocks.reorder import peak, reorder_cool_down, reorder_warm_up, without_weights
from pipefit.schedule.problem import Problem, vee

Named = tuple[tuple[Action, ...], ...]


def schedule(name: str, problem: Problem, lanes: Named) -> Schedule:
    """The computed schedule of these lanes."""
    return Schedule(
        name=name,
        placement=problem.placement,
        microbatches=problem.microbatches,
        slices=problem.slices,
        lanes=lanes,
    )


def require_vee(title: str, problem: Problem) -> int:
    """The number of lanes. Raises ScheduleError unless lane i of d holds stages i and 2d-1-i."""
    if problem.placement != vee(problem.lanes):
        raise ScheduleError(
            f"{title} is written for the V placement: lane i of d holds stages i and 2d-1-i.",
            where="placement",
            seen=",".join(map(str, problem.placement)),
            allowed=",".join(map(str, vee(problem.lanes))),
            next_step="use gpipe, which takes any placement, or a schedule made for this placement",
        )
    return problem.lanes


def in_positions(title: str, problem: Problem, block: Callable[[int], BuildingBlock]) -> BuildingBlock:
    """The block of a chain, given by its length, for a DAG with one stage per lane: a stage stands where its distance
    from the end puts it. Raises ScheduleError where a lane holds several stages."""
    if problem.lanes != problem.stages:
        crowded = max(range(problem.lanes), key=lambda lane: len(problem.held(lane)))
        raise ScheduleError(
            f"{title} is written for one stage per lane.",
            where="placement",
            seen=f"lane {crowded} holds stages {', '.join(map(str, problem.held(crowded)))}",
            allowed=f"{problem.lanes} stages for {problem.lanes} lanes",
            next_step="use gpipe, which takes any placement, or a schedule made for this placement",
        )
    depths = problem.depths()
    of_chain = block(max(depths))
    places = [max(depths) - depth for depth in depths]
    return BuildingBlock(
        placement=problem.placement,
        interval=of_chain.interval,
        forward=tuple(of_chain.forward[place] for place in places),
        backward=tuple(of_chain.backward[place] for place in places),
        weight=tuple(of_chain.weight[place] for place in places),
    )


@lru_cache(maxsize=64)
def repeated(block: BuildingBlock, microbatches: int, slices: int) -> Named:
    """The order of the repeated block as it is."""
    return actions(order_slices(repeat(block, microbatches * slices), slices, block.interval), slices)


@lru_cache(maxsize=64)
def pulled(block: BuildingBlock, microbatches: int, slices: int) -> Named:
    """The repeated block with every pass as early as gaps and the block's peak allow."""
    lanes = pull_forward(repeat(block, microbatches * slices), block.placement)
    return sliced(lanes, block.placement, slices, block.interval)


@lru_cache(maxsize=64)
def controlled(block: BuildingBlock, microbatches: int, slices: int) -> Named:
    """The repeated V block with its warm-up and cool-down reordered within its own peak."""
    units = microbatches * slices
    lanes = squeeze(repeat(block, units), block.placement)
    lanes = reorder_warm_up(lanes, max(map(peak, lanes)))
    if 2 * units <= max(map(peak, repeat(block, 2 * block.lanes))):
        lanes = squeeze(without_weights(lanes), block.placement)
    lanes = reorder_cool_down(lanes, max(map(peak, lanes)))
    return sliced(lanes, block.placement, slices, block.interval)


def written(lanes: Lanes, placement: tuple[int, ...], slices: int) -> Named:
    """The actions of lanes with two stages each that were written as an order of units, without times."""
    return sliced(squeeze(lanes, placement) if slices > 1 else lanes, placement, slices, interval=6)


def sliced(lanes: Lanes, placement: tuple[int, ...], slices: int, interval: int) -> Named:
    """The actions of lanes with two stages each that are in time, backwards by descending slice. What slices delay is
    pulled forward again as far as the memory allows."""
    if slices > 1:
        lanes = pull_forward(order_slices(lanes, slices, interval), placement, slices)
    return actions(lanes, slices)
