"""GH200: OPT-350M in float32 on 4 to 128 devices, predicted from the released profile of its layers and links.

Source: eth-easl/sailor. Its runtime, DeepSpeed's pipeline engine, sends and receives in sequence and computes nothing
meanwhile. The profile is the released one; only plans with micro-batch 8 are a fair test of time (see the file). Memory
is the sum of this project's saved bytes of an OPT layer with unfused attention, the released sizes for embedding and
head, 24 bytes a parameter as the publication states, and two constants fitted to five small plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipefit.codec import load_text
from pipefit.cost.types import ActionTable, Array, CostTable, EdgeCost
from pipefit.errors import FormatError
from pipefit.simulate import Timeline, simulate_schedule
from pipefit.validate.files import check_positive, shipped_text
from pipefit.validate.gpt import GptSizes, layer_graphs
from pipefit.validate.megatron import schedule_of, with_waiting_sends
from pipefit.validate.memory import kept_bytes
from pipefit.validate.records import ErrorTarget, ValidationResult, ValidationRow, absolute_errors, mean_or_zero

name = "gh200"
FILE = "gh200_opt350m.json"
MB, WIDTH = 1e6, 4
FAIR_MICRO_BATCH = 8
"""The micro-batch of the profile that the plans ran with."""

SMALL_MICRO_BATCH = 2
"""Memory is fitted on the plans up to this micro-batch."""

STATED_BYTES = 24
"""Bytes per parameter, as the publication states: model 4, optimizer 8, gradient 4, communication 4, framework's copy
4."""

OPT_350M = GptSizes(hidden=1024, feedforward=4096, heads=16, layers=24, sequence=2048, activation="relu")
DISTRUSTED = {"N4_D4": "its published gradient reduction repeats its iteration time"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """One measured plan. `dp` and `tp` are given per stage, and equal on all stages."""

    name: str
    nodes: int
    gpus_per_node: int
    num_pipelines_listed: int
    pp: int
    dp: tuple[int, ...]
    tp: tuple[int, ...]
    layers_per_stage: tuple[int, ...]
    micro_batch: int
    global_batch: int
    measured_iteration_s: float
    measured_gradient_reduce_s: float
    measured_peak_memory_bytes: int

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.dp[0] * self.micro_batch)

    def stage_layers(self) -> list[range]:
        """Return the layer indices of every stage."""
        stops = np.cumsum((0, *self.layers_per_stage)).tolist()
        return [range(start, stop) for start, stop in pairwise(stops)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """Released sizes of one layer, for micro-batch 1."""

    params_floats: int
    act_output_floats: int
    act_input_floats: int
    act_mem_floats: int
    params_bytes: int
    act_output_bytes: int
    act_input_bytes: int
    act_mem_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedProfile:
    """Contents of the file. `profile` is keyed [micro-batch][tp], an entry per layer: forward, backward, update, in
    seconds."""

    source: str
    about: str
    plans: tuple[MeasuredPlan, ...]
    profile: Mapping[str, Mapping[str, tuple[tuple[float, float, float], ...]]]
    layers: Mapping[str, Mapping[str, LayerSize]]
    links: Mapping[str, Mapping[str, tuple[tuple[float, float, float], float]]]


def read_profile(text: str, where: str = FILE) -> PublishedProfile:
    """Read and check the file. Raises FormatError if it is damaged."""
    published = load_text(PublishedProfile, text, where)
    for plan in published.plans:
        plan_where = f"{where}: {plan.name}"
        measured = ("measured_iteration_s", "measured_gradient_reduce_s", "measured_peak_memory_bytes")
        check_positive(
            {key: getattr(plan, key) for key in ("pp", "micro_batch", "global_batch", *measured)}, plan_where
        )
        micro, shards = str(plan.micro_batch), str(plan.tp[0])
        layers = published.profile.get(micro, {}).get(shards, ())
        if len(layers) != sum(plan.layers_per_stage) or len(published.layers.get(shards, {})) != len(layers):
            raise FormatError(
                "The profile does not have the plan's layers.",
                where=plan_where,
                seen=f"{len(layers)} layers for micro-batch {micro}, tp {shards}",
                allowed=f"{sum(plan.layers_per_stage)}",
            )
        if len({len(plan.dp), len(plan.tp), len(plan.layers_per_stage), plan.pp}) > 1 or len({*plan.dp, 0}) != 2:
            raise FormatError("The stages of the plan contradict each other.", where=plan_where, seen=f"dp {plan.dp}")
        if plan.global_batch % (plan.dp[0] * plan.micro_batch):
            raise FormatError("The batch cannot be cut into the plan's micro-batches.", where=plan_where)
    return published


def results() -> tuple[ValidationResult, ...]:
    """Predict iteration times and peak memory."""
    published = read_profile(shipped_text(FILE))
    return time_result(published), memory_result(published)


def time_result(published: PublishedProfile) -> ValidationResult:
    """Predict the times of all plans. The one constant, the slowdown of gradient reductions, is fitted on plans outside
    the test."""
    slowdown = reduction_slowdown(published)
    rows = []
    for plan in published.plans:
        fair = plan.micro_batch == FAIR_MICRO_BATCH
        part = "predicted" if fair else f"micro-batch {plan.micro_batch}: the profile is of other runs"
        predicted = simulate_measured(published, plan, slowdown).makespan_s
        rows.append(ValidationRow(name=plan.name, published=plan.measured_iteration_s, predicted=predicted, part=part))
    off = absolute_errors(rows)
    other_errors = [abs(row.relative_delta) for row in rows if row.part != "predicted"]
    return ValidationResult(
        set=name,
        quantity="iteration time",
        unit="s",
        source=published.source,
        split=(
            "one constant is fitted to the gradient-reduction times of plans with micro-batches below 8; "
            "the plans with micro-batch 8 are predicted; the others are reported apart"
        ),
        fitted={"reduction slowdown": (slowdown,)},
        constants=1,
        rows=tuple(rows),
        summary={
            "mean error, micro-batch 8": mean_or_zero(off),
            "largest error, micro-batch 8": max(off),
            "mean error, smaller micro-batches (apart)": mean_or_zero(other_errors),
        },
        targets=(ErrorTarget(what="mean error, micro-batch 8", reached=mean_or_zero(off), limit=0.03),),
        notes=("frozen: the released layer profile and link fits",),
    )


def memory_result(published: PublishedProfile) -> ValidationResult:
    """Predict peak memory, fitted to the plans with micro-batch 1 and 2."""
    small = [plan for plan in published.plans if plan.micro_batch <= SMALL_MICRO_BATCH]
    constant, passing = fit_memory(published, small)
    rows = [
        ValidationRow(
            name=plan.name,
            published=plan.measured_peak_memory_bytes / MB,
            predicted=peak_bytes(published, plan, constant, passing) / MB,
            part="fitted" if plan in small else "predicted",
        )
        for plan in published.plans
    ]
    off = absolute_errors(rows)
    under = max(0.0, -min(row.relative_delta for row in rows if row.part == "predicted"))
    return ValidationResult(
        set=name,
        quantity="peak memory",
        unit="MB",
        source=published.source,
        split=f"two constants are fitted to the {len(small)} plans with micro-batch 1 and 2; the others are predicted",
        fitted={"constant MB": (constant / MB,), "passing memory, layers' scores": (passing,)},
        constants=2,
        rows=tuple(rows),
        summary={"mean error": mean_or_zero(off), "largest error": max(off), "largest error below": under},
        targets=(
            ErrorTarget(what="mean error", reached=mean_or_zero(off), limit=0.02),
            ErrorTarget(what="largest error below", reached=under, limit=0.04),
        ),
        notes=(f"frozen: {STATED_BYTES} bytes a parameter; kept values by this project's rules: validate/memory.py",),
    )


def simulate_measured(published: PublishedProfile, plan: MeasuredPlan, slowdown: float = 1.0) -> Timeline:
    """Simulate the plan with its profile and links."""
    return simulate_schedule(schedule_of(plan.pp, 1, plan.microbatches), cost_table(published, plan, slowdown))


def cost_table(published: PublishedProfile, plan: MeasuredPlan, slowdown: float) -> CostTable:
    """Build the costs of every stage from the profile; sends and receives block the lane."""
    shards = str(plan.tp[0])
    profile, sizes = published.profile[str(plan.micro_batch)][shards], published.layers[shards]
    sums = [
        [math.fsum(profile[layer][column] for layer in stage) for stage in plan.stage_layers()] for column in range(3)
    ]
    gradients = [float(sum(sizes[str(layer)].params_bytes for layer in stage)) for stage in plan.stage_layers()]
    held = stage_bytes(published, plan)
    size = float(sizes["1"].act_output_bytes * plan.micro_batch)
    transfer_s = plan.tp[0] * size / host_bandwidth(published, plan.gpus_per_node, plan.tp[0] * size)
    transfer, none = np.array([[transfer_s]]), np.zeros((1, 1))
    edges = tuple(
        EdgeCost(
            source=stage,
            target=stage + 1,
            forward_s=transfer,
            backward_s=transfer,
            forward_port_s=transfer,
            backward_port_s=transfer,
            forward_bytes=none,
            backward_bytes=none,
        )
        for stage in range(plan.pp - 1)
    )
    costs = CostTable(
        actions={"F": _action_table(sums[0], held), "B": _action_table(sums[1], [-transfer for transfer in held])},
        edges=edges,
        reduce_s=np.array([slowdown * reduction_s(published, plan, size) for size in gradients]),
        gather_s=np.zeros(plan.pp),
        step_s=np.array(sums[2]),
        static_bytes=np.array([size / WIDTH * STATED_BYTES for size in gradients]),
    )
    return with_waiting_sends(costs, receives_too=True)


def stage_bytes(published: PublishedProfile, plan: MeasuredPlan) -> list[float]:
    """Return the saved bytes of one microbatch on one device, by stage."""
    shards = plan.tp[0]
    sizes = published.layers[str(shards)]
    symbols = {"B": plan.micro_batch, "T": OPT_350M.sequence, "S": OPT_350M.sequence // shards}
    layer = kept_bytes(layer_graphs(OPT_350M, shards, False)[0], symbols, WIDTH, "softmax")
    ends = {0, sum(plan.layers_per_stage) - 1}
    return [
        float(sum(sizes[str(i)].act_mem_bytes * plan.micro_batch if i in ends else layer for i in stage))
        for stage in plan.stage_layers()
    ]


def reduction_s(published: PublishedProfile, plan: MeasuredPlan, size: float) -> float:
    """Return the seconds of a ring all-reduce over the replicas. The devices of a host reduce their shards at the same
    time and share its network."""
    replicas, sharing = plan.dp[0], plan.tp[0]
    if replicas == 1:
        return 0.0
    step = sharing * size / replicas
    return 2 * (replicas - 1) * step / host_bandwidth(published, plan.gpus_per_node, step)


def reduction_slowdown(published: PublishedProfile) -> float:
    """Return published over ring time of gradient reductions: the geometric mean over plans below micro-batch 8 with
    several replicas and a trusted record."""
    ratios = []
    for plan in published.plans:
        if plan.micro_batch < FAIR_MICRO_BATCH and plan.dp[0] > 1 and plan.name not in DISTRUSTED:
            ring_s = float(cost_table(published, plan, 1.0).reduce_s.max())
            ratios.append(math.log(plan.measured_gradient_reduce_s / ring_s))
    return math.exp(mean_or_zero(ratios))


def host_bandwidth(published: PublishedProfile, devices: int, size: float) -> float:
    """Return the bytes per second between hosts when `devices` devices of a host send `size` bytes together. This is
    the released fit: a capped parabola in log2 of megabytes, constant below one megabyte."""
    (a, b, c), ceiling = published.links["inter"][str(devices)]
    log_mb = math.log2(max(1.0, size / MB))
    return min(ceiling, 1e9 * (a * log_mb * log_mb + b * log_mb + c))


def fit_memory(published: PublishedProfile, plans: Sequence[MeasuredPlan]) -> tuple[float, float]:
    """Fit (constant bytes, transient memory in units of one layer's scores) to the plans' peaks, neither of them
    negative. Transient memory is the memory of a layer's backward pass beyond the saved tensors."""
    from scipy.optimize import nnls

    known = np.array([peak_bytes(published, plan, 0.0, 0.0) for plan in plans])
    measured = np.array([float(plan.measured_peak_memory_bytes) for plan in plans])
    matrix = np.stack([np.ones(len(plans)), [score_bytes(plan) for plan in plans]], axis=1)
    scale = matrix.max(axis=0)
    solution, _ = nnls(matrix / scale, measured - known)
    constant, passing = solution / scale
    return float(constant), float(passing)


def peak_bytes(published: PublishedProfile, plan: MeasuredPlan, constant: float, passing: float) -> float:
    """Return the peak of the fullest lane by the simulator, plus the fitted constants."""
    return float(simulate_measured(published, plan).peak_bytes.max()) + constant + passing * score_bytes(plan)


def score_bytes(plan: MeasuredPlan) -> float:
    """Return the bytes of one layer's attention scores of one microbatch."""
    return float(WIDTH * plan.micro_batch * OPT_350M.heads // plan.tp[0] * OPT_350M.sequence**2)


def _action_table(times: Sequence[float], held: Sequence[float]) -> ActionTable:
    def action_column(values: Sequence[float]) -> Array:
        return np.array([[[value]] for value in values], dtype=np.float64)

    return ActionTable(time_s=action_column(times), held_bytes=action_column(held), peak_bytes=np.zeros((1, 1, 1)))
