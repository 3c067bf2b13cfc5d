"""Hybrid sharded data parallelism (HSDP): state sharded over groups of replicas, and replicated between the groups.

The members of a group are neighbours among the replicas of a stage, in the order of its mesh; parts of sequences count
as members, too. Source: Zhao et al., "PyTorch FSDP", 2023 (hybrid sharding).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pipefit.errors import PlanError
from pipefit.optimizers.sharded_state import ShardedState, shards_optimizer, state_of_forms
from pipefit.plan.types import Plan

STATE_GROUP: Final = "state_group"
"""The key of `--fix`."""


def check_state_group(
    size: int, state: ShardedState | None, replicas: Sequence[int], context: int, where: str = STATE_GROUP
) -> None:
    """Raise PlanError if the state cannot be sharded over groups of `size` members; 0 is one group of all. A `state` of
    None is not chosen yet."""
    if not size:
        return
    if state is not None and not shards_optimizer(state):
        raise PlanError(
            "A group shares sharded state, and no state is sharded.",
            where=f"{where} and sharded_state",
            seen=f"groups of {size}, sharded_state=none",
            allowed="sharded_state=optimizer, gradients or parameters",
            next_step=f"leave out {STATE_GROUP}, or fix sharded_state=parameters",
        )
    if len({*replicas}) > 1:
        raise PlanError(
            "Groups of replicas share sharded state only if all replicas have equal shares.",
            where=f"{where} and replicas",
            seen=f"replicas {':'.join(map(str, replicas))}, groups of {size}",
            allowed=f"equal shares, or {STATE_GROUP}=all",
            next_step=f"fix replicas={len(replicas)}, or leave out {STATE_GROUP}",
        )
    members = len(replicas) * context
    if size < 2 or members % size:
        parts = f" x {context} parts of sequences" if context > 1 else ""
        divisors = [count for count in range(2, members + 1) if members % count == 0]
        raise PlanError(
            "The replicas of a stage cannot be divided into groups of this size.",
            where=where,
            seen=f"groups of {size} for {len(replicas)} replica{'s' if len(replicas) > 1 else ''}{parts}",
            allowed=", ".join(map(str, divisors)) or f"{STATE_GROUP}=all: there is a single member",
            next_step=f"fix {STATE_GROUP}={min(divisors, key=lambda count: abs(count - size))}" if divisors else None,
        )


def state_group_problems(plan: Plan) -> Iterator[PlanError]:
    """Yield errors of the state groups of a plan's stages."""
    for index, stage in enumerate(plan.stages):
        if not stage.state_group:
            continue
        where, mesh = f"stages[{index}].{STATE_GROUP}", plan.stage_mesh(index)
        forms = [form for parameter in plan.parameters if index in parameter.uses for form in parameter.state]
        state = state_of_forms(forms) if forms else None  # a stage without parameters has no state to shard
        replicas, context = mesh.find_axis("replica").shares, mesh.find_axis("context").size
        try:
            check_state_group(stage.state_group, state, replicas, context, where)
        except PlanError as error:
            yield error
        if len({plan_stage.module for plan_stage in plan.stages}) > 1:
            yield PlanError(
                "The stages of a model of several modules shard their state over all replicas.",
                where=where,
                seen=stage.state_group,
                allowed="0",
            )
