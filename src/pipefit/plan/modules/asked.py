"""Whether a plan of several modules can be made as it is asked for: the sequence, the documents, and every pin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipefit.errors import PlanError
from pipefit.model.graph import Model
from pipefit.plan.length import check_length
from pipefit.plan.sliced.check import document_obstacles
from pipefit.plan.types import Job
from pipefit.schedule.families import FAMILIES
from pipefit.schedule.problem import linear

COMMON = ("microbatches", "schedule", "zero1", "devices")
"""What can be pinned for all modules together."""

OWN = ("replicas", "stages", "shards", "recompute", "devices")
"""What can be pinned for each."""


def check_asked(model: Model, job: Job, pins: Mapping[str, Any]) -> None:
    """Raises PlanError for what a plan of several modules cannot be."""
    for module in model.modules:
        if module.space == "samples":
            check_length(module, model, job.sequence, "--seq")
    for error in document_obstacles(model, "--documents") if job.documents == "apart" else ():
        raise error
    for error in _pin_problems(model, job, pins):
        raise error


def _pin_problems(model: Model, job: Job, pins: Mapping[str, Any]) -> Iterator[PlanError]:
    names = [module.name for module in model.modules]
    for key, value in pins.items():
        module, dot, own = key.rpartition(".")
        if (dot and (module not in names or own not in OWN)) or (not dot and own not in COMMON):
            yield PlanError(
                "This cannot be fixed for a model of several modules.",
                where="--fix",
                seen=key,
                allowed=", ".join((*COMMON, *(f"{name}.{one}" for name in names for one in OWN))),
            )
        elif own in ("replicas", "shards") and len({*value}) > 1:
            yield PlanError(
                "The replicas and shards of a module are even where there are several modules.",
                where=f"--fix {key}",
                seen=":".join(map(str, value)),
                next_step=f"--fix {key}={len(value)}",
            )
        elif own == "recompute" and len(value) > 1:
            yield PlanError(
                "A module has one way of recomputing for all its stages where there are several modules.",
                where=f"--fix {key}",
                seen=",".join(value),
                allowed="none, selective or full",
            )
        elif own == "microbatches" and job.batch % value:
            yield PlanError(
                "The batch cannot be cut into this many equal microbatches.",
                where="--fix microbatches",
                seen=f"batch {job.batch}, microbatches {value}",
                allowed="a divisor of the batch",
            )
        elif own == "schedule" and FAMILIES[value].placement(4) != linear(4):
            yield PlanError(
                "Several modules are planned with a stage a lane, which this schedule is not made for.",
                where="--fix schedule",
                seen=value,
                allowed=", ".join(name for name in sorted(FAMILIES) if FAMILIES[name].placement(4) == linear(4)),
            )
