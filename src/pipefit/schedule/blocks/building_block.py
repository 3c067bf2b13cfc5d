"""The building block of a pipeline schedule: the passes of one microbatch, repeated every `interval` slots.

A slot is the time of one F, one I or one W; a fused B takes two. The memory of a schedule is a property of its block: a
stage keeps a microbatch from the start of its F to the end of its W (its lifespan l), so it never holds more than
ceil(l / interval) microbatches, whatever their total. Repeated blocks run without collisions if no two passes of a lane
fall into the same slot modulo the interval (Qi et al. 2024, arXiv 2405.15362, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Kind

LENGTH = {"F": 1, "I": 1, "W": 1, "B": 2}
"""Slots that a pass takes."""


class PassOffset(NamedTuple):
    """One pass of a block."""

    start: int
    "The slot in which it begins for the first microbatch."
    kind: Kind
    stage: int

    @property
    def end_slot(self) -> int:
        """The first slot after it."""
        return self.start + LENGTH[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildingBlock:
    """The passes of one microbatch. Offsets are slots, one per stage."""

    placement: tuple[int, ...]
    "`placement[s]` is the lane that holds stage s: linear, looped, a V, or any other."
    interval: int
    "Slots from one microbatch to the next; the work of the busiest lane in a schedule without bubbles."
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    "Offsets of the I, or of the fused B if there are no weight offsets."
    weight: tuple[int, ...] = ()
    "Offsets of the W; empty if backwards are fused."

    @property
    def num_lanes(self) -> int:
        return max(self.placement) + 1

    def lane_passes(self, lane: int) -> tuple[PassOffset, ...]:
        """Return the passes of a lane by time."""
        passes = []
        for stage, stage_lane in enumerate(self.placement):
            if stage_lane == lane:
                passes.append(PassOffset(self.forward[stage], "F", stage))
                passes.append(PassOffset(self.backward[stage], "I" if self.weight else "B", stage))
                if self.weight:
                    passes.append(PassOffset(self.weight[stage], "W", stage))
        return tuple(sorted(passes))

    @property
    def stage_lifespans(self) -> tuple[int, ...]:
        """For each stage, the slots from the start of F to the end of the last pass that needs the tensors saved by
        F."""
        ends = [w + LENGTH["W"] for w in self.weight] or [b + LENGTH["B"] for b in self.backward]
        return tuple(end - start for end, start in zip(ends, self.forward, strict=True))

    @property
    def peak_bounds(self) -> tuple[int, ...]:
        """For each lane, a bound on the stage-microbatches held at once, for any number of microbatches: the sum of
        ceil(lifespan / interval) over its stages (section 2.2)."""
        stage_bounds = [-(-span // self.interval) for span in self.stage_lifespans]
        return tuple(
            sum(stage_bounds[s] for s, lane in enumerate(self.placement) if lane == i) for i in range(self.num_lanes)
        )

    def slot_claims(self, lane: int) -> tuple[tuple[PassOffset, ...], ...]:
        """Return, for each slot of the interval, the passes of a lane that fall into it; several passes collide."""
        cells: list[list[PassOffset]] = [[] for _ in range(self.interval)]
        for offset in self.lane_passes(lane):
            for slot in range(offset.start, offset.end_slot):
                cells[slot % self.interval].append(offset)
        return tuple(map(tuple, cells))

    def find_collisions(self) -> tuple[tuple[int, int], ...]:
        """Return (lane, slot modulo the interval) of every slot with several passes."""
        return tuple(
            (lane, slot)
            for lane in range(self.num_lanes)
            for slot, claims in enumerate(self.slot_claims(lane))
            if len(claims) > 1
        )


def check_block(block: BuildingBlock) -> None:
    """Raise ScheduleError, with a drawing, if a pass starts before its inputs or if passes collide."""
    for stage in range(len(block.placement)):
        needed = _too_early(block, stage)
        if needed is not None:
            raise ScheduleError(
                f"A pass of stage {stage} starts before its inputs.\n{draw_block(block)}",
                where=f"stage {stage}",
                seen=needed,
            )
    clashes = block.find_collisions()
    if clashes:
        lane, slot = clashes[0]
        claims = " and ".join(f"{o.stage}{o.kind} at {o.start}" for o in block.slot_claims(lane)[slot])
        raise ScheduleError(
            f"Passes of the building block collide: repeated every {block.interval} slots, they claim one slot.\n"
            f"{draw_block(block)}",
            where=f"lane {lane}, slot {slot}",
            seen=claims,
            allowed=f"starts of a lane that differ modulo {block.interval}",
            next_step="move one of them, or lengthen the interval",
        )


def _too_early(block: BuildingBlock, stage: int) -> str | None:
    """Return a text on the first dependency that a stage's passes violate, or None.

    The dependencies: after the previous stage, F before I or B, after the next stage, I before W.
    """
    forward, backward, back = block.forward, block.backward, LENGTH["I" if block.weight else "B"]
    if stage and forward[stage] <= forward[stage - 1]:
        return f"F at {forward[stage]}, the F of stage {stage - 1} at {forward[stage - 1]}"
    if stage + 1 == len(forward) and backward[stage] <= forward[stage]:
        return f"backward at {backward[stage]}, its F at {forward[stage]}"
    if stage + 1 < len(forward) and backward[stage] < backward[stage + 1] + back:
        return f"backward at {backward[stage]}, the backward of stage {stage + 1} at {backward[stage + 1]}"
    if block.weight and block.weight[stage] <= backward[stage]:
        return f"W at {block.weight[stage]}, its I at {backward[stage]}"
    return None


def draw_block(block: BuildingBlock) -> str:
    """Draw the slots modulo the interval, one line per lane, with `>...<` around collisions and an arrow below the
    first."""
    clashes = set(block.find_collisions())
    cells = {
        (lane, slot): _claims_text(claims, (lane, slot) in clashes)
        for lane in range(block.num_lanes)
        for slot, claims in enumerate(block.slot_claims(lane))
    }
    widths = [
        max(len(str(slot)), *(len(cells[lane, slot]) for lane in range(block.num_lanes)))
        for slot in range(block.interval)
    ]
    label = max(len("slot"), len(f"lane {block.num_lanes - 1}"))
    lines = [_join_cells("slot".ljust(label), map(str, range(block.interval)), widths)]
    for lane in range(block.num_lanes):
        row = [cells[lane, slot] for slot in range(block.interval)]
        lines.append(_join_cells(f"lane {lane}".ljust(label), row, widths))
        if clashes and lane == min(clashes)[0]:
            slot = min(clashes)[1]
            lines.append(" " * (label + 1 + sum(w + 1 for w in widths[:slot])) + "^" * len(cells[lane, slot]))
    return "\n".join("  " + line for line in lines)


def describe_block(block: BuildingBlock) -> str:
    """Return the drawing, followed for each lane by the lifespans of its stages and the memory bound that they
    imply."""
    lines = [f"Every {block.interval} slots a microbatch, in these slots modulo {block.interval}:", draw_block(block)]
    lines.append(
        "A stage keeps a microbatch for its lifespan l, so a lane holds at most the sum of ceil(l / interval):"
    )
    for lane, bound in enumerate(block.peak_bounds):
        held = [stage for stage, stage_lane in enumerate(block.placement) if stage_lane == lane]
        spans = " + ".join(f"ceil({block.stage_lifespans[stage]} / {block.interval})" for stage in held)
        lines.append(f"  lane {lane}  stages {', '.join(map(str, held))}: {spans} = {bound}")
    return "\n".join(lines)


def _claims_text(claims: Sequence[PassOffset], clash: bool) -> str:
    text = "|".join(f"{offset.stage}{offset.kind}" for offset in claims) or "."
    return f">{text}<" if clash else text


def _join_cells(label: str, cells: Sequence[str] | map[str], widths: Sequence[int]) -> str:
    return " ".join([label, *(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))]).rstrip()


def place_weights(block: BuildingBlock) -> BuildingBlock:
    """Return the block with every W in the first slot after its I that is free modulo the interval, earlier I's first.

    Takes a block without weight offsets whose backwards are meant as I. Raises ScheduleError if the F and I collide or
    leave no slot free.
    """
    weight = [0] * len(block.placement)
    for lane in range(block.num_lanes):
        held = [stage for stage, stage_lane in enumerate(block.placement) if stage_lane == lane]
        occupied = {start[stage] % block.interval for start in (block.forward, block.backward) for stage in held}
        if len(occupied) != 2 * len(held) or 3 * len(held) > block.interval:
            raise ScheduleError(
                "The F and I of a lane leave no room for its W.",
                where=f"lane {lane}",
                seen=", ".join(f"{s}F at {block.forward[s]}, {s}I at {block.backward[s]}" for s in held),
                allowed=f"starts that differ modulo {block.interval}, and three slots a stage",
            )
        for stage in sorted(held, key=lambda s: block.backward[s]):
            slot = block.backward[stage] + 1
            while slot % block.interval in occupied:
                slot += 1
            occupied.add(slot % block.interval)
            weight[stage] = slot
    return BuildingBlock(
        placement=block.placement,
        interval=block.interval,
        forward=block.forward,
        backward=block.backward,
        weight=tuple(weight),
    )
