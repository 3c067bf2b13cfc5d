"""The search space: replicas x stages x microbatches x schedule x recomputation x sharded state x device order.

Every number of devices up to all of them is in the space, so leaving devices idle is a choice like any other. On a
cluster with several kinds of devices, the position of each kind and leaving kinds out are choices too
(`plan/devices/device_kinds.py`). A constraint replaces a dimension by one value. The shard axis has the sizes that fill
hosts (`plan/candidates/shard_choices.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipefit.layout import split_by_shares
from pipefit.model.analysis.saved import Recompute
from pipefit.optimizers.sharded_state import ShardedState, searched_states, shards_optimizer, state_choices
from pipefit.plan.candidates.grid import CandidateGrid, Count
from pipefit.plan.candidates.shard_choices import ShardChoice, shard_choices
from pipefit.plan.candidates.sliced_grids import slice_grid, with_slices
from pipefit.plan.candidates.slicings import SequenceSlicer
from pipefit.plan.cutting.cutter import UNSHARDED, LayerCutter
from pipefit.plan.devices.device_kinds import (
    Pattern,
    assign_devices,
    device_patterns,
    neighbour_patterns,
    replica_counts,
    row_shares,
)
from pipefit.plan.devices.fleet import KindRuns
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import Inner, ParallelConfig
from pipefit.plan.request.expert_parts import divides_rows, program_key
from pipefit.plan.types import Job
from pipefit.schedule.families import DEFAULT_FAMILY, FAMILIES, family_facts
from pipefit.schedule.fit.family import FIT

ALL_DEPTHS_DEVICES = 64
"""Devices up to which pipelines of any depth are searched."""

MOST_IDLE = 1 / 4
"""On more devices, depths that leave at least this share of the devices idle are not searched, unless all depths do."""

RECOMPUTE_CHOICES: tuple[tuple[Recompute, ...], ...] = (("none",), ("selective",), ("full",))


def iter_candidates(
    job: Job, layers: int, devices: int, hosts: int, constraints: Constraints, cutter: LayerCutter | None = None
) -> Iterator[ParallelConfig]:
    """Yield every candidate, in a fixed order. Layers are not cut yet unless the cuts are constrained.

    Without a cutter all devices count as alike.
    """
    for grid in iter_grids(job, layers, devices, hosts, constraints, cutter):
        yield from grid.all_decisions()


def iter_grids(
    job: Job,
    layers: int,
    devices: int,
    hosts: int,
    constraints: Constraints,
    cutter: LayerCutter | None = None,
    slicer: SequenceSlicer | None = None,
) -> Iterator[CandidateGrid]:
    """Yield every grid of candidates, in a fixed order: without slices, and with the slicings the closed form
    prefers."""
    constraints = families_only(constraints)
    slicer = SequenceSlicer(cutter, job, constraints) if cutter is not None and slicer is None else slicer
    for base in iter_base_grids(job, layers, devices, hosts, constraints, cutter):
        for grid in (unsliced_grid(base, constraints), slice_grid(base, job, constraints, slicer)):
            if grid is not None:
                yield grid


def iter_base_grids(
    job: Job, layers: int, devices: int, hosts: int, constraints: Constraints, cutter: LayerCutter | None = None
) -> Iterator[CandidateGrid]:
    """Yield a grid for every device grid and placement, in a fixed order, before sequences are sliced.

    It covers all schedules that are searched with or without slices. `schedule=fit` is not searched here: it gets the
    layouts of all families (see `plan/passes/fitted_orders.py`).
    """
    constraints = families_only(constraints)
    known: dict[int, Mapping[tuple[tuple[int, ...], bool], list[str]]] = {}
    for choice in shard_choices(job, constraints, cutter):
        for device_grid in _device_grids(job, layers, devices, hosts, choice.fix_in(constraints), cutter):
            if not choice.lanes[0] <= device_grid.lanes <= choice.lanes[1]:
                continue
            if device_grid.lanes not in known:
                known[device_grid.lanes] = _schedules_by_placement(device_grid.lanes, layers, constraints)
            for (placement, _), names in known[device_grid.lanes].items():
                grid = _build_grid(job, device_grid, placement, names, choice, constraints, cutter)
                if grid is not None:
                    yield grid


def _build_grid(
    job: Job,
    device_grid: DeviceGrid,
    placement: tuple[int, ...],
    names: Sequence[str],
    choice: ShardChoice,
    constraints: Constraints,
    cutter: LayerCutter | None,
) -> CandidateGrid | None:
    """Return the candidates of a device grid with a placement, with all its counts, before slicing; None if there are
    none."""
    recompute_choices = [constraints.recompute] if constraints.recompute is not None else RECOMPUTE_CHOICES
    recompute_choices = [choice for choice in recompute_choices if len(choice) in (1, len(placement))]
    any_count = constraints.schedule is not None and constraints.microbatches is not None
    least = tuple(0 if any_count else FAMILIES[n].least_units(device_grid.lanes) for n in names)
    counts = tuple(count for count in device_grid.counts if divides_rows(job.batch, *count, choice.row_parts))
    if not recompute_choices or not counts:
        return None
    counts, states, state_group = _state_choices(counts, choice, constraints, cutter)
    if not counts or not states:
        return None
    return CandidateGrid(
        lanes=device_grid.lanes,
        counts=counts,
        pattern=device_grid.pattern,
        placement=placement,
        names=tuple(names),
        least=least,
        recompute=tuple(recompute_choices),
        sharded_state=states,
        state_group=state_group,
        inner=device_grid.inner,
        context=constraints.context_size,
        expert=choice.expert,
        shards=choice.shares,
        sharding=choice.sharding,
        recipes=choice.recipes,
        cuts=constraints.cuts or (),
        fleet=cutter.fleet if cutter is not None else None,
        runs=device_grid.runs,
    )


def _state_choices(
    counts: tuple[Count, ...], choice: ShardChoice, constraints: Constraints, cutter: LayerCutter | None
) -> tuple[tuple[Count, ...], tuple[ShardedState, ...], int]:
    """Return the counts whose replicas can shard state in groups of the constrained size, the states to try, and the
    size; 0 for one group of all. Without a fixed number of replicas there are several groups."""
    members, size = len(counts[0][1]) * constraints.context_size, constraints.state_group or 0
    states = state_choices(
        constraints.sharded_state,
        members * choice.row_parts,
        searched_states(cutter is not None and cutter.fleet.is_mixed),
    )
    if not size:
        return counts, states, 0
    if members % size or (members == size and constraints.replicas is None) or choice.row_parts > 1:
        return (), (), size
    even = tuple(count for count in counts if len({*count[1]}) == 1)
    return even, tuple(filter(shards_optimizer, states)), size if size < members else 0


def unsliced_grid(grid: CandidateGrid, constraints: Constraints) -> CandidateGrid | None:
    """Return the candidates of a grid without slices, in families that are searched without slices."""
    if constraints.slices not in (None, 1):
        return None
    any_family = constraints.schedule is not None
    indices = [index for index, name in enumerate(grid.names) if any_family or FAMILIES[name].searched]
    if len(indices) < len(grid.names):
        names, least = [grid.names[index] for index in indices], [grid.least[index] for index in indices]
        grid = replace(grid, names=tuple(names), least=tuple(least))
    return with_slices(grid, [(count, ()) for count in grid.counts]) if indices else None


def families_only(constraints: Constraints) -> Constraints:
    """Return the constraints of a search over families: all but `schedule=fit`."""
    return replace(constraints, schedule=None) if constraints.schedule == FIT else constraints


@dataclass(frozen=True, slots=True)
class DeviceGrid:
    """Devices as replicas x lanes."""

    lanes: int
    counts: tuple[Count, ...]
    inner: tuple[Inner, ...]
    pattern: Pattern | None = None
    runs: tuple[KindRuns, ...] = ()
    "Kinds of every lane's replicas in the pattern."


def _device_grids(
    job: Job, layers: int, devices: int, hosts: int, constraints: Constraints, cutter: LayerCutter | None
) -> Iterator[DeviceGrid]:
    """Yield the grids that devices and batch allow: devices in their own order, and by kind where kinds differ."""
    known: dict[tuple[tuple[KindRuns, ...], Inner], set[Count]] = {}
    mixed = cutter is not None and cutter.fleet.is_mixed
    if cutter is not None and mixed and constraints.mapping in (None, "search"):
        for device_grid in _mixed_grids(job, layers, devices, hosts, constraints, cutter):
            for inner in device_grid.inner:
                known[device_grid.runs, inner] = {*device_grid.counts}
            yield device_grid
    for replicas, lanes in _grid_sizes(job, layers, devices, constraints):
        counts = tuple((count, replicas) for count in _microbatch_counts(job, replicas, constraints))
        inners = _rank_orders(hosts, len(replicas), lanes, constraints)
        if cutter is None or not mixed:
            yield from [DeviceGrid(lanes, counts, inners)] if counts else []
            continue
        for inner in inners:
            runs = tuple(cutter.fleet.lane_runs((), inner, lanes, len(replicas), constraints.shard_devices))
            in_hosts = cutter.fleet.fills_hosts(constraints.shard_devices)
            seen: set[Count] = known.get((runs, inner), set()) if in_hosts else set()
            if left := tuple(count for count in counts if count not in seen):
                yield DeviceGrid(lanes, left, (inner,))


def _mixed_grids(
    job: Job, layers: int, devices: int, hosts: int, constraints: Constraints, cutter: LayerCutter
) -> Iterator[DeviceGrid]:
    """Yield grids with devices grouped by kind, by lane and by replica, and the rows of unlike replicas by their
    speed."""
    shards, place_size = constraints.shard_devices, constraints.devices_per_replica
    limit = min(constraints.devices or devices, devices)
    program = (
        (program_key(constraints.sharding or "none", constraints.expert_size), constraints.shards or (1,))
        if cutter.fleet.fills_hosts(shards)
        else UNSHARDED
    )
    time_s = cutter.row_time(job, (constraints.recompute or ("none",))[0], program)
    kinds = cutter.compare_kinds(job, shards)
    fixed_counts = [len(constraints.replicas)] if constraints.replicas else []
    even = fixed_counts or [count for count in divisors_of(job.batch) if count * place_size <= limit]
    for lanes in range(1, min(limit // place_size, layers) + 1):
        uneven = fixed_counts or replica_counts(lanes, kinds.counts, job.batch)
        for replicas in sorted({*even, *uneven}):
            size = replicas * lanes * place_size
            if size > limit or (constraints.devices is not None and size != constraints.devices):
                continue
            inner = _rank_orders(hosts, replicas, lanes, constraints)
            for pattern in device_patterns(lanes, replicas, kinds, replicas in even, replicas in uneven):
                if counts := _mixed_counts(job, pattern, constraints, time_s):
                    yield DeviceGrid(lanes, counts, inner, pattern, tuple(cutter.fleet.runs_of(pattern)))


def _mixed_counts(
    job: Job, pattern: Pattern, constraints: Constraints, time_s: Callable[[int, int], float]
) -> tuple[Count, ...]:
    """Return the counts of microbatches of a pattern of kinds, with shares by speed where its replicas differ."""
    columns = [*zip(*pattern, strict=True)] if pattern[0] is not pattern[-1] else [(kind,) for kind in pattern[0]]
    if constraints.replicas or len({*columns}) == 1:
        shares = constraints.replicas or (1,) * len(pattern[0])
        return tuple((count, shares) for count in _microbatch_counts(job, shares, constraints))
    return tuple(
        (count, shares)
        for count in _batch_divisors(job, constraints)
        for shares in row_shares(columns, job.batch // count, time_s)
    )


def rearrange_kinds(
    cutter: LayerCutter, job: Job, decisions: ParallelConfig, constraints: Constraints
) -> Iterator[ParallelConfig]:
    """Yield candidates of the same grid one rearrangement of kinds, or one change of rank order, away; not cut yet."""
    pattern = cutter.fleet.kind_pattern(decisions)
    shards = decisions.shard_devices
    kinds, time_s = cutter.compare_kinds(job, shards), cutter.row_time(job, decisions.recompute[0])
    uncut = replace(decisions, stages=decisions.stage_count, cuts=constraints.cuts or ())
    inners = _rank_orders(len(cutter.network.cluster.hosts), len(decisions.replicas), decisions.lane_count, constraints)
    for neighbour in (*neighbour_patterns(pattern, kinds.counts), pattern):
        columns = list(zip(*neighbour, strict=True))
        share_choices = [decisions.replicas]
        if constraints.replicas is None:
            even = (1,) * len(columns)
            alike = len({*columns}) == 1
            rows = job.batch // decisions.microbatches
            share_choices = ([even] if rows % len(columns) == 0 else []) if alike else row_shares(columns, rows, time_s)
        if decisions.state_group:  # its replicas stay even
            share_choices = [decisions.replicas]
        for shares, inner in itertools.product(share_choices, inners):
            devices = assign_devices(neighbour, inner, cutter.fleet.devices, decisions.context * shards)
            if len(devices) == decisions.device_count:  # fewer if a kind has too few devices for a shard group
                yield replace(uncut, replicas=shares).with_devices(devices, inner)


def _rank_orders(hosts: int, replicas: int, lanes: int, constraints: Constraints) -> tuple[Inner, ...]:
    if constraints.inner is not None:
        return (constraints.inner,)
    return ("replica", "stage") if hosts > 1 and replicas > 1 and lanes > 1 else ("replica",)


def _grid_sizes(job: Job, layers: int, devices: int, constraints: Constraints) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (shares of the replicas, lanes) that the devices and the batch allow."""
    shards = constraints.devices_per_replica
    limit = min(constraints.devices or devices, devices)
    if constraints.replicas is not None:
        replica_choices = [constraints.replicas]
    else:
        replica_choices = [(1,) * count for count in divisors_of(job.batch) if count * shards <= limit]
    for replicas in replica_choices:
        depth_limit = limit // (len(replicas) * shards)
        fewest = 1 if limit <= ALL_DEPTHS_DEVICES or depth_limit > layers else int(depth_limit * (1 - MOST_IDLE)) + 1
        for lanes in range(fewest, min(depth_limit, layers) + 1):
            if constraints.devices is None or len(replicas) * shards * lanes == constraints.devices:
                yield replicas, lanes


def _schedules_by_placement(
    lanes: int, layers: int, constraints: Constraints
) -> dict[tuple[tuple[int, ...], bool], list[str]]:
    """Return the schedules for this number of lanes, by placement and by whether every backward is fused.

    They include families that are searched with slices only. On a single lane all plain schedules take the same time,
    and 1F1B needs the least memory.
    """
    searched = [name for name in sorted(FAMILIES) if FAMILIES[name].searched_with_slices]
    names = searched if lanes > 1 else [DEFAULT_FAMILY]
    stages = constraints.stage_count
    schedules: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name in [constraints.schedule] if constraints.schedule is not None else names:
        placement = constraints.lane_of_stage or FAMILIES[name].placement(lanes)
        if max(placement) + 1 == lanes and len(placement) <= layers and stages in (None, len(placement)):
            schedules.setdefault((placement, family_facts(name).fused), []).append(name)
    return schedules


def _microbatch_counts(job: Job, replicas: tuple[int, ...], constraints: Constraints) -> Iterator[int]:
    """Yield divisors of the batch that leave every replica whole rows; equal numbers of rows for equal shares."""
    even = len({*replicas}) == 1
    for count in _batch_divisors(job, constraints):
        rows = job.batch // count
        has_fixed_rows = constraints.microbatches is not None or constraints.replicas is not None
        all_have_rows = all(start < stop for start, stop in split_by_shares(rows, replicas))
        if all_have_rows and (not even or has_fixed_rows or rows % len(replicas) == 0):
            yield count


def _batch_divisors(job: Job, constraints: Constraints) -> Iterator[int]:
    """Return counts of microbatches that divide the batch."""
    choices = [constraints.microbatches] if constraints.microbatches is not None else divisors_of(job.batch)
    return (count for count in choices if job.batch % count == 0)


def divisors_of(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
