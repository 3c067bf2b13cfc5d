"""Expert parallelism: which models, batches and other choices it goes with.

With `sharding=expert` the shard axis divides the rows of every replica and the experts of every layer
(`shard/experts.py`). Beside tensor parallelism an axis of its own (`expert`) divides the rows, and with the shards the
experts. So each device, or each group of shards, needs rows, and each device needs experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Final

from pipefit.errors import PlanError
from pipefit.layout import split_by_shares
from pipefit.model.graph import Model
from pipefit.plan.request.context_parts import check_rising
from pipefit.plan.types import Job, Plan

EXPERT: Final = "expert"
"""The sharding, and the name of the axis in alternatives."""


TENSOR_SHARDING: Final = "megatron-sp"
"""The sharding that an expert axis goes with: it divides tokens among the shards."""

PARTS_PREFIX: Final = "ep"


def splits_rows(sharding: str | None) -> bool:
    """Return whether programs of this sharding divide the rows of a replica over the shard axis."""
    return sharding == EXPERT


def row_parts(sharding: str, shares: Sequence[int], expert: int = 1) -> int:
    """Return the number of parts of the rows of a replica: the devices of a shard axis with these shares if it divides
    rows, or the positions of an expert axis."""
    return len(shares) if splits_rows(sharding) else expert


def program_key(sharding: str, expert: int) -> str:
    """Return the key of the layer programs of a sharding beside an expert axis of this size: `megatron-sp/ep4`."""
    return f"{sharding}/{PARTS_PREFIX}{expert}" if expert > 1 else sharding


def parts_of_key(key: str) -> int:
    """Return the size of the expert axis in a key of layer programs; 1 without one."""
    sharding, _, parts = key.partition("/")
    return int(parts.removeprefix(PARTS_PREFIX)) if parts and sharding == TENSOR_SHARDING else 1


def program_row_parts(key: str, shares: Sequence[int]) -> int:
    """Return the number of parts of the rows of a replica under the layer programs of a key."""
    return row_parts(key, shares, parts_of_key(key))


def divides_rows(batch: int, microbatches: int, replicas: Sequence[int], parts: int) -> bool:
    """Return whether the rows of every replica's microbatch divide evenly among `parts` devices."""
    if parts == 1:
        return True
    runs = split_by_shares(batch // microbatches, tuple(replicas))
    return all((stop - start) % parts == 0 for start, stop in runs)


def smallest_expert_count(model: Model) -> int:
    """Return the number of experts of the layer with the fewest; 0 for a model without experts."""
    from pipefit.shard.experts import expert_count

    counts = [expert_count(graph) for graph in model.graphs.values()]
    return min((count for count in counts if count), default=0)


def check_experts(model: Model, shares: Sequence[int], where: str, expert: int | None = None) -> None:
    """Raise PlanError if the experts of a model cannot be divided among devices with these shares, at each of the
    positions of an expert axis of this size. None: by the program of expert parallelism."""
    beside = expert is not None
    experts = smallest_expert_count(model)
    if not experts:
        raise PlanError(
            "Expert parallelism divides experts, and this model has none.",
            where=where,
            seen=f"{EXPERT}={expert}" if beside else f"sharding={EXPERT}",
            allowed="sharding=megatron, megatron-sp or searched" + (f", without {EXPERT}" if beside else ""),
            next_step=f"leave out ep, or {EXPERT}" if beside else "leave out ep, or shards and sharding",
        )
    if expert is not None and expert > 1:
        _check_axis_experts(model, expert, shares, where)
        return
    if len(shares) > experts:
        raise PlanError(
            "There are more devices than experts in a layer.",
            where=where,
            seen=f"{len(shares)} devices, {experts} experts",
            allowed=f"at most {experts}",
        )


def _check_axis_experts(model: Model, expert: int, shares: Sequence[int], where: str) -> None:
    from pipefit.shard.experts import TOKEN_DIM, expert_count

    counts = {expert_count(graph, TOKEN_DIM) for graph in model.graphs.values()} - {0}
    least = min(counts)
    fitting = [size for size in range(2, least // len(shares) + 1) if not any(count % size for count in counts)]
    if expert not in fitting:
        nearest = min(fitting, key=lambda size: abs(size - expert), default=1)
        raise PlanError(
            "The experts of a layer do not divide among the devices of expert and tensor parallelism.",
            where=where,
            seen=f"{' or '.join(map(str, sorted(counts)))} experts for {expert} x {len(shares)} devices",
            allowed=f"{EXPERT} of {', '.join(map(str, fitting))} beside {len(shares)} shards"
            if fitting
            else f"no {EXPERT} beside {len(shares)} shards: a layer has too few experts",
            next_step=f"fix {EXPERT}={nearest}, or ep={len(shares) * nearest} beside tp={len(shares)}"
            if fitting
            else f"leave out {EXPERT} (ep)",
        )


def check_expert_axis(expert: int, sharding: str | None, shares: Sequence[int], where: str) -> None:
    """Raise PlanError for an expert axis without tensor and sequence parallelism, or beside uneven shards."""
    if expert == 1:
        return
    if sharding != TENSOR_SHARDING or len(shares) == 1:
        raise PlanError(
            "An expert axis goes with tensor parallelism that divides tokens.",
            where=where,
            seen=f"{EXPERT}={expert}, shards={len(shares)}, sharding={sharding}",
            allowed=f"shards=2 or more, with sharding={TENSOR_SHARDING}",
            next_step=f"for experts on undivided layers fix shards={expert} and sharding={EXPERT} (ep={expert})"
            if len(shares) == 1
            else f"fix sharding={TENSOR_SHARDING}, or leave out {EXPERT} (ep)",
        )
    if len({*shares}) > 1:
        raise PlanError(
            "Beside an expert axis the shards are equal.",
            where=where,
            seen=f"shards {':'.join(map(str, shares))}, {EXPERT}={expert}",
            allowed=f"shards={len(shares)}",
        )


def check_expert_order(expert: int, size: int, devices: Sequence[int], where: str) -> None:
    """Raise PlanError unless the devices that divide experts are in rising order, in every group of `size`. `devices`
    are those of a lane, in grid order."""
    for start in range(0, len(devices) if expert > 1 else 0, size):
        check_rising(devices[start : start + size], "divide the experts of a layer", where)


def expert_problems(plan: Plan) -> Iterator[PlanError]:
    """Yield errors of the stages of a plan with expert parallelism."""
    for index, stage in enumerate(plan.stages):
        where, mesh = f"stages[{index}]", plan.stage_mesh(index)
        axis = mesh.find_axis("expert").shares
        if not splits_rows(stage.sharding) and len(axis) == 1:
            continue
        replicas, shares = mesh.find_axis("replica").shares, mesh.find_axis("shard").shares
        row_shares = shares if splits_rows(stage.sharding) else axis
        try:
            check_expert_axis(len(axis), stage.sharding, shares, f"{where}.group")
            check_expert_order(len(axis), len(axis) * len(shares), mesh.devices, f"groups[{stage.group}].devices")
            check_expert_state(stage.sharding, stage.state_group, f"{where}.state_group", len(axis))
            check_expert_rows(plan.job, plan.order.microbatches, replicas, row_shares, f"{where}.group")
        except PlanError as error:
            yield error


def check_expert_state(sharding: str | None, state_group: int, where: str, expert: int = 1) -> None:
    """Raise PlanError for groups that shard state (HSDP) beside expert parallelism."""
    if (splits_rows(sharding) or expert > 1) and state_group:
        raise PlanError(
            "Expert parallelism shards state over all devices of a stage, not over groups of them.",
            where=where,
            seen=f"{f'{EXPERT}={expert}' if expert > 1 else f'sharding={EXPERT}'}, state_group={state_group}",
            allowed="state_group=all",
            next_step="leave out state_group (hsdp)",
        )


def check_row_parts(
    job: Job,
    microbatches: int | None,
    replicas: Sequence[int],
    sharding: str | None,
    shards: Sequence[int],
    expert: int,
    where: str = "",
) -> None:
    """Raise PlanError as `check_expert_rows` does, for the axis that divides the rows of a replica. `where`: words
    before the name of the axis."""
    if splits_rows(sharding):
        check_expert_rows(job, microbatches, replicas, shards, f"{where}shards")
    elif expert > 1:
        check_expert_rows(job, microbatches, replicas, (1,) * expert, f"{where}{EXPERT}")


def check_expert_rows(
    job: Job, microbatches: int | None, replicas: Sequence[int], shares: Sequence[int], where: str
) -> None:
    """Raise PlanError unless the devices of a replica have equal shares, and equally many rows of every microbatch.
    Without a number of microbatches some divisor of the batch must do."""
    if len({*shares}) > 1:
        raise PlanError(
            "Expert parallelism gives every device the same number of rows.",
            where=where,
            seen=f"shares {':'.join(map(str, shares))}",
            allowed=f"equal shares: shards={len(shares)}",
            next_step=f"fix shards={len(shares)}, or sharding=searched for uneven shares",
        )
    counts = [microbatches] if microbatches else [count for count in range(1, job.batch + 1) if job.batch % count == 0]
    if not any(divides_rows(job.batch, count, replicas, len(shares)) for count in counts):
        rows = job.batch // counts[0]
        least = len(shares) * sum(replicas) // gcd(*replicas)
        raise PlanError(
            "The rows of a microbatch do not divide among the devices of expert parallelism.",
            where=where,
            seen=f"{rows} rows for {len(replicas)} x {len(shares)} devices",
            allowed=f"a multiple of {least} rows",
            next_step=f"fix microbatches={job.batch // least}" if job.batch % least == 0 else None,
        )
