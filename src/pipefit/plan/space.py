"""All plans that are considered: replicas x stages x microbatches x schedule x recomputation x ZeRO-1 x device order.

Every number of devices up to all of them is in the space, so leaving some idle is a choice like any other. A pin
replaces a dimension by one value. The shard axis is a dimension too, whose only value is 1 unless it is pinned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipefit.errors import PlanError
from pipefit.layout import split
from pipefit.plan.bounds import facts_of
from pipefit.plan.decisions import Decisions
from pipefit.plan.types import Job, Recompute
from pipefit.schedule.families import FAMILIES

RECOMPUTE: tuple[tuple[Recompute, ...], ...] = (("none",), ("selective",), ("full",))


@dataclass(frozen=True, slots=True)
class Layout:
    """Candidates that differ in nothing but the schedule, all for one placement and with bounds of one kind."""

    decisions: Decisions
    "With the first of the schedules."
    schedules: tuple[str, ...]

    def candidates(self) -> Iterator[Decisions]:
        """One for every schedule."""
        return (replace(self.decisions, schedule=name) for name in self.schedules)


def space(job: Job, layers: int, devices: int, hosts: int, pins: Mapping[str, Any]) -> Iterator[Decisions]:
    """Every candidate, in a fixed order. Layers are not cut yet unless the cuts are pinned."""
    for layout in layouts(job, layers, devices, hosts, pins):
        yield from layout.candidates()


def layouts(job: Job, layers: int, devices: int, hosts: int, pins: Mapping[str, Any]) -> Iterator[Layout]:
    """Every layout, in a fixed order. A pinned `fit` is no family of its own: it gets the layouts of all (see
    `plan/fitting.py`)."""
    pins = families_only(pins)
    shards = pins.get("shards", (1,))
    for replicas, lanes in _grids(job, layers, devices, pins):
        many = len(replicas) > 1
        choices = itertools.product(
            _schedules(lanes, layers, pins).items(),
            _microbatches(job, replicas, pins),
            [pins["recompute"]] if "recompute" in pins else RECOMPUTE,
            [pins["zero1"]] if "zero1" in pins else [False, True][: 1 + many],
            [pins["inner"]] if "inner" in pins else ["replica", "stage"][: 1 + (hosts > 1 and many and lanes > 1)],
        )
        for ((placement, _), names), microbatches, recompute, zero1, inner in choices:
            able = tuple(name for name in names if _enough(name, lanes, microbatches, pins))
            if able and len(recompute) in (1, len(placement)):
                decisions = Decisions(
                    stages=len(placement),
                    cuts=pins.get("cuts", ()),
                    placement=() if placement == tuple(range(lanes)) else placement,
                    replicas=replicas,
                    shards=shards,
                    sharding=_sharding(shards, pins),
                    microbatches=microbatches,
                    schedule=able[0],
                    slices=pins.get("slices", ()),
                    recompute=recompute,
                    zero1=zero1,
                    inner=inner,
                )
                yield Layout(decisions, able)


def families_only(pins: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pins of a search over families: all but `schedule=fit`."""
    return {key: value for key, value in pins.items() if (key, value) != ("schedule", "fit")}


def _grids(job: Job, layers: int, devices: int, pins: Mapping[str, Any]) -> Iterator[tuple[tuple[int, ...], int]]:
    """(shares of the replicas, lanes) that the devices and the batch allow."""
    shards = len(pins.get("shards", (1,)))
    most = min(pins.get("devices", devices), devices)
    if "replicas" in pins:
        replica_choices = [pins["replicas"]]
    else:
        replica_choices = [(1,) * count for count in _divisors(job.batch) if count * shards <= most]
    for replicas in replica_choices:
        for lanes in range(1, min(most // (len(replicas) * shards), layers) + 1):
            if "devices" not in pins or len(replicas) * shards * lanes == pins["devices"]:
                yield replicas, lanes


def _schedules(lanes: int, layers: int, pins: Mapping[str, Any]) -> dict[tuple[tuple[int, ...], bool], list[str]]:
    """The schedules for this many lanes, by placement and by whether every backward is fused. A single lane runs all
    plain schedules alike as far as time goes, and 1F1B with the least memory."""
    names = [name for name in sorted(FAMILIES) if FAMILIES[name].searched] if lanes > 1 else ["1f1b"]
    stages = pins.get("stages", len(pins["cuts"]) + 1 if "cuts" in pins else None)
    found: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name in [pins["schedule"]] if "schedule" in pins else names:
        placement = pins.get("placement", FAMILIES[name].placement(lanes))
        if max(placement) + 1 == lanes and len(placement) <= layers and stages in (None, len(placement)):
            found.setdefault((placement, facts_of(name).fused), []).append(name)
    return found


def _enough(schedule: str, lanes: int, microbatches: int, pins: Mapping[str, Any]) -> bool:
    """Whether the schedule is written for so few microbatches. Where both are pinned, its own error says it best."""
    units = microbatches * len(pins.get("slices", (1,)))
    return units >= FAMILIES[schedule].least_units(lanes) or {"schedule", "microbatches"} <= pins.keys()


def _microbatches(job: Job, replicas: tuple[int, ...], pins: Mapping[str, Any]) -> Iterator[int]:
    """Counts of microbatches: divisors of the batch that leave every replica whole rows, evenly where shares are."""
    even = len({*replicas}) == 1
    choices = [pins["microbatches"]] if "microbatches" in pins else _divisors(job.batch)
    for count in choices:
        if job.batch % count:
            continue
        rows = job.batch // count
        pinned = "microbatches" in pins or "replicas" in pins
        each = all(start < stop for start, stop in split(rows, replicas))
        if each and (not even or pinned or rows % len(replicas) == 0):
            yield count


def _sharding(shards: tuple[int, ...], pins: Mapping[str, Any]) -> Any:
    if len(shards) == 1:
        return "none"
    return pins.get("sharding", "megatron-sp")


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _lanes_for(stages: int, pins: Mapping[str, Any]) -> int:
    """The fewest lanes on which a schedule that may be chosen lays this many stages; `stages` if none does. A single
    lane runs 1F1B alone where no schedule is pinned: see `_schedules`."""
    pinned = "schedule" in pins
    names = [pins["schedule"]] if pinned else list(FAMILIES)
    fits = (
        lanes
        for lanes in range(1 if pinned else 2, stages)
        if any(len(FAMILIES[n].placement(lanes)) == stages for n in names)
    )
    return next(fits, stages)


def check_space(job: Job, layers: int, devices: int, pins: Mapping[str, Any]) -> None:
    """Raises PlanError where the pins leave nothing to consider, with the reason."""
    pins = families_only(pins)
    microbatches = pins.get("microbatches", 1)
    if job.batch % microbatches:
        raise PlanError(
            "The batch cannot be cut into this many equal microbatches.",
            where="--fix microbatches",
            seen=f"batch {job.batch}, microbatches {microbatches}",
            allowed=", ".join(map(str, _divisors(job.batch)[:12])),
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
    if next(space(job, layers, devices, 1, pins), None) is None:
        used = pins.get("devices")
        raise PlanError(
            "No plan obeys all these fixes.",
            where="--fix",
            seen=", ".join(pins),
            next_step=f"no grid of replicas x stages has exactly {used} devices" if used else "drop one of them",
        )
