"""The training on every cluster size: the fastest layout that fits, its days, cost and MFU, and the answers among them.

The layout search of the planner evaluates each size. The passes after it, which gain a few per cent for one cluster,
are left to `pipefit plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipefit.cluster import Cluster, open_cluster
from pipefit.cluster.files import check_peaks
from pipefit.errors import PlanError
from pipefit.optimizers.sharded_state import STATES, shards_optimizer
from pipefit.plan.assemble.predict import step_flops
from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.evaluate.search_progress import SearchObserver, SearchTracker
from pipefit.plan.passes.search import search_plans
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.expert_parts import EXPERT
from pipefit.plan.request.narrow_blocks import check_blocks
from pipefit.plan.sizing.request import ClusterSize, SizingRequest, cluster_sizes
from pipefit.precision import PRODUCT_TYPE
from pipefit.units import format_bytes

DAY_S, HOUR_S = 86400.0, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedTraining:
    """The training on one cluster."""

    size: ClusterSize
    step_s: float | None = None
    "Of the fastest layout that fits; None if no layout does."
    days: float | None = None
    device_hours: float | None = None
    cost: float | None = None
    "In the currency of the prices; None without prices."
    mfu: float | None = None
    "Model FLOPs over the peak of all devices in the precision of the job, 0 to 1."
    memory_share: float | None = None
    "Peak over limit of the fullest device."
    layout: str = ""
    "The layout in words, or the reason why none fits."


@dataclass(frozen=True, slots=True)
class SizingAnswer:
    """An answer to a question about the sizes; None if no size is one."""

    question: str
    training: SizedTraining | None


def size_trainings(
    request: SizingRequest, constraints: Constraints = NO_CONSTRAINTS, progress: SearchObserver | None = None
) -> Iterator[SizedTraining]:
    """Yield the training on every cluster size, device by device, from small to large.

    Raises PlanError for a model of several modules or a contradiction, and ClusterError for an unknown device or a
    device without a peak for the precision.
    """
    if len(request.model.modules) > 1:
        raise PlanError(
            "Only a model of one module can be sized.",
            where="--model",
            seen=", ".join(module.name for module in request.model.modules),
            next_step="plan it on one cluster after another: pipefit plan",
        )
    sizes = [s for name in request.devices for s in cluster_sizes(name, request.max_devices, request.network)]
    clusters = [open_cluster(size.cluster) for size in sizes]
    for cluster in clusters:
        check_peaks(cluster, request.job.precision, "--precision")
    check_blocks(request.model, request.job.precision, "--precision")
    for size, cluster in zip(sizes, clusters, strict=True):
        yield _size_training(request, size, cluster, constraints, progress)


def _size_training(
    request: SizingRequest,
    size: ClusterSize,
    cluster: Cluster,
    constraints: Constraints,
    progress: SearchObserver | None,
) -> SizedTraining:
    """Return the training on one cluster."""
    job = request.job
    context = PlannerContext(request.model, cluster, cluster_source=size.cluster)
    context.tracker = SearchTracker(progress)
    context.tracker.start_pass(f"planning {size.cluster}")
    try:
        result = search_plans(context, job, constraints, top=1)
    except PlanError as error:
        return SizedTraining(size=size, layout=error.what)
    if not result.fitting:
        return SizedTraining(size=size, layout=_missing_words(result))
    best = result.fitting[0]
    plan = build_plan(request.model, cluster, job, best.decisions, context=context)
    peak = next(iter(cluster.kinds.values())).peak_flops_per_s[PRODUCT_TYPE[job.precision]]
    return _sized_plan(request, size, best, step_flops(plan, request.model) / peak)


def _sized_plan(request: SizingRequest, size: ClusterSize, best: EvaluatedPlan, peak_s: float) -> SizedTraining:
    """Return the figures of a plan; `peak_s` is the time of the model FLOPs of a step on one device at its peak."""
    total_s = best.step_s * request.steps
    device_hours = size.devices * total_s / HOUR_S
    return SizedTraining(
        size=size,
        step_s=best.step_s,
        days=total_s / DAY_S,
        device_hours=device_hours,
        cost=None if request.prices is None else device_hours * request.prices[size.device],
        mfu=peak_s / best.step_s / size.devices,
        memory_share=best.peak_bytes / best.limit_bytes,
        layout=layout_words(best.decisions),
    )


def layout_words(decisions: ParallelConfig) -> str:
    """Return a layout by the names of its axes, `dp=8 pp=2 zero=1, 16 microbatches, 1f1b, recompute full`. The plan of
    one device without choices is `one device`."""
    shards = len(decisions.shards)
    names = {
        "dp": len(decisions.replicas),
        "tp": 1 if decisions.sharding == EXPERT else shards,
        "cp": decisions.context,
        "ep": shards if decisions.sharding == EXPERT else decisions.expert * shards if decisions.expert > 1 else 1,
        "pp": decisions.stage_count,
    }
    axes = [f"{name}={count}" for name, count in names.items() if count > 1]
    if shards_optimizer(decisions.sharded_state):
        axes.append(f"zero={STATES.index(decisions.sharded_state)}")
    parts = [" ".join(axes) or "one device"]
    if decisions.microbatches > 1:
        parts.append(f"{decisions.microbatches} microbatches")
    if decisions.slices:
        parts.append(f"{len(decisions.slices)} slices")
    if decisions.stage_count > 1:
        parts.append(decisions.schedule)
    if set(decisions.recompute) != {"none"}:
        parts.append(f"recompute {'/'.join(dict.fromkeys(decisions.recompute))}")
    return ", ".join(parts)


def _missing_words(result: SearchResult) -> str:
    closest = result.closest_misfit
    if closest is None:
        return "no layout fits"
    return f"no layout fits: {format_bytes(closest.peak_bytes - closest.limit_bytes)} a device are missing"


def answer_sizes(trainings: Sequence[SizedTraining], deadline_s: float | None) -> tuple[SizingAnswer, ...]:
    """Return the smallest cluster on which the training fits, the smallest in time, the cheapest and the fastest.

    With a deadline, the cheapest is the cheapest in time. Without prices there is no cheapest.
    """
    fitting = [training for training in trainings if training.days is not None]
    timely = [t for t in fitting if deadline_s is None or (t.days or 0.0) * DAY_S <= deadline_s]
    answers = [SizingAnswer("smallest that fits", min(fitting, key=_by_devices, default=None))]
    if deadline_s is not None:
        answers.append(SizingAnswer("smallest in time", min(timely, key=_by_devices, default=None)))
    if any(training.cost is not None for training in fitting):
        words = "cheapest" if deadline_s is None else "cheapest in time"
        answers.append(SizingAnswer(words, min(timely, key=_by_cost, default=None)))
    answers.append(SizingAnswer("fastest", min(fitting, key=_by_days, default=None)))
    return tuple(answers)


def sizing_data(request: SizingRequest, trainings: Sequence[SizedTraining]) -> Mapping[str, object]:
    """Return the request and its results as JSON data."""
    from pipefit.codec import to_data

    answers = answer_sizes(trainings, request.deadline_s)
    return {
        "model": request.name,
        "job": to_data(request.job),
        "tokens": request.tokens,
        "steps": request.steps,
        "deadline_s": request.deadline_s,
        "trainings": [to_data(training) for training in trainings],
        "answers": {a.question: a.training.size.cluster if a.training else None for a in answers},
    }


def _by_devices(training: SizedTraining) -> tuple[float, float]:
    return training.size.devices, training.days or 0.0


def _by_cost(training: SizedTraining) -> tuple[float, float]:
    return training.cost or 0.0, training.days or 0.0


def _by_days(training: SizedTraining) -> tuple[float, float]:
    return training.days or 0.0, training.size.devices
