"""A grid of candidates, as arrays: one shape of replicas and lanes with one placement of stages.

Its candidates differ in microbatches (and with them the shares of unlike replicas), recomputation, sharded state, the
rank order, and the schedule. A large cluster has thousands of grids of a hundred candidates each. The bounds and
estimates of a grid are therefore computed at once, and a candidate is built only when it is evaluated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.model.analysis.saved import Recompute
from pipefit.optimizers.sharded_state import ShardedState
from pipefit.plan.devices.device_kinds import Pattern, assign_devices
from pipefit.plan.devices.fleet import DeviceFleet, KindRuns
from pipefit.plan.request.decisions import Inner, ParallelConfig, Sharding
from pipefit.plan.request.expert_parts import program_key

Count = tuple[int, tuple[int, ...]]
"""(microbatches, share of the rows of every replica)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateGrid:
    """Candidates in a fixed order: by microbatches and slices, recomputation, sharded state, `inner`."""

    lanes: int
    counts: tuple[Count, ...]
    pattern: Pattern | None
    "Kinds of devices in the grid; None: the devices in their own order."
    placement: tuple[int, ...]
    names: tuple[str, ...]
    "Schedules whose bounds have the same form."
    least: tuple[int, ...]
    "Minimum number of microbatches of every schedule."
    recompute: tuple[tuple[Recompute, ...], ...]
    sharded_state: tuple[ShardedState, ...]
    inner: tuple[Inner, ...]
    context: int = 1
    state_group: int = 0
    "Number of neighbouring replicas (and parts of sequences) that shard the state together; 0: all of them."
    expert: int = 1
    "Size of the expert axis."
    shards: tuple[int, ...] = (1,)
    sharding: Sharding = "none"
    recipes: tuple[str, ...] = ()
    cuts: tuple[int, ...] = ()
    slices: tuple[tuple[int, ...], ...] = ()
    "Tokens of each slice, for each of the counts; empty: sequences are not sliced."
    fleet: DeviceFleet | None = None
    runs: tuple[KindRuns, ...] = ()
    "Kinds of every lane's replicas in the pattern."
    _devices: dict[str, ParallelConfig] = field(default_factory=dict, compare=False)

    @property
    def grid_shape(self) -> tuple[int, int, int, int]:
        """Number of candidates along every dimension but the schedule."""
        return len(self.counts), len(self.recompute), len(self.sharded_state), len(self.inner)

    @property
    def replica_count(self) -> int:
        return len(self.counts[0][1])

    @property
    def program(self) -> tuple[str, tuple[int, ...]]:
        """(key of the layer programs in `ProgramCache`, shares of the shard axis)."""
        return program_key("/".join((self.sharding, *self.recipes)), self.expert), self.shards

    @property
    def shard_devices(self) -> int:
        """Number of devices that divide the experts of a layer: the shards of all positions of the expert axis."""
        return self.expert * len(self.shards)

    @property
    def stages_per_lane(self) -> int:
        """Largest number of stages on a lane."""
        return _most_stages_per_lane(self.placement)

    @property
    def candidate_count(self) -> int:
        """Number of candidates, each schedule counted separately."""
        able = sum(units >= least for units in self.unit_counts for least in self.least)
        return able * len(self.recompute) * len(self.sharded_state) * len(self.inner)

    @property
    def unit_counts(self) -> tuple[int, ...]:
        """Microbatches times slices, for each of the counts."""
        if not self.slices:
            return tuple(count for count, _ in self.counts)
        return tuple(count * len(slices) for (count, _), slices in zip(self.counts, self.slices, strict=True))

    def feasible_schedules(self, units: int) -> tuple[str, ...]:
        """Return the schedules whose minimum is at most this number of microbatches, or slices of them."""
        return tuple(name for name, least in zip(self.names, self.least, strict=True) if units >= least)

    def decisions_at(self, index: int) -> ParallelConfig:
        """Return the candidate with this flat index, with the first of its schedules."""
        which, recompute_index, state, inner = (int(position) for position in np.unravel_index(index, self.grid_shape))
        microbatches, shares = self.counts[which]
        chosen = ParallelConfig(
            stages=len(self.placement),
            cuts=self.cuts,
            placement=() if self.placement == tuple(range(self.lanes)) else self.placement,
            replicas=shares,
            context=self.context,
            expert=self.expert,
            shards=self.shards,
            sharding=self.sharding,
            recipes=self.recipes,
            microbatches=microbatches,
            schedule=self.feasible_schedules(microbatches * (len(self.slices[which]) if self.slices else 1))[0],
            slices=self.slices[which] if self.slices else (),
            recompute=self.recompute[recompute_index],
            sharded_state=self.sharded_state[state],
            state_group=self.state_group,
            inner=self.inner[inner],
        )
        if self.pattern is None:
            return chosen
        if chosen.inner not in self._devices:
            self._devices[chosen.inner] = chosen.with_devices(self._device_layout(chosen.inner), chosen.inner)
        known = self._devices[chosen.inner]
        return replace(chosen, devices=known.devices, inner=known.inner)

    def first_of(self, which: int) -> int:
        """Return the flat index of the first candidate with the count `which`."""
        return int(np.ravel_multi_index((which, 0, 0, 0), self.grid_shape))

    def _device_layout(self, inner: Inner) -> tuple[int, ...]:
        """Return the device of every position."""
        assert self.fleet is not None and self.pattern is not None, "a pattern is one of a fleet's kinds"
        return assign_devices(self.pattern, inner, self.fleet.devices, self.context * self.shard_devices)

    def lane_runs(self) -> Sequence[KindRuns]:
        """Return the kinds of every lane's replicas. A grid without a pattern has a single `inner`."""
        assert self.fleet is not None
        if self.pattern is None:
            if not self.fleet.is_mixed:
                return [((self.fleet.names[0], self.replica_count),)] * self.lanes
            return self.fleet.lane_runs((), self.inner[0], self.lanes, self.replica_count, self.shard_devices)
        return self.runs

    def all_decisions(self) -> Iterator[ParallelConfig]:
        """Yield every candidate, each schedule separately."""
        return itertools.chain.from_iterable(map(self.decisions_by_schedule, range(int(np.prod(self.grid_shape)))))

    def decisions_by_schedule(self, index: int) -> Iterator[ParallelConfig]:
        """Yield the candidates with this flat index, one for each schedule."""
        decisions = self.decisions_at(index)
        return (replace(decisions, schedule=name) for name in self.feasible_schedules(decisions.unit_count))


@lru_cache(maxsize=4096)
def _most_stages_per_lane(placement: tuple[int, ...]) -> int:
    return max(map(placement.count, {*placement}))


Cells = NDArray[np.float64]
"""A value for every candidate of a grid: [microbatches, recomputation, sharded state, inner], or an array that
broadcasts to it."""


def broadcast_cells(figure: Any, grid: CandidateGrid) -> Cells:
    """Return a flat array over the candidates of a grid; trailing dimensions that `figure` lacks are broadcast."""
    array = np.asarray(figure, dtype=np.float64)
    padded = array.reshape(array.shape + (1,) * (4 - array.ndim))
    return np.broadcast_to(padded, grid.grid_shape).ravel()
