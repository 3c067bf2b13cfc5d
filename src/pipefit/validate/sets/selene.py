"""Selene: four GPT models with full recomputation, and with selective recomputation and sequence parallelism.

Korthikanti et al., arXiv 2205.05198. Iteration times are measured; each model is predicted from a fit to the others.
Memory figures are that paper's formulas. This project's own graphs, saved bytes and simulator reproduce them without
fitted constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import fsum
from typing import Any

import numpy as np

from pipefit.codec import load_text
from pipefit.cost.comm.network import Network
from pipefit.cost.static_memory import static_parts
from pipefit.cost.types import Array
from pipefit.errors import FormatError
from pipefit.model.graph import Graph
from pipefit.optimizers import DEFAULT, find_optimizer
from pipefit.schedule import ScheduleProblem, find_family, uniform_costs
from pipefit.schedule.problem import looped_placement
from pipefit.simulate import simulate_schedule
from pipefit.validate.collectives import MeasuredAllReduces
from pipefit.validate.files import check_positive, shipped_collectives, shipped_text
from pipefit.validate.fitting import fit_constants, log_jacobian
from pipefit.validate.gpt import GptSizes, layer_graphs
from pipefit.validate.kernels import GpuRates, KernelCosts
from pipefit.validate.megatron import MegatronRun, cluster_of, costs_of, time_of, with_waiting_sends
from pipefit.validate.memory import Scores, kept_bytes, matrix_elements
from pipefit.validate.records import ErrorTarget, ValidationResult, ValidationRow, absolute_errors, mean_or_zero

name = "selene"
FILE = "selene_a100.json"
GIB = 2**30
FULL, SELECTIVE = "full_recompute", "selective_recompute_sequence_parallel"

MEMORY_QUANTITIES = ("parameters_and_optimizer", "activations_no_recompute", "activations_selective_sequence_parallel")

FITTED_SHARES = ("matmul_share", "memory_share")
START_SHARES = (0.85, 0.8)
"""Start of the fit: large matrix products on A100 reach about 85 % of the peak, copies 80 % of the bandwidth."""

UPPER_SHARES = (0.95, 0.95)
PRIOR_WEIGHT = 0.3
"""Weight of the constants' prior: each is known to about a tenth beforehand, and rows to about three hundredths."""

MODES: Mapping[str, tuple[bool, Scores, bool]] = {
    "none": (False, "softmax and dropout", False),
    "sequence_parallel": (True, "softmax and dropout", False),
    "selective": (False, "made again", False),
    "selective_sequence_parallel": (True, "made again", False),
    "full": (False, "made again", True),
}
"""Mode -> (sequence parallelism, saved scores, is only the layer's input saved)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedMachine:
    """The published machine."""

    name: str
    peak_flops_fp16: float
    memory_bandwidth_bytes_per_s: float
    nvlink_bytes_per_s_each_way: float
    internode_bytes_per_s_per_gpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCase:
    """One published model."""

    model: str
    hidden: int
    feedforward: int
    heads: int
    layers: int
    sequence: int
    tp: int
    pp: int
    dp: int
    global_batch: int
    micro_batch: int
    interleaving: int
    iteration_s: Mapping[str, float]
    memory_gib: Mapping[str, float]
    activation_percent_of_baseline: Mapping[str, float]

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.micro_batch * self.dp)

    def gpt_sizes(self) -> GptSizes:
        sizes = {field.name: getattr(self, field.name) for field in fields(GptSizes) if hasattr(self, field.name)}
        return GptSizes(**sizes)

    def megatron_run(self, mode: str) -> MegatronRun:
        return MegatronRun(
            model=self.gpt_sizes(),
            shards=self.tp,
            replicas=self.dp,
            lanes=self.pp,
            turns=self.interleaving,
            micro_batch=self.micro_batch,
            microbatches=self.microbatches,
            sequence_parallel=mode == SELECTIVE,
            recompute="full" if mode == FULL else "none",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModels:
    """Contents of the file."""

    source: str
    machine: PublishedMachine
    cases: tuple[PublishedCase, ...]
    note: str


def read_models(text: str, where: str = FILE) -> PublishedModels:
    """Read and check the file. Raises FormatError if it is damaged."""
    published = load_text(PublishedModels, text, where)
    for case in published.cases:
        case_where = f"{where}: {case.model}"
        check_positive(
            {name: getattr(case, name) for name in ("hidden", "heads", "layers", "tp", "pp", "dp")}, case_where
        )
        check_positive({**case.iteration_s, **case.memory_gib, **case.activation_percent_of_baseline}, case_where)
        if case.layers % (case.pp * case.interleaving) or case.heads % case.tp:
            raise FormatError(
                "The model cannot be cut evenly.",
                where=case_where,
                seen=f"{case.layers} layers, {case.heads} heads, tp {case.tp}, pp {case.pp} x {case.interleaving}",
            )
        for part, wanted in (("iteration_s", (FULL, SELECTIVE)), ("memory_gib", MEMORY_QUANTITIES)):
            for key in wanted:
                if key not in getattr(case, part):
                    raise FormatError("A published number is missing.", where=f"{case_where}: {part}", allowed=key)
    return published


def results() -> tuple[ValidationResult, ...]:
    """Predict iteration times with one model left out at a time, and memory by formula."""
    published = read_models(shipped_text(FILE))
    return time_result(published, shipped_collectives()), memory_result(published)


def time_result(published: PublishedModels, collectives: MeasuredAllReduces) -> ValidationResult:
    """Predict every model's times with constants fitted to the other models."""
    points = [(case, mode) for case in published.cases for mode in (FULL, SELECTIVE)]
    measured = np.array([case.iteration_s[mode] for case, mode in points])
    gpu = GpuRates(
        peak_flops_per_s=published.machine.peak_flops_fp16,
        memory_bytes_per_s=published.machine.memory_bandwidth_bytes_per_s,
    )

    def predict_times(values: Array, chosen: Sequence[int]) -> Array:
        reached: dict[str, Any] = dict(zip(FITTED_SHARES, map(float, values), strict=True))
        now = replace(gpu, **reached)
        return np.array([_time_s(*points[index], now, published.machine, collectives) for index in chosen])

    everything = range(len(points))
    jacobian = log_jacobian(lambda values: predict_times(values, everything), START_SHARES)
    rows: list[ValidationRow] = []
    fits: list[Array] = []
    for case in published.cases:
        case_rows = [index for index in everything if points[index][0] is case]
        training_rows = [index for index in everything if index not in case_rows]
        values = fit_constants(
            lambda values, training_rows=training_rows: predict_times(values, training_rows),  # type: ignore[misc]
            measured[training_rows].tolist(),
            START_SHARES,
            jacobian[training_rows],
            most=UPPER_SHARES,
            pull=PRIOR_WEIGHT,
        )
        fits.append(values)
        for index, time_s in zip(case_rows, predict_times(values, case_rows), strict=True):
            rows.append(
                ValidationRow(
                    name=f"{case.model} {points[index][1]}", published=measured[index], predicted=float(time_s)
                )
            )
    off = absolute_errors(rows)
    return ValidationResult(
        set=name,
        quantity="iteration time",
        unit="s",
        source=published.source,
        split="leave one model out: each model's rows are predicted with constants fitted to the other three models",
        fitted={key: tuple(float(values[position]) for values in fits) for position, key in enumerate(FITTED_SHARES)},
        constants=len(FITTED_SHARES),
        rows=tuple(rows),
        summary={"mean error": mean_or_zero(off), "largest error": max(off)},
        targets=(
            ErrorTarget(what="mean error", reached=mean_or_zero(off), limit=0.04),
            ErrorTarget(what="largest error", reached=max(off), limit=0.09),
        ),
        notes=("frozen: data sheet of the machine, all-reduce table of a100_nvlink_all_reduce.csv, tile shares",),
    )


def memory_result(published: PublishedModels) -> ValidationResult:
    """Predict parameters with optimizer, and activations, by this project's graphs and rules."""
    rows = []
    for case in published.cases:
        rows += _memory_rows(case)
    off = absolute_errors(rows)
    return ValidationResult(
        set=name,
        quantity="memory by formula",
        unit="GiB",
        source=published.source,
        split="nothing is fitted",
        fitted={},
        constants=0,
        rows=tuple(rows),
        summary={
            "largest error": max(off),
            "largest difference of activation percentages, in points": percent_difference(published),
        },
        targets=(ErrorTarget(what="largest error", reached=max(off), limit=0.001),),
        notes=("kept values: this project's saved-bytes rules on its own Megatron program; see validate/memory.py",),
    )


def _memory_rows(case: PublishedCase) -> list[ValidationRow]:
    elements = case.layers / case.pp * matrix_elements(_device_graph(case, "none"))
    parts = static_parts(elements, 0, 1.0, "bfloat16", find_optimizer(DEFAULT))
    predicted = {
        MEMORY_QUANTITIES[0]: fsum(value for part, value in parts.items() if part != "workspace"),
        MEMORY_QUANTITIES[1]: peak_bytes(case, "none"),
        MEMORY_QUANTITIES[2]: peak_bytes(case, "selective_sequence_parallel"),
    }
    return [
        ValidationRow(name=f"{case.model} {key}", published=case.memory_gib[key], predicted=value / GIB)
        for key, value in predicted.items()
    ]


def peak_bytes(case: PublishedCase, mode: str) -> float:
    """Return the activation bytes at the peak of the first lane, simulated on the published schedule."""
    placement = looped_placement(case.pp, case.interleaving)
    costs = uniform_costs(placement)
    held = float(layer_bytes(case, mode) * case.layers // len(placement))
    actions = {key: replace(table, held_bytes=table.held_bytes * held) for key, table in costs.actions.items()}
    schedule = find_family("interleaved-1f1b")(ScheduleProblem(placement=placement, microbatches=case.microbatches))
    return float(simulate_schedule(schedule, replace(costs, actions=actions)).peak_bytes[0])


def layer_bytes(case: PublishedCase, mode: str) -> int:
    """Return the saved bytes of one layer and microbatch on one device."""
    _, scores, full = MODES[mode]
    symbols = {"B": case.micro_batch, "T": case.sequence, "S": case.sequence // case.tp}
    return kept_bytes(_device_graph(case, mode), symbols, 2, scores, full)


def percent_difference(published: PublishedModels) -> float:
    """Return the largest difference, in percentage points, between the published percentages of the baseline and these
    rules."""
    return max(
        abs(100.0 * layer_bytes(case, mode) / layer_bytes(case, "none") - percent)
        for case in published.cases
        for mode, percent in case.activation_percent_of_baseline.items()
    )


def _device_graph(case: PublishedCase, mode: str) -> Graph:
    return layer_graphs(case.gpt_sizes(), case.tp, MODES[mode][0])[0]


def _time_s(
    case: PublishedCase, mode: str, gpu: GpuRates, machine: PublishedMachine, collectives: MeasuredAllReduces
) -> float:
    run = case.megatron_run(mode)
    cluster = cluster_of(
        run.total_devices,
        inside_bytes_per_s=machine.nvlink_bytes_per_s_each_way,
        between_bytes_per_s=machine.internode_bytes_per_s_per_gpu,
    )
    layers = KernelCosts(gpu, collectives, attention_again=mode == SELECTIVE)
    costs = with_waiting_sends(costs_of(run, Network(cluster), layers, collectives))
    return time_of(run, costs).makespan_s
