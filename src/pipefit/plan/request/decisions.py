"""The choices that make a plan, as one value: the search varies them, `--fix` constrains them, a caller may set them.

`build_plan` turns a ParallelConfig into a Plan. It chooses only the layer cuts, if just a stage count is set.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

from pipefit.errors import PlanError
from pipefit.layout import split_by_shares
from pipefit.model.analysis.saved import Recompute
from pipefit.optimizers.sharded_state import ShardedState, check_sharded_state
from pipefit.plan.request.context_parts import check_context, check_device_order
from pipefit.plan.request.expert_parts import (
    check_expert_axis,
    check_expert_order,
    check_expert_state,
    check_row_parts,
    program_key,
    row_parts,
    splits_rows,
)
from pipefit.plan.request.sliceable import check_slices
from pipefit.plan.request.state_groups import check_state_group
from pipefit.plan.types import Job
from pipefit.schedule.families import DEFAULT_FAMILY

Sharding = Literal["none", "megatron", "megatron-sp", "expert", "searched"]
Inner = Literal["replica", "stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Layout of one module over the devices, and its schedule."""

    stages: int = 1
    "Number of stages. With `cuts`, the number of cuts plus one."
    cuts: tuple[int, ...] = ()
    "First layer of every stage but the first; empty: cut by the costs of the layers."
    placement: tuple[int, ...] = ()
    "Lane of every stage; empty: stage i on lane i."
    replicas: tuple[int, ...] = (1,)
    "Shares of the replicas: (1, 1) is two even ones, (2, 1) assigns two thirds of the rows to the first."
    context: int = 1
    "Number of devices that hold parts of each sequence and share its attention."
    expert: int = 1
    """Number of groups of shards that divide the rows of a replica, and with the shards the experts of every layer.
    Expert parallelism without tensor parallelism is `sharding=expert` instead."""
    shards: tuple[int, ...] = (1,)
    "Shares of the shard axis."
    sharding: Sharding = "none"
    "The SPMD program over the shard axis."
    lane_shards: tuple[tuple[int, ...], ...] = ()
    """For searched programs, the shares of each lane's shard axis, (1,) for a single device; empty: `shards` on all
    lanes."""
    recipes: tuple[str, ...] = ()
    """For each lane, the name of its recipe set (`plan/assemble/shard_programs.py`); one name: the same for all lanes;
    empty: one unnamed set for all."""
    microbatches: int = 1
    schedule: str = DEFAULT_FAMILY
    "A name of `schedule.families.FAMILIES`."
    slices: tuple[int, ...] = ()
    "Tokens of each slice; empty: sequences are not sliced."
    recompute: tuple[Recompute, ...] = ("none",)
    "One entry per stage, or one for all."
    sharded_state: ShardedState = "none"
    "The state that the replicas shard: none, or that of ZeRO-1, 2 or 3."
    state_group: int = 0
    "Number of neighbouring replicas, times parts of sequences, over which that state is sharded; 0: all of them."
    inner: Inner = "replica"
    "Rank order within a host: the replicas of a stage are adjacent, or the stages of a pipeline."
    devices: tuple[int, ...] = ()
    """Device of every (lane, replica, part of the sequence, position on the expert axis, shard), the last fastest;
    empty: by `inner`, from the first device on."""

    @property
    def stage_count(self) -> int:
        return len(self.cuts) + 1 if self.cuts else self.stages

    @property
    def unit_count(self) -> int:
        """Number of units that a stage runs: microbatches, or slices of microbatches."""
        return self.microbatches * max(1, len(self.slices))

    @property
    def lane_of_stage(self) -> tuple[int, ...]:
        return self.placement or tuple(range(self.stage_count))

    @property
    def lane_count(self) -> int:
        return max(self.lane_of_stage) + 1

    @property
    def device_count(self) -> int:
        shards = sum(len(self.shards_of(lane)) for lane in range(self.lane_count))
        return len(self.replicas) * self.context * self.expert * shards

    @property
    def shard_devices(self) -> int:
        """Number of devices that divide the experts of a layer: the shards of all positions of the expert axis."""
        return self.expert * len(self.shards)

    @property
    def data_shares(self) -> tuple[int, ...]:
        """Shares of the devices that sum gradients together: the replicas, and the parts of their sequences."""
        return tuple(share for share in self.replicas for _ in range(self.context))

    @property
    def splits_rows(self) -> bool:
        """True if the shard axis divides the rows of a replica (expert parallelism)."""
        return splits_rows(self.sharding)

    @property
    def state_devices(self) -> int:
        """Number of devices of a lane that shard the state of some parameters together, at most."""
        return len(self.data_shares) * row_parts(self.sharding, self.shards, self.expert)

    @property
    def hybrid_group(self) -> int:
        """Number of devices that shard the state together, if there are several such groups (HSDP); 0 otherwise."""
        return self.state_group if self.state_group < len(self.data_shares) else 0

    @property
    def state_shares(self) -> tuple[int, ...]:
        """Shares of the devices over which the state is sharded."""
        return (1,) * self.hybrid_group or self.data_shares

    @property
    def is_sharded(self) -> bool:
        """True if some lane has a shard axis."""
        return len(self.shards) > 1 or bool(self.lane_shards)

    def shards_of(self, lane: int) -> tuple[int, ...]:
        """Return the shares of the lane's shard axis."""
        return self.lane_shards[lane] if self.lane_shards else self.shards

    def sharding_of(self, lane: int) -> Sharding:
        """Return the kind of program on the lane; `none` for single devices."""
        return self.sharding if len(self.shards_of(lane)) > 1 else "none"

    def recipes_of(self, lane: int) -> str:
        """Return the name of the lane's recipe set; '' for the unnamed set or none."""
        if not self.recipes or self.sharding_of(lane) != "searched":
            return ""
        return self.recipes[lane] if len(self.recipes) > 1 else self.recipes[0]

    def sharding_key(self, lane: int) -> str:
        """Return the key of the lane's programs in `ProgramCache`."""
        name = self.recipes_of(lane)
        return f"searched/{name}" if name else program_key(self.sharding_of(lane), self.expert)

    def recompute_of(self, stage: int) -> Recompute:
        return self.recompute[stage] if len(self.recompute) > 1 else self.recompute[0]

    def lane_devices(self) -> tuple[tuple[int, ...], ...]:
        """Return the devices of every lane, in grid order (replica, context, expert, shard)."""
        replicas, parts, lanes = len(self.replicas), self.context * self.expert, self.lane_count
        shards = parts * len(self.shards)
        sizes = [replicas * parts * len(self.shards_of(lane)) for lane in range(lanes)]
        if self.devices or self.lane_shards:
            devices, stops = self.devices or tuple(range(sum(sizes))), tuple(itertools.accumulate(sizes))
            return tuple(devices[stop - size : stop] for size, stop in zip(sizes, stops, strict=True))
        size = replicas * shards
        if self.inner == "replica":
            return tuple(tuple(range(lane * size, (lane + 1) * size)) for lane in range(lanes))
        return tuple(
            tuple((replica * lanes + lane) * shards + shard for replica in range(replicas) for shard in range(shards))
            for lane in range(lanes)
        )

    def with_devices(self, devices: tuple[int, ...], inner: Inner) -> ParallelConfig:
        """Return these choices on other devices, laid out by `inner`. Equal device orders give equal configurations."""
        for order in ("replica", "stage"):
            config = replace(self, devices=(), inner=order)
            if devices == tuple(itertools.chain.from_iterable(config.lane_devices())):
                return config
        return replace(self, devices=devices, inner=inner if not devices else "replica")

    def to_constraints(self, cuts: tuple[int, ...]) -> dict[str, str]:
        """Return the choices in the form of plan files and `--fix`."""
        words = {
            "replicas": _format_shares(self.replicas),
            "stages": str(self.stage_count),
            "shards": ",".join(map(_format_shares, self.lane_shards)) or _format_shares(self.shards),
            "sharding": self.sharding,
            "microbatches": str(self.microbatches),
            "schedule": self.schedule,
            "recompute": ",".join(self.recompute),
            "sharded_state": self.sharded_state,
            "inner": self.inner,
            "cuts": ",".join(map(str, cuts)),
        }
        if self.context > 1:
            words["context"] = str(self.context)
        if self.expert > 1:
            words["expert"] = str(self.expert)
        if self.hybrid_group:
            words["state_group"] = str(self.hybrid_group)
        if self.placement:
            words["placement"] = ",".join(map(str, self.placement))
        if self.slices:
            words["slices"] = ",".join(map(str, self.slices))
        if self.devices:
            words["mapping"] = ",".join(map(str, self.devices))
        return words


def check_config(decisions: ParallelConfig, job: Job, layers: int, devices: int) -> None:
    """Raise PlanError for a choice that contradicts other choices, the job, the model's layers or the cluster's
    devices."""
    count = decisions.stage_count
    _check_positive("stages", count)
    _check_positive("microbatches", decisions.microbatches)
    _check_positive("context", decisions.context)
    _check_positive("expert", decisions.expert)
    check_sharded_state(decisions.sharded_state, "sharded_state")
    check_state_group(decisions.state_group, decisions.sharded_state, decisions.replicas, decisions.context)
    check_expert_state(decisions.sharding, decisions.hybrid_group, "sharding and state_group", decisions.expert)
    check_expert_axis(decisions.expert, decisions.sharding, decisions.shards, "expert")
    if count > layers:
        raise PlanError("There are more stages than layers.", where="stages", seen=count, allowed=f"1 to {layers}")
    if decisions.cuts and list(decisions.cuts) != sorted({*decisions.cuts} & {*range(1, layers)}):
        raise PlanError(
            "The cuts must rise, each within the layers.",
            where="cuts",
            seen=decisions.cuts,
            allowed=f"rising numbers from 1 to {layers - 1}",
        )
    for name, shares in (("replicas", decisions.replicas), ("shards", decisions.shards)):
        if not shares or any(share < 1 for share in shares):
            raise PlanError("Shares are positive whole numbers.", where=name, seen=shares)
    if len(decisions.lane_of_stage) != count or {*decisions.lane_of_stage} != {*range(decisions.lane_count)}:
        raise PlanError(
            "The placement names a lane for every stage, and every lane holds a stage.",
            where="placement",
            seen=decisions.placement,
            allowed=f"{count} lanes, numbered from 0 without gaps",
        )
    if len(decisions.recompute) not in (1, count):
        raise PlanError("Give one recompute choice, or one per stage.", where="recompute", seen=decisions.recompute)
    _check_lanes(decisions)
    if (decisions.sharding == "none") != (len(decisions.shards) == 1):
        raise PlanError(
            "More than one shard needs a sharding, and a sharding more than one shard.",
            where="sharding",
            seen=f"shards {decisions.shards}, sharding {decisions.sharding}",
            allowed="shards=2 with sharding=megatron, megatron-sp, expert or searched",
        )
    _check_devices(decisions, devices)
    _check_job(decisions, job)


def _check_lanes(decisions: ParallelConfig) -> None:
    """Raise PlanError if lanes of different sizes lack searched programs."""
    lane_shards = decisions.lane_shards
    if not lane_shards and len(decisions.recipes) <= 1:
        return
    shares = max(lane_shards or (decisions.shards,), key=len)
    if (
        decisions.sharding != "searched"
        or len({len(lane_shards), len(decisions.recipes)} | {decisions.lane_count}) != 1
    ):
        raise PlanError(
            "Groups with separate programs need shares and recipes for every lane, and searched sharding.",
            where="lane_shards, recipes",
            seen=f"{len(lane_shards)} and {len(decisions.recipes)} for {decisions.lane_count} lanes, sharding "
            f"{decisions.sharding}",
        )
    if any(share < 1 for lane in lane_shards for share in lane) or decisions.shards != shares:
        raise PlanError(
            "Shares are positive whole numbers; `shards` are those of the largest group.",
            where="lane_shards",
            seen=lane_shards,
            allowed=f"shards {shares}",
        )


def _check_devices(decisions: ParallelConfig, devices: int) -> None:
    needed = decisions.device_count
    if needed > devices:
        raise PlanError(
            "The plan needs more devices than the cluster has.",
            where=f"replicas x stages x {'context x ' if decisions.context > 1 else ''}"
            f"{'expert x ' if decisions.expert > 1 else ''}shards",
            seen=f"{len(decisions.replicas)} x {_format_sizes(decisions)} = {needed}",
            allowed=f"at most {devices}",
        )
    chosen = decisions.devices
    if chosen and (len(chosen) != needed or len({*chosen}) != needed or not all(0 <= d < devices for d in chosen)):
        raise PlanError(
            "The devices must be different devices of the cluster, one for each position of the grid.",
            where="--fix mapping",
            seen=chosen,
            allowed=f"{needed} of 0 to {devices - 1}",
        )
    for lane, lane_devices in enumerate(decisions.lane_devices()):
        size = decisions.expert * len(decisions.shards_of(lane))
        check_device_order(decisions.context, size, lane_devices, "--fix mapping")
        check_expert_order(decisions.expert, size, lane_devices, "--fix mapping")


def _check_job(decisions: ParallelConfig, job: Job) -> None:
    if job.batch % decisions.microbatches:
        divisors = [d for d in range(1, job.batch + 1) if job.batch % d == 0]
        near = sorted(divisors, key=lambda d: abs(d - decisions.microbatches))[:4]
        raise PlanError(
            "The batch cannot be cut into this many equal microbatches.",
            where="microbatches",
            seen=f"batch {job.batch}, microbatches {decisions.microbatches}",
            allowed="a divisor of the batch, for example " + ", ".join(map(str, sorted(near))),
        )
    rows = job.batch // decisions.microbatches
    if rows < len(decisions.replicas):
        raise PlanError(
            "A microbatch has fewer rows than there are replicas.",
            where="microbatches",
            seen=f"{rows} rows for {len(decisions.replicas)} replicas",
            next_step="use fewer microbatches or replicas, or a larger batch",
        )
    if any(start == stop for start, stop in split_by_shares(rows, decisions.replicas)):
        raise PlanError(
            "A replica would get no row of a microbatch.",
            where="replicas",
            seen=f"{rows} rows over shares {':'.join(map(str, decisions.replicas))}",
            next_step="use fewer microbatches, or more even shares",
        )
    check_row_parts(
        job, decisions.microbatches, decisions.replicas, decisions.sharding, decisions.shards, decisions.expert
    )
    check_context(decisions.context, job, decisions.sharding, len(decisions.slices), "context")
    for shares in {decisions.shards, *decisions.lane_shards}:
        slices = decisions.slices if decisions.context == 1 else ()
        check_slices(slices, job.sequence // decisions.context, shares, decisions.sharding, "slices")


def _format_sizes(decisions: ParallelConfig) -> str:
    if decisions.lane_shards:
        return "(" + " + ".join(str(len(shares)) for shares in decisions.lane_shards) + ")"
    context = f" x {decisions.context}" if decisions.context > 1 else ""
    expert = f" x {decisions.expert}" if decisions.expert > 1 else ""
    return f"{decisions.lane_count}{context}{expert} x {len(decisions.shards)}"


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise PlanError("A whole number above zero is needed.", where=name, seen=value)


def _format_shares(shares: tuple[int, ...]) -> str:
    """Return `4` for four even replicas, `2:1:1` for uneven ones."""
    return str(len(shares)) if len({*shares}) == 1 else ":".join(map(str, shares))
