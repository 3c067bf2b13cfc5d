"""Fit kernel constants and per-shape factors to iteration times of Megatron-like runs.

Seven physical constants give the speed of a machine's kernels, links and optimizer. A layer shape (hidden size, tensor
parallelism, micro-batch) in the fitted rows gets two more factors, on its layer and on its head and embedding. They
stand for a measured profile of that shape. Shapes outside the fitted rows have no factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipefit.cost.comm.network import Network
from pipefit.cost.compute.layer_query import LayerQuery
from pipefit.cost.compute.roofline import LayerCost
from pipefit.cost.types import Array, CostTable
from pipefit.validate.collectives import MeasuredAllReduces
from pipefit.validate.fitting import fit_constants, log_jacobian
from pipefit.validate.gpt import GptSizes
from pipefit.validate.kernels import GpuRates, KernelCosts
from pipefit.validate.megatron import MegatronRun, cluster_of, costs_of, time_of

MeasuredCase = tuple[int, int, int, int, int]
"""(hidden, TP, micro-batch, PP, DP)."""

LayerShape = tuple[int, int, int]
"""(hidden, TP, micro-batch)."""

VOCABULARY = 50257
"""Vocabulary of GPT-2, not padded: the publication's default. It is odd, so its matrix products are not aligned."""

START_CONSTANTS: Mapping[str, float] = {
    "launch_s": 50e-6,
    "matmul_share": 0.8,
    "memory_share": 0.75,
    "unaligned_share": 0.5,
    "collective_s": 50e-6,
    "step_s_per_parameter": 20e-12,
    "stage_bytes_per_s": 20e9,
}
"""Start of each constant: kernel launches of eager PyTorch, shares of data-sheet rates, the start of a collective, an
optimizer step of about 30 bytes a parameter, and the link between stages."""

CONSTANTS = tuple(START_CONSTANTS)
UPPER_LIMITS = tuple(0.95 if key.endswith("share") else float("inf") for key in CONSTANTS)
"""Upper limits of the constants: no kernel reaches its full data-sheet rate."""

CALIBRATION_PRIOR_WEIGHT = 0.3
"""Weight of the constants' prior: each is known to about a third beforehand, and rows to about a tenth."""

OUTLIER = 0.1
"""Residuals beyond 10 % have reduced weight in the fit of the seven constants, because shapes have their own
factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSample:
    """One published row."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tp: int
    dp: int
    pp: int
    published_s: float

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def layer_shape(self) -> LayerShape:
        return self.hidden, self.tp, self.micro_batch

    @property
    def shape_key(self) -> MeasuredCase:
        return self.hidden, self.tp, self.micro_batch, self.pp, self.dp

    @property
    def comparison_group(self) -> tuple[int, ...]:
        """Common key of comparable rows: machine, batch and model."""
        return self.gpus, self.global_batch, self.hidden, self.heads, self.layers, self.sequence

    @property
    def row_label(self) -> str:
        return (
            f"{self.gpus} GPUs, hidden {self.hidden}, {self.layers} layers, batch {self.global_batch}: "
            f"TP {self.tp}, DP {self.dp}, PP {self.pp}, micro-batch {self.micro_batch}"
        )

    def megatron_run(self) -> MegatronRun:
        model = GptSizes(
            hidden=self.hidden,
            feedforward=4 * self.hidden,
            heads=self.heads,
            layers=self.layers,
            sequence=self.sequence,
            vocabulary=VOCABULARY,
        )
        return MegatronRun(
            model=model,
            shards=self.tp,
            replicas=self.dp,
            lanes=self.pp,
            micro_batch=self.micro_batch,
            microbatches=self.microbatches,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCalibration:
    """Fitted constants and factors."""

    constants: tuple[float, ...] = tuple(START_CONSTANTS.values())
    "Constants in the order of `CONSTANTS`."
    body: Mapping[LayerShape, float] = field(default_factory=dict)
    "Factors on the time of a transformer layer, by shape."
    ends: Mapping[LayerShape, float] = field(default_factory=dict)
    "Factors on the time of head and embedding, by shape."

    @property
    def fitted_count(self) -> int:
        """Number of fitted values."""
        return len(self.constants) + len(self.body) + len(self.ends)

    def constants_only(self) -> FittedCalibration:
        """Return this calibration without factors."""
        return FittedCalibration(constants=self.constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogJacobians:
    """d log(time) / d log(value) at the start, by corner row."""

    constants: Mapping[PublishedSample, Array]
    factors: Mapping[PublishedSample, Array]
    "Derivatives in the row's own two factors."


class SampleEvaluator:
    """Predict times of samples under a calibration, with the project's cost table and simulator."""

    def __init__(self, collectives: MeasuredAllReduces) -> None:
        self.collectives = collectives

    def times_s(self, samples: Sequence[PublishedSample], calibration: FittedCalibration) -> Array:
        """Return the seconds of one iteration of every sample. Rows that differ only in the batch share a cost
        table."""
        values = dict(zip(CONSTANTS, calibration.constants, strict=True))
        kernels: dict[str, Any] = {key: value for key, value in values.items() if key in GpuRates.__dataclass_fields__}
        speed = values["stage_bytes_per_s"]
        layers: dict[LayerShape, _ScaledCosts] = {}
        networks: dict[int, Network] = {}
        tables: dict[tuple[MeasuredCase, int], CostTable] = {}
        times = []
        for sample in samples:
            shape, table = sample.layer_shape, (sample.shape_key, sample.layers)
            if shape not in layers:
                costs = KernelCosts(replace(GpuRates(), **kernels), self.collectives)
                layers[shape] = _ScaledCosts(costs, calibration.body.get(shape, 1.0), calibration.ends.get(shape, 1.0))
            run = sample.megatron_run()
            if run.total_devices not in networks:
                cluster = cluster_of(run.total_devices, inside_bytes_per_s=speed, between_bytes_per_s=speed)
                networks[run.total_devices] = Network(cluster)
            if table not in tables:
                step = values["step_s_per_parameter"]
                tables[table] = costs_of(run, networks[run.total_devices], layers[shape], self.collectives, step)
            times.append(time_of(run, tables[table]).makespan_s)
        return np.array(times)


class _ScaledCosts:
    """Kernel costs times the factors of one shape. A graph with attention is a layer; other graphs are head or
    embedding."""

    def __init__(self, costs: KernelCosts, body: float, ends: float) -> None:
        self.costs = costs
        self.notes: tuple[str, ...] = costs.notes
        self.body, self.ends = body, ends
        self._known: dict[int, LayerCost] = {}

    def layer_cost(self, query: LayerQuery) -> LayerCost:
        """Return the scaled cost of the layer. One object serves one shape, so the cache key is the graph alone."""
        graph = query.graph
        if id(graph) not in self._known:
            cost = self.costs.layer_cost(query)
            factor = self.body if any(op.kind == "attention" for op in graph.operators) else self.ends
            self._known[id(graph)] = replace(
                cost,
                forward_s=cost.forward_s * factor,
                input_s=cost.input_s * factor,
                weight_s=cost.weight_s * factor,
                fused_s=None if cost.fused_s is None else cost.fused_s * factor,
            )
        return self._known[id(graph)]


def corner_jacobians(corners: Sequence[PublishedSample], evaluator: SampleEvaluator) -> LogJacobians:
    """Return the Jacobians of these rows, from predictions alone."""
    start = tuple(START_CONSTANTS.values())
    constants = log_jacobian(lambda v: evaluator.times_s(corners, FittedCalibration(constants=tuple(v))), start)
    shapes = {sample.layer_shape for sample in corners}

    def scaled_times(values: Array) -> Array:
        body, ends = (dict.fromkeys(shapes, float(value)) for value in values)
        return evaluator.times_s(corners, FittedCalibration(body=body, ends=ends))

    factors = log_jacobian(scaled_times, (1.0, 1.0))
    return LogJacobians(
        constants=dict(zip(corners, constants, strict=True)), factors=dict(zip(corners, factors, strict=True))
    )


def fit_calibration(
    corners: Sequence[PublishedSample], evaluator: SampleEvaluator, known: LogJacobians
) -> FittedCalibration:
    """Fit the constants, then the factors, to these rows alone."""
    published = [sample.published_s for sample in corners]
    constants = fit_constants(
        lambda values: evaluator.times_s(corners, FittedCalibration(constants=tuple(map(float, values)))),
        published,
        tuple(START_CONSTANTS.values()),
        np.stack([known.constants[sample] for sample in corners]),
        reach=OUTLIER,
        most=UPPER_LIMITS,
        pull=CALIBRATION_PRIOR_WEIGHT,
    )
    plain = FittedCalibration(constants=tuple(map(float, constants)))
    shapes = sorted({sample.layer_shape for sample in corners})
    matrix = np.zeros((len(corners), 2 * len(shapes)))
    for row, sample in enumerate(corners):
        column = 2 * shapes.index(sample.layer_shape)
        matrix[row, column : column + 2] = known.factors[sample]

    def with_factors(values: Array) -> FittedCalibration:
        body, ends = (dict(zip(shapes, map(float, values[side::2]), strict=True)) for side in (0, 1))
        return replace(plain, body=body, ends=ends)

    factors = fit_constants(
        lambda values: evaluator.times_s(corners, with_factors(values)), published, [1.0] * (2 * len(shapes)), matrix
    )
    return with_factors(factors)
