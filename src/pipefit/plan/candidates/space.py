"""The search space: replicas x stages x microbatches x schedule x recomputation x ZeRO-1 x device order.

Every number of devices up to all of them is in the space, so leaving devices idle is a choice like any other. On a
cluster with several kinds of devices, the position of each kind and leaving kinds out are choices too
(`plan/devices/device_kinds.py`). A constraint replaces a dimension by one value. The shard axis is a dimension whose
only value is 1 unless it is constrained.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipefit.errors import PlanError
from pipefit.layout import split_by_shares
from pipefit.optimizers.sharded_state import IMPLEMENTED
from pipefit.plan.bounds.step_bounds import schedule_facts
from pipefit.plan.candidates.grid import CandidateGrid, Count
from pipefit.plan.candidates.sliced_grids import slice_grid, with_slices
from pipefit.plan.candidates.slicings import SequenceSlicer
from pipefit.plan.cutting.cutter import LayerCutter
from pipefit.plan.devices.device_kinds import (
    Pattern,
    assign_devices,
    device_patterns,
    neighbour_patterns,
    replica_counts,
    row_shares,
)
from pipefit.plan.devices.fleet import Runs
from pipefit.plan.request.decisions import Inner, ParallelConfig
from pipefit.plan.request.sliceable import check_slices
from pipefit.plan.slicing.cuts import check_number
from pipefit.plan.types import Job, Recompute
from pipefit.schedule.families import FAMILIES

RECOMPUTE: tuple[tuple[Recompute, ...], ...] = (("none",), ("selective",), ("full",))


def iter_candidates(
    job: Job, layers: int, devices: int, hosts: int, pins: Mapping[str, Any], cutter: LayerCutter | None = None
) -> Iterator[ParallelConfig]:
    """Yield every candidate, in a fixed order. Layers are not cut yet unless the cuts are constrained.

    Without a cutter all devices count as alike.
    """
    for panel in iter_grids(job, layers, devices, hosts, pins, cutter):
        yield from panel.all_decisions()


def iter_grids(
    job: Job,
    layers: int,
    devices: int,
    hosts: int,
    pins: Mapping[str, Any],
    cutter: LayerCutter | None = None,
    slicer: SequenceSlicer | None = None,
) -> Iterator[CandidateGrid]:
    """Yield every grid of candidates, in a fixed order: without slices, and with the slicings the closed form
    prefers."""
    pins = families_only(pins)
    slicer = SequenceSlicer(cutter, job, pins) if cutter is not None and slicer is None else slicer
    for base in iter_base_grids(job, layers, devices, hosts, pins, cutter):
        for panel in (unsliced_grid(base, pins), slice_grid(base, job, pins, slicer)):
            if panel is not None:
                yield panel


def iter_base_grids(
    job: Job, layers: int, devices: int, hosts: int, pins: Mapping[str, Any], cutter: LayerCutter | None = None
) -> Iterator[CandidateGrid]:
    """Yield a grid for every device grid and placement, in a fixed order, before sequences are sliced.

    It covers all schedules that are searched with or without slices. `schedule=fit` is not a family: it gets the
    layouts of all families (see `plan/passes/fitted_orders.py`).
    """
    pins = families_only(pins)
    known: dict[int, Mapping[tuple[tuple[int, ...], bool], list[str]]] = {}
    for grid in _device_grids(job, layers, devices, hosts, pins, cutter):
        if grid.lanes not in known:
            known[grid.lanes] = _schedules_by_placement(grid.lanes, layers, pins)
        for (placement, _), names in known[grid.lanes].items():
            panel = _build_grid(grid, placement, names, pins, cutter)
            if panel is not None:
                yield panel


def _build_grid(
    grid: DeviceGrid,
    placement: tuple[int, ...],
    names: Sequence[str],
    pins: Mapping[str, Any],
    cutter: LayerCutter | None,
) -> CandidateGrid | None:
    """Return the candidates of a device grid with a placement, with all its counts, before slicing; None if there are
    none."""
    shards = pins.get("shards", (1,))
    recompute_choices = [pins["recompute"]] if "recompute" in pins else RECOMPUTE
    recompute_choices = [choice for choice in recompute_choices if len(choice) in (1, len(placement))]
    least = tuple(
        0 if {"schedule", "microbatches"} <= pins.keys() else FAMILIES[n].least_units(grid.lanes) for n in names
    )
    counts = grid.counts
    if not recompute_choices or not counts:
        return None
    is_replicated = len(counts[0][1]) > 1
    return CandidateGrid(
        lanes=grid.lanes,
        counts=counts,
        pattern=grid.pattern,
        placement=placement,
        names=tuple(names),
        least=least,
        recompute=tuple(recompute_choices),
        sharded_state=(pins["sharded_state"],) if "sharded_state" in pins else IMPLEMENTED[: 1 + is_replicated],
        inner=grid.inner,
        shards=shards,
        sharding=_sharding_style(shards, pins),
        cuts=pins.get("cuts", ()),
        fleet=cutter.fleet if cutter is not None else None,
        runs=grid.runs,
    )


def unsliced_grid(panel: CandidateGrid, pins: Mapping[str, Any]) -> CandidateGrid | None:
    """Return the candidates of a grid without slices, in families that are searched without slices."""
    if pins.get("slices", 1) != 1:
        return None
    indices = [index for index, name in enumerate(panel.names) if "schedule" in pins or FAMILIES[name].searched]
    if len(indices) < len(panel.names):
        names, least = [panel.names[index] for index in indices], [panel.least[index] for index in indices]
        panel = replace(panel, names=tuple(names), least=tuple(least))
    return with_slices(panel, [(count, ()) for count in panel.counts]) if indices else None


def families_only(pins: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the constraints of a search over families: all but `schedule=fit`."""
    return {key: value for key, value in pins.items() if (key, value) != ("schedule", "fit")}


@dataclass(frozen=True, slots=True)
class DeviceGrid:
    """Devices as replicas x lanes."""

    lanes: int
    counts: tuple[Count, ...]
    inner: tuple[Inner, ...]
    pattern: Pattern | None = None
    runs: tuple[Runs, ...] = ()
    "Kinds of every lane's replicas in the pattern."


def _device_grids(
    job: Job, layers: int, devices: int, hosts: int, pins: Mapping[str, Any], cutter: LayerCutter | None
) -> Iterator[DeviceGrid]:
    """Yield the grids that devices and batch allow: devices in their own order, and by kind where kinds differ."""
    known: dict[tuple[tuple[Runs, ...], Inner], set[Count]] = {}
    mixed = cutter is not None and cutter.fleet.is_mixed
    if cutter is not None and mixed and pins.get("mapping", "search") == "search":
        for grid in _mixed_grids(job, layers, devices, hosts, pins, cutter):
            for inner in grid.inner:
                known[grid.runs, inner] = {*grid.counts}
            yield grid
    for replicas, lanes in _grid_sizes(job, layers, devices, pins):
        counts = tuple((count, replicas) for count in _microbatch_counts(job, replicas, pins))
        inners = _rank_orders(hosts, len(replicas), lanes, pins)
        if cutter is None or not mixed:
            yield from [DeviceGrid(lanes, counts, inners)] if counts else []
            continue
        for inner in inners:
            seen: set[Count] = set()
            if len(pins.get("shards", (1,))) == 1:
                runs = tuple(cutter.fleet.lane_runs((), inner, lanes, len(replicas)))
                seen = known.get((runs, inner), seen)
            if left := tuple(count for count in counts if count not in seen):
                yield DeviceGrid(lanes, left, (inner,))


def _mixed_grids(
    job: Job, layers: int, devices: int, hosts: int, pins: Mapping[str, Any], cutter: LayerCutter
) -> Iterator[DeviceGrid]:
    """Yield grids with devices grouped by kind, by lane and by replica, and the rows of unlike replicas by their
    speed."""
    shards = len(pins.get("shards", (1,)))
    limit = min(pins.get("devices", devices), devices)
    time_s = cutter.row_time(job, pins.get("recompute", ("none",))[0])
    kinds = cutter.compare_kinds(job, shards)
    pinned = pins.get("replicas")
    even = [len(pinned)] if pinned else [count for count in _divisors_of(job.batch) if count * shards <= limit]
    for lanes in range(1, min(limit // shards, layers) + 1):
        uneven = [len(pinned)] if pinned else replica_counts(lanes, kinds.counts, job.batch)
        for replicas in sorted({*even, *uneven}):
            size = replicas * lanes * shards
            if size > limit or ("devices" in pins and size != pins["devices"]):
                continue
            inner = _rank_orders(hosts, replicas, lanes, pins)
            for pattern in device_patterns(lanes, replicas, kinds, replicas in even, replicas in uneven):
                columns = [*zip(*pattern, strict=True)] if pattern[0] is not pattern[-1] else [(k,) for k in pattern[0]]
                if pinned or len({*columns}) == 1:
                    shares = pinned or (1,) * replicas
                    counts = [(count, shares) for count in _microbatch_counts(job, shares, pins)]
                else:
                    counts = [
                        (count, shares)
                        for count in _batch_divisors(job, pins)
                        for shares in row_shares(columns, job.batch // count, time_s)
                    ]
                if counts:
                    yield DeviceGrid(lanes, tuple(counts), inner, pattern, tuple(cutter.fleet.runs_of(pattern)))


def rearrange_kinds(
    cutter: LayerCutter, job: Job, decisions: ParallelConfig, pins: Mapping[str, Any]
) -> Iterator[ParallelConfig]:
    """Yield candidates of the same grid one rearrangement of kinds, or one change of rank order, away; not cut yet."""
    pattern = cutter.fleet.kind_pattern(decisions)
    shards = len(decisions.shards)
    kinds, time_s = cutter.compare_kinds(job, shards), cutter.row_time(job, decisions.recompute[0])
    uncut = replace(decisions, stages=decisions.stage_count, cuts=pins.get("cuts", ()))
    inners = _rank_orders(len(cutter.network.cluster.hosts), len(decisions.replicas), decisions.lane_count, pins)
    for neighbour in (*neighbour_patterns(pattern, kinds.counts), pattern):
        columns = list(zip(*neighbour, strict=True))
        share_choices = [decisions.replicas]
        if "replicas" not in pins:
            even = (1,) * len(columns)
            alike = len({*columns}) == 1
            rows = job.batch // decisions.microbatches
            share_choices = ([even] if rows % len(columns) == 0 else []) if alike else row_shares(columns, rows, time_s)
        for shares, inner in itertools.product(share_choices, inners):
            devices = assign_devices(neighbour, inner, cutter.fleet.devices, shards)
            if len(devices) == decisions.device_count:  # fewer if a kind has too few devices for a shard group
                yield replace(uncut, replicas=shares).with_devices(devices, inner)


def _rank_orders(hosts: int, replicas: int, lanes: int, pins: Mapping[str, Any]) -> tuple[Inner, ...]:
    if "inner" in pins:
        return (pins["inner"],)
    return ("replica", "stage") if hosts > 1 and replicas > 1 and lanes > 1 else ("replica",)


def _grid_sizes(job: Job, layers: int, devices: int, pins: Mapping[str, Any]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (shares of the replicas, lanes) that the devices and the batch allow."""
    shards = len(pins.get("shards", (1,)))
    limit = min(pins.get("devices", devices), devices)
    if "replicas" in pins:
        replica_choices = [pins["replicas"]]
    else:
        replica_choices = [(1,) * count for count in _divisors_of(job.batch) if count * shards <= limit]
    for replicas in replica_choices:
        for lanes in range(1, min(limit // (len(replicas) * shards), layers) + 1):
            if "devices" not in pins or len(replicas) * shards * lanes == pins["devices"]:
                yield replicas, lanes


def _schedules_by_placement(
    lanes: int, layers: int, pins: Mapping[str, Any]
) -> dict[tuple[tuple[int, ...], bool], list[str]]:
    """Return the schedules for this number of lanes, by placement and by whether every backward is fused.

    They include families that are searched with slices only. On a single lane all plain schedules take the same time,
    and 1F1B needs the least memory.
    """
    searched = [name for name in sorted(FAMILIES) if FAMILIES[name].searched_with_slices]
    names = searched if lanes > 1 else ["1f1b"]
    stages = pins.get("stages", len(pins["cuts"]) + 1 if "cuts" in pins else None)
    schedules: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name in [pins["schedule"]] if "schedule" in pins else names:
        placement = pins.get("placement", FAMILIES[name].placement(lanes))
        if max(placement) + 1 == lanes and len(placement) <= layers and stages in (None, len(placement)):
            schedules.setdefault((placement, schedule_facts(name).fused), []).append(name)
    return schedules


def _microbatch_counts(job: Job, replicas: tuple[int, ...], pins: Mapping[str, Any]) -> Iterator[int]:
    """Yield divisors of the batch that leave every replica whole rows; equal numbers of rows for equal shares."""
    even = len({*replicas}) == 1
    for count in _batch_divisors(job, pins):
        rows = job.batch // count
        pinned = "microbatches" in pins or "replicas" in pins
        all_have_rows = all(start < stop for start, stop in split_by_shares(rows, replicas))
        if all_have_rows and (not even or pinned or rows % len(replicas) == 0):
            yield count


def _batch_divisors(job: Job, pins: Mapping[str, Any]) -> Iterator[int]:
    """Return counts of microbatches that divide the batch."""
    choices = [pins["microbatches"]] if "microbatches" in pins else _divisors_of(job.batch)
    return (count for count in choices if job.batch % count == 0)


def _sharding_style(shards: tuple[int, ...], pins: Mapping[str, Any]) -> Any:
    if len(shards) == 1:
        return "none"
    return pins.get("sharding", "megatron-sp")


def _divisors_of(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _lanes_for(stages: int, pins: Mapping[str, Any]) -> int:
    """Return the fewest lanes on which an allowed schedule places this number of stages; `stages` if none does.

    A single lane runs only 1F1B unless a schedule is constrained: see `_schedules_by_placement`.
    """
    pinned = "schedule" in pins
    names = [pins["schedule"]] if pinned else list(FAMILIES)
    fits = (
        lanes
        for lanes in range(1 if pinned else 2, stages)
        if any(len(FAMILIES[n].placement(lanes)) == stages for n in names)
    )
    return next(fits, stages)


def check_space(job: Job, layers: int, devices: int, pins: Mapping[str, Any]) -> None:
    """Raise PlanError, with the reason, if the constraints leave nothing to consider."""
    pins = families_only(pins)
    microbatches = pins.get("microbatches", 1)
    if job.batch % microbatches:
        raise PlanError(
            "The batch cannot be cut into this many equal microbatches.",
            where="--fix microbatches",
            seen=f"batch {job.batch}, microbatches {microbatches}",
            allowed=", ".join(map(str, _divisors_of(job.batch)[:12])),
        )
    replicas, lanes = len(pins.get("replicas", (1,))), 1
    stages = pins.get("stages", len(pins.get("cuts", ())) + 1)
    if "placement" in pins:
        lanes = max(pins["placement"]) + 1
    elif "schedule" in pins or stages > 1:
        lanes = _lanes_for(stages, pins)
    needed = replicas * lanes * len(pins.get("shards", (1,)))
    if needed > devices:
        raise PlanError(
            "The fixes need more devices than the cluster has.",
            where="--fix replicas, stages, shards",
            seen=f"{replicas} x {lanes} x {len(pins.get('shards', (1,)))} = {needed}",
            allowed=f"at most {devices}",
        )
    if stages > layers:
        raise PlanError(
            "There are more stages than layers.", where="--fix stages", seen=stages, allowed=f"1 to {layers}"
        )
    if job.batch // microbatches < replicas:
        raise PlanError(
            "A microbatch has fewer rows than there are replicas.",
            where="--fix replicas, microbatches",
            seen=f"{job.batch // microbatches} rows for {replicas} replicas",
            next_step="use fewer microbatches or replicas, or a larger --batch",
        )
    shards = pins.get("shards", (1,))
    slices_wanted = pins.get("slices", 1)
    lengths = slices_wanted if isinstance(slices_wanted, tuple) else ()
    check_slices(
        lengths, job.sequence, shards, _sharding_style(shards, pins), "--fix slices" if lengths else "--seq and shards"
    )
    if isinstance(slices_wanted, int):
        check_number(job.sequence, slices_wanted, pins.get("slice_multiple", 1), "--fix slices")
    if next(iter_candidates(job, layers, devices, 1, pins), None) is None:
        used = pins.get("devices")
        raise PlanError(
            "No plan obeys all these fixes.",
            where="--fix",
            seen=", ".join(pins),
            next_step=f"no grid of replicas x stages has exactly {used} devices" if used else "drop one of them",
        )
