"""vTrain: 1,440 iteration times of small GPT models on 2 to 8 A100, by tensor, data and pipeline parallelism.

Source: VIA-Research/vTrain, `data/ground_truth_single.csv`. The numbers come from a simulator with measured kernels,
not from timed runs: see docs/results/validation.md. Rows with equal (hidden, tensor parallelism, micro-batch) share the
same layer, so the split is by key (micro-batch, hidden, TP, DP, PP). Every quarter of the keys is fitted in turn and
predicts the other three.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipefit.errors import FormatError
from pipefit.validate.calibration import (
    CONSTANTS,
    FittedCalibration,
    MeasuredCase,
    PublishedSample,
    SampleEvaluator,
    corner_jacobians,
    fit_calibration,
)
from pipefit.validate.files import read_table, shipped_collectives, shipped_text
from pipefit.validate.records import ErrorTarget, ValidationResult, ValidationRow, absolute_errors, mean_or_zero

name = "vtrain"
FILE = "vtrain_a100_single_node.csv"
FILE_COLUMNS = (
    "gpus",
    "global_batch",
    "micro_batch",
    "hidden",
    "heads",
    "layers",
    "sequence",
    "tp",
    "dp",
    "pp",
    "iteration_ms",
)
SOURCE = "VIA-Research/vTrain, data/ground_truth_single.csv (MIT licence, Copyright its authors)"
SHUFFLED_FOLDS, SEED = 4, 0
"""Keys are shuffled with the seed and dealt into this number of parts."""

BEST_OF = 5


@dataclass(frozen=True, slots=True)
class ChoiceRegret:
    """Loss of choosing the best-predicted row instead of the best row of its group, as a share of the best."""

    first: tuple[float, ...]
    "Regret of the best-predicted row of every group."
    best_of_five: tuple[float, ...]
    "Regret of the best of the five best-predicted rows of every group."


def read_samples(text: str, where: str = FILE) -> tuple[PublishedSample, ...]:
    """Read the rows. Raises FormatError if a row is damaged or inconsistent."""
    samples = []
    for number, row in enumerate(read_table(text, FILE_COLUMNS, where), 1):
        integers = {key: int(row[key]) for key in FILE_COLUMNS[:-1]}
        row_where = f"{where}, row {number}"
        if any(integers[key] != row[key] for key in integers):
            raise FormatError("Sizes must be whole numbers.", where=row_where, seen=row)
        if integers["tp"] * integers["dp"] * integers["pp"] != integers["gpus"]:
            raise FormatError(
                "The parallel sizes do not multiply to the number of GPUs.",
                where=row_where,
                seen=f"tp {integers['tp']} x dp {integers['dp']} x pp {integers['pp']}, gpus {integers['gpus']}",
            )
        if integers["layers"] % integers["pp"] or integers["global_batch"] % (integers["dp"] * integers["micro_batch"]):
            raise FormatError("Layers or batch cannot be cut evenly.", where=row_where, seen=integers)
        samples.append(PublishedSample(**integers, published_s=row["iteration_ms"] * 1e-3))
    return tuple(samples)


def results() -> tuple[ValidationResult, ...]:
    """Return the four rotations over the quarters and, separately, hidden 2048 predicted from hidden 1024."""
    samples = read_samples(shipped_text(FILE))
    evaluator = SampleEvaluator(shipped_collectives())
    return split_result(samples, evaluator), size_result(samples, evaluator)


def deal_keys(samples: Sequence[PublishedSample], seed: int = SEED) -> tuple[frozenset[MeasuredCase], ...]:
    """Deal the keys into four parts."""
    keys = sorted({sample.shape_key for sample in samples})
    random.Random(seed).shuffle(keys)
    return tuple(frozenset(keys[part::SHUFFLED_FOLDS]) for part in range(SHUFFLED_FOLDS))


def split_result(samples: Sequence[PublishedSample], evaluator: SampleEvaluator, seed: int = SEED) -> ValidationResult:
    """Fit each quarter and predict the other three; figures are means over the four turns."""
    known = corner_jacobians(corner_samples(samples), evaluator)
    turns: list[tuple[list[ValidationRow], list[ValidationRow]]] = []
    calibrations: list[FittedCalibration] = []
    regrets: list[ChoiceRegret] = []
    plain_regrets: list[ChoiceRegret] = []
    for number, part in enumerate(deal_keys(samples, seed), 1):
        fitted_samples = [sample for sample in samples if sample.shape_key in part]
        held = [sample for sample in samples if sample.shape_key not in part]
        calibration = fit_calibration(corner_samples(fitted_samples), evaluator, known)
        calibrations.append(calibration)
        turns.append(
            (
                _predict_rows(held, evaluator, calibration, number),
                _predict_rows(held, evaluator, calibration.constants_only(), number),
            )
        )
        regrets.append(choice_regret(held, turns[-1][0]))
        plain_regrets.append(choice_regret(held, turns[-1][1]))
    rows = [row for turn, _ in turns for row in turn]
    mean_errors = [mean_or_zero(absolute_errors(turn)) for turn, _ in turns]
    firsts, fives = (
        [mean_or_zero(item.first) for item in regrets],
        [mean_or_zero(item.best_of_five) for item in regrets],
    )
    plain = [mean_or_zero(absolute_errors(turn)) for _, turn in turns]
    return ValidationResult(
        set=name,
        quantity="iteration time",
        unit="s",
        source=SOURCE,
        split=(
            f"the {len({s.shape_key for s in samples})} keys (micro-batch, hidden, TP, DP, PP) are shuffled "
            f"with seed {seed} "
            "and dealt into quarters; each quarter in turn is fitted, the other three are predicted"
        ),
        fitted={
            key: tuple(item.constants[position] for item in calibrations) for position, key in enumerate(CONSTANTS)
        },
        constants=max(item.fitted_count for item in calibrations),
        rows=tuple(rows),
        summary={
            "mean error": mean_or_zero(mean_errors),
            "mean error, worst quarter": max(mean_errors),
            "largest error": max(absolute_errors(rows)),
            "mean error of the physical constants alone": mean_or_zero(plain),
            "regret of the best-predicted, mean": mean_or_zero(firsts),
            "regret of the best-predicted, worst quarter": max(firsts),
            "regret of the best of five, mean": mean_or_zero(fives),
            "regret of the physical constants alone, mean": mean_or_zero(
                [mean_or_zero(item.first) for item in plain_regrets]
            ),
            "regret of the physical constants alone, best of five": mean_or_zero(
                [mean_or_zero(item.best_of_five) for item in plain_regrets]
            ),
            "groups of comparable rows": float(min(len(item.first) for item in regrets)),
            "median distance of a key's rows from a plane": plane_deviation(samples),
        },
        targets=(
            ErrorTarget(what="mean error, worst quarter", reached=max(mean_errors), limit=0.07),
            ErrorTarget(what="regret of the best-predicted, worst quarter", reached=max(firsts), limit=0.03),
            ErrorTarget(what="regret of the best of five, worst quarter", reached=max(fives), limit=0.005),
        ),
        notes=(
            f"fitted: {len(CONSTANTS)} physical constants, and for every (hidden, TP, micro-batch) of the fitted keys "
            "a factor of its layer and one of its head",
            "frozen: data sheet of A100, all-reduce table of a100_nvlink_all_reduce.csv, tile shares",
        ),
    )


def size_result(samples: Sequence[PublishedSample], evaluator: SampleEvaluator) -> ValidationResult:
    """Fit hidden 1024 and predict hidden 2048, another model size, with physical constants alone."""
    small = [sample for sample in samples if sample.hidden == 1024]
    large = [sample for sample in samples if sample.hidden == 2048]
    calibration = fit_calibration(
        corner_samples(small), evaluator, corner_jacobians(corner_samples(small), evaluator)
    ).constants_only()
    rows = _predict_rows(large, evaluator, calibration, 1)
    off, lost = absolute_errors(rows), choice_regret(large, rows)
    return ValidationResult(
        set=name,
        quantity="iteration time, hidden 1024 to 2048",
        unit="s",
        source=SOURCE,
        split="fitted to all rows of hidden 1024, all rows of hidden 2048 predicted",
        fitted={key: (calibration.constants[position],) for position, key in enumerate(CONSTANTS)},
        constants=len(CONSTANTS),
        rows=tuple(rows),
        summary={
            "mean error": mean_or_zero(off),
            "largest error": max(off),
            "regret of the best-predicted, mean": mean_or_zero(lost.first),
            "regret of the best of five, mean": mean_or_zero(lost.best_of_five),
        },
        targets=(),
        notes=("reported, without a target",),
    )


def corner_samples(samples: Sequence[PublishedSample]) -> list[PublishedSample]:
    """Return the rows of every key with the fewest and the most layers and micro-batches, which suffice for the fit."""
    by_key: dict[MeasuredCase, list[PublishedSample]] = defaultdict(list)
    for sample in samples:
        by_key[sample.shape_key].append(sample)
    chosen = []
    for key in sorted(by_key):
        layers = {f(sample.layers for sample in by_key[key]) for f in (min, max)}
        counts = {f(sample.microbatches for sample in by_key[key]) for f in (min, max)}
        chosen += [s for s in by_key[key] if s.layers in layers and s.microbatches in counts]
    return chosen


def plane_deviation(samples: Sequence[PublishedSample]) -> float:
    """Return the median over keys of the largest relative residual to a + b layers + c micro-batches + d layers x
    micro-batches. Times of real runs are less regular than these."""
    by_key: dict[MeasuredCase, list[PublishedSample]] = defaultdict(list)
    for sample in samples:
        by_key[sample.shape_key].append(sample)
    largest = []
    for rows in by_key.values():
        layers, counts = (np.array([getattr(row, name) for row in rows]) for name in ("layers", "microbatches"))
        matrix = np.stack([np.ones(len(rows)), layers, counts, layers * counts], axis=1)
        published = np.array([row.published_s for row in rows])
        if len(rows) > np.linalg.matrix_rank(matrix):
            solution, *_ = np.linalg.lstsq(matrix, published, rcond=None)
            largest.append(float(np.abs(matrix @ solution / published - 1.0).max()))
    return float(np.median(largest))


def choice_regret(samples: Sequence[PublishedSample], rows: Sequence[ValidationRow]) -> ChoiceRegret:
    """Return the regret over groups of at least two rows with equal GPUs, global batch and model."""
    groups: dict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
    for sample, row in zip(samples, rows, strict=True):
        groups[sample.comparison_group].append((row.predicted, row.published))
    first, five = [], []
    for choices in groups.values():
        if len(choices) > 1:
            best = min(published for _, published in choices)
            ordered = sorted(choices)
            first.append(ordered[0][1] / best - 1.0)
            five.append(min(published for _, published in ordered[:BEST_OF]) / best - 1.0)
    return ChoiceRegret(tuple(first), tuple(five))


def _predict_rows(
    samples: Sequence[PublishedSample], evaluator: SampleEvaluator, calibration: FittedCalibration, turn: int
) -> list[ValidationRow]:
    predicted = evaluator.times_s(samples, calibration)
    return [
        ValidationRow(name=f"turn {turn}: {sample.row_label}", published=sample.published_s, predicted=float(time_s))
        for sample, time_s in zip(samples, predicted, strict=True)
    ]
