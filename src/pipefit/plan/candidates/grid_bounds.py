"""Lower bounds and estimates for all candidates of a grid at once, before any cut.

A cut gives every layer to a lane. For any cut, the busiest lane's time T is at least sum_s u_s t_s(l) over all layers l
and any weights u of the lanes that add up to one, hence at least sum_l min_s u_s t_s(l) (the dual of the linear program
that lets layers be divided). With u in proportion to the lanes' speeds this is the time of an even cut, for lanes of
one kind and of several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipefit.cost.portable import whole_power
from pipefit.cost.types import Array
from pipefit.cost.work import COMPLETE_STATE, StageWork, StateShare, state_share
from pipefit.model.analysis.saved import Recompute
from pipefit.optimizers.sharded_state import shards_gradients
from pipefit.plan.bounds.estimates import OVER, WEIGHT_SHARE, peak_in_flight
from pipefit.plan.bounds.sliced_bounds import first_share_bound_s
from pipefit.plan.bounds.step_bounds import min_in_flight
from pipefit.plan.candidates.grid import CandidateGrid
from pipefit.plan.candidates.grid_figures import BoundsStack, GridBounds, LayerBounds, fill_lanes, stack_bounds
from pipefit.plan.candidates.slicings import SequenceSlicer
from pipefit.plan.candidates.traffic_bounds import NO_TRAFFIC, ModuleTraffic, TrafficBounds, hidden_s
from pipefit.plan.cutting.cutter import LayerCutter, ShardProgram
from pipefit.plan.cutting.rows import LayerRow
from pipefit.plan.devices.fleet import KindRows, KindRuns, pairs_of
from pipefit.plan.request.constraints import NO_CONSTRAINTS
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.expert_parts import program_row_parts
from pipefit.plan.types import Job
from pipefit.schedule.families import family_facts

Class = tuple[LayerRow, ...]
"""Layer costs of the stages of a lane. Lanes of one class are alike."""


class LowerBounds:
    """Lower bounds of the grids of one search."""

    def __init__(self, cutter: LayerCutter, job: Job, slicer: SequenceSlicer | None = None) -> None:
        self.cutter = cutter
        self.job = job
        self.slicer = slicer or SequenceSlicer(cutter, job, NO_CONSTRAINTS)
        self._known: dict[tuple[tuple[int, ...], ...], LayerBounds] = {}
        self._stacks: dict[object, BoundsStack] = {}
        self._statics: dict[tuple[StateShare, ShardProgram], Array] = {}
        self._counted: dict[object, tuple[CandidateGrid, Mapping[KindRuns, int]]] = {}
        "Number of lanes by their kinds of replicas; the grid is kept so that the `id` in the key stays unique."
        self._counts: dict[int, tuple[CandidateGrid, object]] = {}
        "`id` of a grid's counts -> a key by which counts are compared; the grid is kept so that the `id` stays unique."
        self._flights: dict[object, Array] = {}
        self.traffic = TrafficBounds(cutter, job)
        self._traffic: dict[object, tuple[CandidateGrid, list[list[ModuleTraffic]]]] = {}
        "Collectives by the layout of a grid; the grid is kept so that the `id` in the key stays unique."
        self._near: dict[tuple[frozenset[KindRows], Recompute, ShardProgram], LayerRow] = {}
        self._sliced: dict[tuple[int, int, tuple[int, ...]], tuple[StageWork, LayerRow]] = {}
        "Rows of slices; the stage is kept alive because the key holds its `id`."
        self._shares: dict[int, float] = {}
        "`id` of a sliced row -> the smallest part of a layer's time that its first slice takes."

    def bound_grid(self, grid: CandidateGrid) -> GridBounds:
        """Return the bounds of all candidates of a grid."""
        stack, lanes = self._lane_stack(grid)
        return self._bound_stack([grid], stack, [lanes])

    def bound_batches(self, space: Sequence[CandidateGrid]) -> Iterator[tuple[list[int], GridBounds]]:
        """Yield (indices in `space`, bounds) of grids that differ only in their lanes."""
        stacks = [self._lane_stack(grid) for grid in space]
        alike: dict[object, list[int]] = {}
        for index, (grid, (stack, _)) in enumerate(zip(space, stacks, strict=True)):
            state = grid.sharded_state, grid.state_group
            key = (id(stack), grid.names, grid.inner, state, grid.slices, grid.program)
            alike.setdefault(key, []).append(index)
        for places in alike.values():
            lanes = [stacks[index][1] for index in places]
            yield places, self._bound_stack([space[index] for index in places], stacks[places[0]][0], lanes)

    def _bound_stack(self, grids: Sequence[CandidateGrid], stack: BoundsStack, lanes: Sequence[Array]) -> GridBounds:
        """Return the bounds of grids with one stack. `lanes` holds each grid's number of lanes of every class."""
        grid, lane_counts = grids[0], np.array(lanes)
        speeds = np.zeros((len(stack.rates), len(lane_counts), *stack.rates.shape[2:]))
        for number in range(lane_counts.shape[1]):
            speeds += stack.rates[:, number][:, None] * lane_counts[:, number][:, None, None]
        lane_s, forward, backward = stack.even[:, None] / speeds
        static = [
            [
                [
                    self._layer_static_bytes(state_share(state, (1,) * grid.state_group or shares * grid.context), grid)
                    for state in grid.sharded_state
                ]
            ]
            for _, shares in grid.counts
        ]
        return GridBounds(
            grids=tuple(grids),
            stack=stack,
            lane_s=lane_s,
            lane_forward_s=forward,
            lane_backward_s=backward,
            layer_static_bytes=np.array(static),
            lanes=lane_counts,
            turns=np.array([grid.stages_per_lane for grid in grids], dtype=float)[:, None, None],
            count=np.array([count for count, _ in grid.counts], dtype=float)[:, None],
            slices=np.array([len(cut) for cut in grid.slices] or [1] * len(grid.counts), dtype=float)[:, None],
        )

    def _lane_stack(self, grid: CandidateGrid) -> tuple[BoundsStack, Array]:
        """Return the stack of a grid, and its number of lanes of every class."""
        in_hosts = self.cutter.fleet.fills_hosts(grid.shard_devices)
        if not in_hosts or any(len(recompute) > 1 for recompute in grid.recompute):
            floors, lanes = self._bounds_per_stage(grid)
            return stack_bounds(floors), lanes
        counted = self._lanes_by_runs(grid)
        key = (grid.recompute, tuple(counted), self._counts_key(grid), grid.slices, grid.program)
        if key not in self._stacks:
            rows_by_count = [self.cutter.rows_of(self.job, count, shares) for count, shares in grid.counts]
            even = all(max(shares) == 1 for _, shares in grid.counts)
            floors = [
                [
                    self._class_bounds(
                        [(self._layer_row(runs, rows, recompute[0], even, grid.program, cut),) for runs in counted]
                    )
                    for recompute in grid.recompute
                ]
                for rows, cut in zip(rows_by_count, grid.slices or [()] * len(rows_by_count), strict=True)
            ]
            self._stacks[key] = stack_bounds(floors)
        return self._stacks[key], np.array([*counted.values()], dtype=float)

    def _lanes_by_runs(self, grid: CandidateGrid) -> Mapping[KindRuns, int]:
        """Return the number of lanes with each combination of kinds of replicas."""
        key: object = (
            id(grid.runs)
            if grid.pattern is not None
            else (grid.lanes, grid.replica_count, grid.inner[0], grid.shard_devices)
        )
        if key not in self._counted:
            self._counted[key] = grid, Counter(grid.lane_runs())
        return self._counted[key][1]

    def _counts_key(self, grid: CandidateGrid) -> object:
        """Return a key that is equal for equal counts; cheaper to compare than the shares of a thousand replicas."""
        if id(grid.counts) not in self._counts:
            even = all(max(shares) == 1 for _, shares in grid.counts)
            key = (grid.replica_count, tuple(count for count, _ in grid.counts)) if even else grid.counts
            self._counts[id(grid.counts)] = grid, key
        return self._counts[id(grid.counts)][1]

    def _layer_row(
        self,
        runs: KindRuns,
        rows: tuple[int, ...],
        recompute: Recompute,
        even: bool,
        program: ShardProgram,
        slices: tuple[int, ...] = (),
    ) -> LayerRow:
        pairs = pairs_of(runs, rows)
        if slices:
            stage = self.slicer.stage_work(pairs, recompute, program)
            return self._slice_row(
                self.cutter.layer_row(self.job, pairs, recompute, COMPLETE_STATE, program), stage, slices
            )
        if even or program_row_parts(*program) > 1:
            # Rows between powers of two need not divide among these parts.
            return self.cutter.layer_row(self.job, pairs, recompute, COMPLETE_STATE, program)
        key = (pairs, recompute, program)
        if key not in self._near:
            self._near[key] = self.cutter.interpolated_row(self.job, *key)
        return self._near[key]

    def _slice_row(self, row: LayerRow, stage: StageWork, slices: tuple[int, ...]) -> LayerRow:
        """Return the row with the summed times of all slices of its layers. `row` holds the costs of `stage`."""
        key = (id(row), id(stage), slices)
        if key not in self._sliced:
            sliced_row = self.slicer.rows.slice_row(stage, slices, self.job.precision)
            times = {"forward_s": sliced_row.forward_s.sum(axis=0), "backward_s": sliced_row.backward_s.sum(axis=0)}
            self._sliced[key] = (stage, replace(row, **times))
            self._shares[id(self._sliced[key][1])] = sliced_row.first_share
        return self._sliced[key][1]

    def bound_s(self, floor: GridBounds) -> Array:
        """Return a lower bound of every candidate's step over all cuts: [grid, microbatches, recomputation].

        With fused backwards the slowest stage has at least its equal part of the forwards, and of the backwards. With
        one stage a lane as well, all lanes alike and W being the sum, the largest of prefix + m w over the stages is
        least where all are equal, which gives T = W / (1 - (1 - 1/m)^lanes).
        """
        stack, count, depth = floor.stack, floor.count, floor.lane_count
        least: Array = count * np.maximum(floor.lane_s, stack.largest_s)
        if not floor.is_fused:
            return least
        total, single = stack.forward_s + stack.backward_s, floor.turns == 1
        if floor.grids[0].slices:
            if floor.is_uniform and single.any():
                shared_s = first_share_bound_s(total, stack.first_share, count, depth)
                least = np.where(single, np.maximum(least, shared_s), least)
            return least
        fused_s = total + (count - 1) * np.maximum(floor.lane_forward_s, floor.lane_backward_s) / floor.turns
        least = np.maximum(least, fused_s)
        if floor.is_uniform and single.any():
            least = np.where(single, np.maximum(least, total / (1 - whole_power(1 - 1 / count, depth))), least)
        return least

    def memory_fractions(self, grid: CandidateGrid) -> Array:
        """Return the memory of all layers divided by the memory of all lanes: [schedule, microbatches, recomputation,
        sharded state].

        Layers are assumed to be divided evenly, with every lane as full as the fullest.
        """
        floor = self.bound_grid(grid)
        fractions: Array = self._memory_demand(floor)[0] / float(floor.memory_bytes[0])
        return fractions

    def memory_need(self, floor: GridBounds) -> Array | None:
        """Return a lower bound of the memory of any cut, as a fraction of the memory of the lanes, for each candidate.

        A cut with a fraction above 1 does not exist. The shape is [grid, schedule, microbatches, recomputation, sharded
        state]. A lane of one stage holds its `in_flight` microbatches, and a stage of any lane at least one. With
        weights u of the lanes, the sum over the layers of the least u_l (static + held_l saved) is at most the sum of
        u_l times the limits; u is the inverse of the need of all layers on the lane. None for lanes of several
        classes and for slices.
        """
        if not floor.is_uniform or floor.grids[0].slices:
            return None
        static, saved = floor.layer_static_bytes, floor.stack.layer_saved_bytes[:, :, None]
        limit = float(floor.stack.limit_bytes[0])
        fractions = []
        for grid in floor.grids:
            by_schedule = []
            for name in grid.names:
                held = self._lanes_held(name, grid)[..., None, None, None]
                lane_bytes = static.sum(axis=-1) + held[..., 0] * saved.sum(axis=-1)
                capacity = limit * (1.0 / lane_bytes).sum(axis=0)
                ends = [held.min(axis=0), held.max(axis=0)]
                parts = [(static + end * saved) / (static + end * saved).sum(axis=-1, keepdims=True) for end in ends]
                by_schedule.append(np.minimum(*parts).sum(axis=-1) / capacity)
            fractions.append(np.stack(by_schedule))
        return np.stack(fractions)

    def _lanes_held(self, name: str, grid: CandidateGrid) -> Array:
        """Return [lane, microbatches]: the microbatches that a lane certainly holds of each of its stages."""
        if grid.stages_per_lane > 1:
            return np.ones((grid.lanes, len(grid.counts)))
        counts = tuple(count for count, _ in grid.counts)
        key = (name, grid.placement, counts)
        if key not in self._flights:
            self._flights[key] = np.array([min_in_flight(name, grid.placement, m) for m in counts], dtype=float).T
        return self._flights[key]

    def guesses_s(self, floor: GridBounds) -> Array:
        """Return estimates of the steps (`plan/bounds/estimates.py`): [grid, schedule, microbatches, recomputation,
        sharded state, inner]."""
        parts = floor.turns * floor.slices
        w = np.minimum(WEIGHT_SHARE * floor.lane_backward_s, floor.lane_forward_s) / parts
        f, i = floor.lane_forward_s / parts, floor.lane_backward_s / parts - w
        held = self._held_microbatches(floor)
        idle = [
            family_facts(name).idle_s(floor.lane_count, held[:, which], f, i, w)
            for which, name in enumerate(floor.grids[0].names)
        ]
        filled_s, lack = fill_lanes(floor, self._memory_demand(floor))
        more_s = self._lane_state_s(floor) - (floor.lane_forward_s + floor.lane_backward_s)[..., None, None]
        spent_s = floor.count[..., None, None] * (filled_s[..., None] + more_s[:, None])
        guess: Array = (spent_s + np.stack(idle, axis=1)[..., None, None]) * (1 + OVER * lack[..., None])
        return guess

    def state_bounds_s(self, floor: GridBounds) -> Array:
        """Return `bound_s` with the collectives of ZeRO-2 and ZeRO-3: [grid, microbatches, recomputation, sharded
        state, inner].

        All lanes together compute all layers and run all of these collectives, of which they hide at most all of the
        shorter part. The busiest lane has an equal part. Lanes of several classes keep `bound_s`.
        """
        least = self.bound_s(floor)[..., None, None]
        if not floor.is_uniform:
            return np.broadcast_to(least, (*least.shape[:3], *floor.grids[0].grid_shape[2:]))
        return np.maximum(least, floor.count[..., None, None] * self._lane_state_s(floor))

    def _lane_state_s(self, floor: GridBounds) -> Array:
        """Return the seconds of the busiest lane per microbatch with an equal part of the collectives of ZeRO-2 and
        ZeRO-3, which every slice repeats; axes as in `state_bounds_s`."""
        figures = np.array([self._panel_traffic(grid) for grid in floor.grids])[:, None, None]
        lanes, slices = floor.lane_count[..., None, None], floor.slices[..., None, None]
        gather_s, reduce_s, overlap = np.moveaxis(figures, -1, 0)
        gather_s, reduce_s = gather_s / lanes * slices, reduce_s / lanes * slices
        forward_s, backward_s = floor.lane_forward_s[..., None, None], floor.lane_backward_s[..., None, None]
        spent_s: Array = hidden_s(forward_s, gather_s, overlap) + hidden_s(backward_s, gather_s + reduce_s, overlap)
        return spent_s

    def _panel_traffic(self, grid: CandidateGrid) -> list[list[ModuleTraffic]]:
        """Return the collectives of the candidates of a grid: [sharded state][inner]."""
        if not any(map(shards_gradients, grid.sharded_state)):
            return [[NO_TRAFFIC] * len(grid.inner)] * len(grid.sharded_state)
        pattern, program = None if grid.pattern is None else id(grid), grid.program
        layout = grid.replica_count, grid.context, grid.state_group, grid.lanes
        key = layout, program, grid.inner, grid.sharded_state, pattern
        if key not in self._traffic:
            layouts = [grid.decisions_at(inner) for inner in range(len(grid.inner))]
            traffic = [
                [self.traffic.module_traffic(replace(decisions, sharded_state=state)) for decisions in layouts]
                for state in grid.sharded_state
            ]
            self._traffic[key] = grid, traffic
        return self._traffic[key][1]

    def _memory_demand(self, floor: GridBounds) -> Array:
        """Return the bytes of all layers, with every lane as full as the fullest.

        The shape is [grid, schedule, microbatches, recomputation, sharded state].
        """
        saved_bytes = self._held_microbatches(floor) * (floor.stack.saved_bytes / (floor.turns * floor.slices))[:, None]
        demand_bytes: Array = floor.static_bytes + saved_bytes[..., None]
        return demand_bytes

    def _held_microbatches(self, floor: GridBounds) -> Array:
        """Return the microbatches (or slices) of a stage held on the fullest lane: [grid, schedule, microbatches,
        1]."""
        return np.stack([self._in_flight_of(grid) for grid in floor.grids])

    def _in_flight_of(self, grid: CandidateGrid) -> Array:
        key = (grid.names, grid.placement, grid.unit_counts)
        if key not in self._flights:
            held = [
                [peak_in_flight(name, grid.placement, unit_count) for unit_count in grid.unit_counts]
                for name in grid.names
            ]
            self._flights[key] = np.array(held, dtype=float)[:, :, None]
        return self._flights[key]

    def _bounds_per_stage(self, grid: CandidateGrid) -> tuple[list[list[LayerBounds]], Array]:
        """Return the bounds of a grid whose stages differ in more than kinds, from the rows of every stage.

        Lanes are of one class if they are alike in all candidates of the grid.
        """
        classes_by_count = [
            [
                self._lane_classes(
                    grid.decisions_at(int(np.ravel_multi_index((which, recompute_index, 0, 0), grid.grid_shape)))
                )
                for recompute_index in range(len(grid.recompute))
            ]
            for which in range(len(grid.counts))
        ]
        members: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for lane in range(len(classes_by_count[0][0])):
            alike = tuple(tuple(map(id, lane_classes[lane])) for line in classes_by_count for lane_classes in line)
            members.setdefault(alike, []).append(lane)
        floors = [
            [self._class_bounds([lane_classes[same[0]] for same in members.values()]) for lane_classes in line]
            for line in classes_by_count
        ]
        return floors, np.array([len(same) for same in members.values()], dtype=float)

    def _lane_classes(self, decisions: ParallelConfig) -> list[Class]:
        """Return the layer costs of the stages of every lane of a candidate, each row once."""
        held: dict[int, dict[int, LayerRow]] = {}
        rows = self.cutter.stage_rows(self.job, decisions)
        if decisions.slices:
            stages = self.slicer.stages_of(decisions)
            rows = [self._slice_row(row, stage, decisions.slices) for row, stage in zip(rows, stages, strict=True)]
        for row, lane in zip(rows, decisions.lane_of_stage, strict=True):
            held.setdefault(lane, {})[id(row)] = row
        return [tuple(held[lane][key] for key in sorted(held[lane])) for lane in sorted(held)]

    def _class_bounds(self, classes: Sequence[Class]) -> LayerBounds:
        key = tuple(tuple(map(id, lane_class)) for lane_class in classes)
        if key not in self._known:
            forward = np.stack([np.minimum.reduce([row.forward_s for row in lane_class]) for lane_class in classes])
            backward = np.stack([np.minimum.reduce([row.backward_s for row in lane_class]) for lane_class in classes])
            times_s = np.stack([forward + backward, forward, backward])
            totals_s = times_s.sum(axis=2)
            with np.errstate(divide="ignore", invalid="ignore"):
                parts = np.nan_to_num(times_s / totals_s[:, :, None])
                rates = 1.0 / totals_s
            self._known[key] = LayerBounds(
                forward_s=float(forward.min(axis=0).sum()),
                backward_s=float(backward.min(axis=0).sum()),
                largest_s=float(times_s[0].min(axis=0).max()),
                even=parts.min(axis=1).sum(axis=1),
                rates=rates,
                saved_bytes=min(float(row.saved_bytes.sum()) for lane_class in classes for row in lane_class),
                limit_bytes=np.array([min(row.limit_bytes for row in lane_class) for lane_class in classes]),
                layer_saved_bytes=np.minimum.reduce([row.saved_bytes for row in classes[0]]),
                first_share=min(self._shares.get(id(row), 1.0) for lane_class in classes for row in lane_class),
            )
        return self._known[key]

    def _layer_static_bytes(self, share: StateShare, grid: CandidateGrid) -> Array:
        key = (share, grid.program)
        if key not in self._statics:
            self._statics[key] = self.cutter.layer_static_bytes(self.job, share, *grid.program)
        return self._statics[key]
