"""Kinds of plans: the names under which people look for a layout, from one device to groups of devices.

A plan is of the first kind of `PLAN_KINDS` that describes it, so refinements (slices, fitted orders, searched programs)
come before the axes that they refine. The alternatives of a plan are the best of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipefit.optimizers.sharded_state import shards_optimizer
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.schedule.fit.family import FIT


@dataclass(frozen=True, slots=True)
class PlanKind:
    """A kind of plans and its test."""

    name: str
    describes: Callable[[ParallelConfig], bool]


def parallel_axes(decisions: ParallelConfig) -> tuple[str, ...]:
    """Return the axes with more than one part: data, expert, context, tensor and pipeline."""
    shards = max(len(decisions.shards_of(lane)) for lane in range(decisions.lane_count))
    sizes = {
        "data": len(decisions.replicas),
        "expert": shards if decisions.splits_rows else decisions.expert,
        "context": decisions.context,
        "tensor": 1 if decisions.splits_rows else shards,
        "pipeline": decisions.lane_count,
    }
    return tuple(name for name, size in sizes.items() if size > 1)


def _uses_axes(*names: str) -> Callable[[ParallelConfig], bool]:
    """Return the test of plans with exactly these axes."""
    return lambda decisions: parallel_axes(decisions) == names


def uses_groups(decisions: ParallelConfig) -> bool:
    """Return whether lanes are groups of devices of separate sizes or programs."""
    return bool(decisions.lane_shards) or len(decisions.recipes) > 1


PLAN_KINDS: tuple[PlanKind, ...] = (
    PlanKind("device groups", uses_groups),
    PlanKind("token slices", lambda decisions: bool(decisions.slices)),
    PlanKind("fitted order", lambda decisions: decisions.schedule == FIT),
    PlanKind("searched shard programs", lambda decisions: decisions.sharding == "searched"),
    PlanKind("expert", _uses_axes("expert")),
    PlanKind("expert + data", _uses_axes("data", "expert")),
    PlanKind("expert + tensor", _uses_axes("expert", "tensor")),
    PlanKind("expert + tensor + data", _uses_axes("data", "expert", "tensor")),
    PlanKind("expert + pipeline or context", lambda decisions: decisions.splits_rows or decisions.expert > 1),
    PlanKind("context", _uses_axes("context")),
    PlanKind("context + data", _uses_axes("data", "context")),
    PlanKind("context + tensor or pipeline", lambda decisions: decisions.context > 1),
    PlanKind("one device", _uses_axes()),
    PlanKind(
        "hybrid sharded data parallel",
        lambda decisions: parallel_axes(decisions) == ("data",) and decisions.hybrid_group > 0,
    ),
    PlanKind(
        "sharded data parallel",
        lambda decisions: parallel_axes(decisions) == ("data",) and shards_optimizer(decisions.sharded_state),
    ),
    PlanKind("data parallel", _uses_axes("data")),
    PlanKind("tensor", _uses_axes("tensor")),
    PlanKind("tensor + data", _uses_axes("data", "tensor")),
    PlanKind("pipeline", _uses_axes("pipeline")),
    PlanKind("pipeline + data", _uses_axes("data", "pipeline")),
    PlanKind("pipeline + tensor", _uses_axes("tensor", "pipeline")),
    PlanKind("pipeline + tensor + data", _uses_axes("data", "tensor", "pipeline")),
)
"""All kinds; every plan of one module is of exactly one."""


def kind_name(decisions: ParallelConfig) -> str:
    """Return the name of the plan's kind."""
    return next(kind.name for kind in PLAN_KINDS if kind.describes(decisions))
