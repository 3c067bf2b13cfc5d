"""Checks of constraints before a search: whether they leave something to consider, and the reason if not."""

from __future__ import annotations

from pipefit.errors import PlanError
from pipefit.plan.candidates.shard_choices import fixed_style
from pipefit.plan.candidates.space import divisors_of, families_only, iter_candidates
from pipefit.plan.request.constraints import Constraints, check_expert_constraints
from pipefit.plan.request.context_parts import check_context
from pipefit.plan.request.expert_parts import check_row_parts
from pipefit.plan.request.sliceable import check_slices
from pipefit.plan.request.state_groups import check_state_group
from pipefit.plan.slicing.cuts import check_number
from pipefit.plan.types import Job
from pipefit.schedule.families import FAMILIES


def check_space(job: Job, layers: int, devices: int, constraints: Constraints) -> None:
    """Raise PlanError, with the reason, if the constraints leave nothing to consider."""
    constraints = families_only(constraints)
    check_expert_constraints(constraints)
    microbatches = constraints.microbatches or 1
    if job.batch % microbatches:
        raise PlanError(
            "The batch cannot be cut into this many equal microbatches.",
            where="--fix microbatches",
            seen=f"batch {job.batch}, microbatches {microbatches}",
            allowed=", ".join(map(str, divisors_of(job.batch)[:12])),
        )
    replicas, lanes = constraints.replica_count, 1
    stages = constraints.stage_count or 1
    axes = {"context": constraints.context_size, "expert": constraints.expert_size}
    more = [name for name, size in axes.items() if size > 1]
    if constraints.lane_of_stage is not None:
        lanes = max(constraints.lane_of_stage) + 1
    elif constraints.schedule is not None or stages > 1:
        lanes = _lanes_for(stages, constraints)
    needed = replicas * lanes * constraints.devices_per_replica
    if needed > devices:
        raise PlanError(
            "The fixes need more devices than the cluster has.",
            where=f"--fix {', '.join(('replicas', 'stages', *more, 'shards'))}",
            seen=f"{' x '.join(map(str, (replicas, lanes, *map(axes.get, more), constraints.shard_count)))} = {needed}",
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
    _check_space_slices(job, constraints)
    _check_space_groups(devices, constraints)
    if next(iter_candidates(job, layers, devices, 1, constraints), None) is None:
        used = constraints.devices
        raise PlanError(
            "No plan obeys all these fixes.",
            where="--fix",
            seen=", ".join(constraints.to_mapping()),
            next_step=f"no grid of replicas x stages has exactly {used} devices" if used else "drop one of them",
        )


def _lanes_for(stages: int, constraints: Constraints) -> int:
    """Return the fewest lanes on which an allowed schedule places this number of stages; `stages` if none does.

    A single lane runs only 1F1B unless a schedule is constrained: see `_schedules_by_placement`.
    """
    names = list(FAMILIES) if constraints.schedule is None else [constraints.schedule]
    fits = (
        lanes
        for lanes in range(2 if constraints.schedule is None else 1, stages)
        if any(len(FAMILIES[n].placement(lanes)) == stages for n in names)
    )
    return next(fits, stages)


def _check_space_groups(devices: int, constraints: Constraints) -> None:
    """Raise PlanError for a bad size of groups, and if there are too few devices for several groups."""
    size, limit = constraints.state_group or 0, devices // constraints.shard_devices
    replicas = constraints.replicas or (1,) * size
    check_state_group(size, constraints.sharded_state, replicas, constraints.context_size, "--fix state_group")
    if constraints.replicas is None and 2 * size > limit:
        raise PlanError(
            "Several groups that shard state need more devices than the cluster has.",
            where="--fix state_group",
            seen=f"2 groups of {size}, {limit} replicas at most",
            allowed=(f"at most {limit // 2}" if limit > 3 else "all")
            + (f"; or replicas={size} as well, for one group of all" if size <= limit else ""),
        )


def _check_space_slices(job: Job, constraints: Constraints) -> None:
    """Raise PlanError if rows or sequences cannot be cut over the constrained shards or into the constrained slices."""
    shards = constraints.shards or (1,)
    replicas, expert = constraints.replicas or (1,), constraints.expert_size
    check_row_parts(job, constraints.microbatches, replicas, constraints.sharding, shards, expert, "--fix ")
    slices_wanted = constraints.slices or 1
    lengths = slices_wanted if isinstance(slices_wanted, tuple) else ()
    slice_count = slices_wanted if isinstance(slices_wanted, int) else len(lengths)
    check_context(constraints.context_size, job, constraints.sharding or "none", slice_count, "--fix context")
    check_slices(
        lengths if constraints.context_size == 1 else (),
        job.sequence // constraints.context_size,
        shards,
        fixed_style(shards, constraints),
        "--fix slices" if lengths else "--seq and shards",
    )
    if isinstance(slices_wanted, int):
        check_number(job.sequence, slices_wanted, constraints.slice_multiple or 1, "--fix slices")
