"""A learned correction of the analytic memory model, with a band: measured rank memory from its analytic parts.

measured = the sum over the parts of the analytic peak (parameters, gradients, optimizer state, saved activations,
transient memory, messages, and a constant per process) of coefficient x part. Coefficients are non-negative and
ridge-regularised towards 1, the uncorrected model. The model extrapolates: coefficients are properties of a device and
its software, not of the recorded runs. They are fitted to relative errors by non-negative least squares (Lawson and
Hanson, 1974) with a ridge.

The band comes from leave-one-out errors over configurations (as in conformal prediction; Vovk et al., 2005), each
divided by its distance from the rest. For a new plan they are widened by its own distance: the leverage of its mix of
parts, and its size relative to the measured range. The probability of an error is the larger of two: the share of
left-out errors that were worse, and the tail of Student's distribution with their spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipefit.cost.types import Array
from pipefit.errors import ClusterError

PEAK_PARTS = ("parameters", "gradients", "optimizer", "saved", "passing", "messages", "workspace")
"""Parts of the analytic peak; `workspace` is the constant per process."""

PART_RIDGES = {name: 1e-5 if name == "workspace" else 1e-2 for name in PEAK_PARTS}
"""Weight of the pull of a coefficient to 1, as a number of runs that consist of its part alone. With errors of 1 % it
is a prior that coefficients are within 10 % of 1. The constant has almost no prior, because it is a guess.
"""

LEAST_SPREAD = 0.0025
"""Smallest relative error assumed: allocators round sizes up, and kernels change with versions."""

LEAST_CONFIGURATIONS = 6
"""Fewer configurations do not determine the error of a new one."""

STATED = 1e-6
"""Probability that the margin shown beside an estimate is exceeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """One rank of one plan: the analytic parts of its memory, and the measured bytes."""

    configuration: str
    "Name of the plan; the ranks of one plan are left out of the fit together."
    kind: str
    "Device kind of the rank."
    devices: int
    "Number of devices of the plan."
    rank: int
    parts: Mapping[str, float]
    "Bytes of each of PEAK_PARTS at the analytic peak."
    measured_bytes: float
    when: str = ""
    "ISO 8601."
    environment: Mapping[str, str] = field(default_factory=dict)
    "Fingerprint of the software."


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCorrection:
    """The correction learned for one device kind."""

    kind: str
    coefficients: Mapping[str, float]
    spread: float
    "Root mean square of the left-out relative errors, each divided by its distance."
    errors: tuple[float, ...]
    "The left-out relative errors (measured / estimate - 1), each divided by its distance, ascending."
    precision: tuple[tuple[float, ...], ...]
    "The inverse of the fit's normal matrix, by PEAK_PARTS; gives the leverage of a mix of parts."
    range_bytes: tuple[float, float]
    "The smallest and the largest measured bytes."
    configurations: int
    most_devices: int

    def estimate_rank(self, parts: Mapping[str, float]) -> MemoryEstimate:
        """Return the estimated memory of a rank with these parts."""
        expected = math.fsum(self.coefficients[name] * parts[name] for name in PEAK_PARTS)
        return MemoryEstimate(self, expected, self.band_factor(parts, expected))

    def band_factor(self, parts: Mapping[str, float], expected_bytes: float) -> float:
        """Return the width of the band relative to the middle of the measured range, 1 or more."""
        mix = _part_shares(parts, expected_bytes)
        leverage = float(mix @ np.asarray(self.precision) @ mix)
        smallest, largest = self.range_bytes
        beyond = max(expected_bytes / largest, smallest / expected_bytes, 1.0)
        return math.sqrt(1.0 + max(0.0, leverage)) * (1.0 + math.log(beyond))

    def exceedance_probability(self, error: float) -> float:
        """Return the probability that a relative error, divided by its distance, is above `error`."""
        from scipy.special import stdtr

        worse = sum(observed >= error for observed in self.errors) / (len(self.errors) + 1)
        tail = float(stdtr(max(1, self.configurations - 1), -error / self.spread))
        return min(1.0, max(worse, tail))

    def error_quantile(self, probability: float) -> float:
        """Return the least relative error that is exceeded with at most this probability."""
        from scipy.special import stdtrit

        tail = -float(stdtrit(max(1, self.configurations - 1), probability)) * self.spread
        allowed = math.floor(probability * (len(self.errors) + 1))
        worst = sorted(self.errors, reverse=True)
        return max(tail, math.nextafter(worst[allowed], math.inf) if allowed < len(worst) else -1.0)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The expected memory of a rank, with its uncertainty."""

    correction: MemoryCorrection
    expected_bytes: float
    distance: float

    @property
    def margin_bytes(self) -> float:
        """Bytes above the expectation that are exceeded with probability STATED.

        They come from the spread of the errors and from the worst error.
        """
        worst = max(self.correction.errors[-1], self.correction.spread * _student_quantile(self.correction))
        return self.expected_bytes * worst * self.distance

    def oom_probability(self, limit_bytes: float) -> float:
        """Return the probability that the rank needs more memory than the limit."""
        return self.correction.exceedance_probability((limit_bytes / self.expected_bytes - 1.0) / self.distance)


def learn_correction(runs: Sequence[MemoryRun], kind: str) -> MemoryCorrection:
    """Return the correction of a device kind learned from these runs.

    Raises ClusterError if there are too few configurations for a band.
    """
    kind_runs = [run for run in runs if run.kind == kind]
    names = sorted({run.configuration for run in kind_runs})
    if len(names) < LEAST_CONFIGURATIONS:
        raise ClusterError(
            "Too few plans were measured to learn a memory correction from.",
            where=f"device kind {kind!r}",
            seen=f"{len(names)} plans",
            allowed=f"{LEAST_CONFIGURATIONS} or more",
            next_step="record more with `pipefit verify PLAN --record FILE`: other models, sequences and schedules",
        )
    errors: list[float] = []
    for name in names:
        rest = [run for run in kind_runs if run.configuration != name]
        without = _fit_coefficients(rest, kind, (0.0,), LEAST_SPREAD, len(names) - 1)
        for run in kind_runs:
            if run.configuration == name:
                estimate = without.estimate_rank(run.parts)
                errors.append((run.measured_bytes / estimate.expected_bytes - 1.0) / estimate.distance)
    spread = max(LEAST_SPREAD, math.sqrt(math.fsum(error**2 for error in errors) / len(errors)))
    return _fit_coefficients(kind_runs, kind, tuple(sorted(errors)), spread, len(names))


def _fit_coefficients(
    runs: Sequence[MemoryRun], kind: str, errors: tuple[float, ...], spread: float, configurations: int
) -> MemoryCorrection:
    from scipy.optimize import nnls

    mixes = np.array([_part_shares(run.parts, run.measured_bytes) for run in runs])
    ridge = np.diag([math.sqrt(PART_RIDGES[name]) for name in PEAK_PARTS])
    coefficients, _ = nnls(np.vstack((mixes, ridge)), np.concatenate((np.ones(len(runs)), ridge.sum(axis=1))))
    precision = np.linalg.inv(mixes.T @ mixes + ridge.T @ ridge)
    measured = [run.measured_bytes for run in runs]
    return MemoryCorrection(
        kind=kind,
        coefficients=dict(zip(PEAK_PARTS, coefficients.tolist(), strict=True)),
        spread=spread,
        errors=errors,
        precision=tuple(map(tuple, precision.tolist())),
        range_bytes=(min(measured), max(measured)),
        configurations=configurations,
        most_devices=max(run.devices for run in runs),
    )


def _part_shares(parts: Mapping[str, float], whole_bytes: float) -> Array:
    return np.array([parts[name] for name in PEAK_PARTS]) / whole_bytes


def _student_quantile(correction: MemoryCorrection) -> float:
    from scipy.special import stdtrit

    return -float(stdtrit(max(1, correction.configurations - 1), STATED))
