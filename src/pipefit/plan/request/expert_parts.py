"""Expert parallelism (`sharding=expert`): which models, batches and other choices it goes with.

The shard axis divides the rows of every replica and the experts of every layer (`shard/experts.py`), so each device
needs rows and experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Final

from pipefit.errors import PlanError
from pipefit.layout import split_by_shares
from pipefit.model.graph import Model
from pipefit.plan.types import Job, Plan

EXPERT: Final = "expert"
"""The sharding, and the name of the axis in alternatives."""


def splits_rows(sharding: str | None) -> bool:
    """Return whether programs of this sharding divide the rows of a replica over the shard axis."""
    return sharding == EXPERT


def row_parts(sharding: str, shares: Sequence[int]) -> int:
    """Return the number of devices of a shard axis with these shares that divide the rows of a replica."""
    return len(shares) if splits_rows(sharding) else 1


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


def check_experts(model: Model, shares: Sequence[int], where: str) -> None:
    """Raise PlanError if the experts of a model cannot be divided among devices with these shares."""
    experts = smallest_expert_count(model)
    if not experts:
        raise PlanError(
            "Expert parallelism divides experts, and this model has none.",
            where=where,
            seen=f"sharding={EXPERT}",
            allowed="sharding=megatron, megatron-sp or searched",
            next_step="leave out ep, or shards and sharding",
        )
    if len(shares) > experts:
        raise PlanError(
            "There are more devices than experts in a layer.",
            where=where,
            seen=f"{len(shares)} devices, {experts} experts",
            allowed=f"at most {experts}",
        )


def expert_problems(plan: Plan) -> Iterator[PlanError]:
    """Yield errors of the stages of a plan with expert parallelism."""
    for index, stage in enumerate(plan.stages):
        if not splits_rows(stage.sharding):
            continue
        where, mesh = f"stages[{index}]", plan.stage_mesh(index)
        replicas, shares = mesh.find_axis("replica").shares, mesh.find_axis("shard").shares
        try:
            check_expert_state(stage.sharding, stage.state_group, f"{where}.state_group")
            check_expert_rows(plan.job, plan.order.microbatches, replicas, shares, f"{where}.group")
        except PlanError as error:
            yield error


def check_expert_state(sharding: str | None, state_group: int, where: str) -> None:
    """Raise PlanError for groups that shard state (HSDP) beside expert parallelism."""
    if splits_rows(sharding) and state_group:
        raise PlanError(
            "Expert parallelism shards state over all devices of a stage, not over groups of them.",
            where=where,
            seen=f"sharding={EXPERT}, state_group={state_group}",
            allowed="state_group=all",
            next_step="leave out state_group (hsdp)",
        )


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
