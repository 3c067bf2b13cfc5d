"""The checked space of a search, before sequences are sliced."""

from __future__ import annotations

from pipefit.cluster.topology import device_count
from pipefit.plan.candidates.grid import CandidateGrid
from pipefit.plan.candidates.space import iter_base_grids
from pipefit.plan.candidates.space_checks import check_space
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.sequence_length import check_length
from pipefit.plan.request.sliceable import check_sliceable, document_obstacles
from pipefit.plan.types import Job


def list_base_grids(context: PlannerContext, job: Job, constraints: Constraints) -> list[CandidateGrid]:
    """Return the space before sequences are sliced, after checks of the job and the constraints."""
    count, layers = device_count(context.cluster), len(context.only_module.layers)
    check_space(job, layers, count, constraints)
    check_length(context.only_module, context.model, job.sequence, "--seq")
    if constraints.slices not in (None, 1, (job.sequence,)):
        check_sliceable(context.model, "--fix slices")
    for error in document_obstacles(context.model, "--documents") if job.documents == "apart" else ():
        raise error
    return list(iter_base_grids(job, layers, count, len(context.cluster.hosts), constraints, context.layer_cutter))
