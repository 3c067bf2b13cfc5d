"""A learned correction of the analytic memory model, with a band: what a rank really takes, by what it should take.

measured = the sum over the parts of the analytic peak (parameters, gradients, optimizer state, saved activations,
passing memory, messages, and a constant per process) of coefficient x part. Coefficients are not negative and are drawn
towards 1, where the analytic model alone stands. Such a form extrapolates: they are properties of a device and its
software, not of the runs that they were learned from. Fitted to relative errors by non-negative least squares (Lawson
and Hanson, 1974) with a ridge.

The band comes from the errors on configurations that were left out of the fit, one at a time (as in conformal
prediction; Vovk et al., 2005), each divided by how far it was from the rest. For a new plan they are widened by its own
distance: the leverage of its mix of parts, and how much larger or smaller it is than all that was measured. The
probability of an error is the larger of two: the share of left-out errors that were worse, and the tail of Student's
distribution with their spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import ClusterError

PARTS = ("parameters", "gradients", "optimizer", "saved", "passing", "messages", "workspace")
"""Of the analytic peak; `workspace` is the constant per process."""

RIDGE = {name: 1e-5 if name == "workspace" else 1e-2 for name in PARTS}
"""How strongly a coefficient is drawn to 1: as by this many runs that consist of its part alone. For errors of 1 % that
is a belief that coefficients are within 10 % of 1; next to nothing is believed of the constant, which is a guess."""

LEAST_SPREAD = 0.0025
"""Relative errors are never believed to be smaller: allocators round sizes up, kernels change with versions."""

LEAST_CONFIGURATIONS = 6
"""Fewer do not say how wrong the next one may be."""

STATED = 1e-6
"""The margin that is stated beside an estimate is exceeded with this probability."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """One rank of one plan: what the model says of it, and what was measured without the model."""

    configuration: str
    "Which plan: the ranks of one plan are left out of the fit together."
    kind: str
    "The device kind that it ran on."
    devices: int
    "Of the plan."
    rank: int
    parts: Mapping[str, float]
    "Bytes of each of PARTS at the analytic peak."
    measured_bytes: float
    when: str = ""
    "ISO 8601."
    environment: Mapping[str, str] = field(default_factory=dict)
    "Fingerprint of the software."


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCorrection:
    """What was learned for one kind of device."""

    kind: str
    coefficients: Mapping[str, float]
    spread: float
    "Root mean square of the left-out relative errors, each divided by its distance."
    errors: tuple[float, ...]
    "Those errors (measured / estimate - 1), ascending."
    precision: tuple[tuple[float, ...], ...]
    "The inverse of the fit's normal matrix, by PARTS: the leverage of a mix of parts."
    range_bytes: tuple[float, float]
    "The smallest and the largest that was measured."
    configurations: int
    most_devices: int

    def estimate_rank(self, parts: Mapping[str, float]) -> MemoryEstimate:
        """What a rank with these parts takes."""
        expected = float(sum(self.coefficients[name] * parts[name] for name in PARTS))
        return MemoryEstimate(self, expected, self.band_factor(parts, expected))

    def band_factor(self, parts: Mapping[str, float], expected_bytes: float) -> float:
        """How much wider the band is than in the middle of what was measured: 1 or more."""
        mix = _part_shares(parts, expected_bytes)
        leverage = float(mix @ np.asarray(self.precision) @ mix)
        smallest, largest = self.range_bytes
        beyond = max(expected_bytes / largest, smallest / expected_bytes, 1.0)
        return math.sqrt(1.0 + max(0.0, leverage)) * (1.0 + math.log(beyond))

    def exceedance_probability(self, error: float) -> float:
        """The probability that a relative error, its distance taken out, is above `error`."""
        from scipy.special import stdtr

        worse = sum(observed >= error for observed in self.errors) / (len(self.errors) + 1)
        tail = float(stdtr(max(1, self.configurations - 1), -error / self.spread))
        return min(1.0, max(worse, tail))

    def error_quantile(self, probability: float) -> float:
        """The least relative error that is exceeded with at most this probability."""
        from scipy.special import stdtrit

        tail = -float(stdtrit(max(1, self.configurations - 1), probability)) * self.spread
        allowed = math.floor(probability * (len(self.errors) + 1))
        worst = sorted(self.errors, reverse=True)
        return max(tail, math.nextafter(worst[allowed], math.inf) if allowed < len(worst) else -1.0)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What a rank is expected to take, and how sure that is."""

    correction: MemoryCorrection
    expected_bytes: float
    distance: float

    @property
    def margin_bytes(self) -> float:
        """What may come on top: more only with the probability STATED, by the spread of the errors and their worst."""
        worst = max(self.correction.errors[-1], self.correction.spread * _student_quantile(self.correction))
        return self.expected_bytes * worst * self.distance

    def oom_probability(self, limit_bytes: float) -> float:
        """The probability that it takes more than the limit."""
        return self.correction.exceedance_probability((limit_bytes / self.expected_bytes - 1.0) / self.distance)


def learn_correction(runs: Sequence[MemoryRun], kind: str) -> MemoryCorrection:
    """The correction that these runs teach for a kind of device. ClusterError where they are too few to have a band."""
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
    spread = max(LEAST_SPREAD, math.sqrt(sum(error**2 for error in errors) / len(errors)))
    return _fit_coefficients(kind_runs, kind, tuple(sorted(errors)), spread, len(names))


def _fit_coefficients(
    runs: Sequence[MemoryRun], kind: str, errors: tuple[float, ...], spread: float, configurations: int
) -> MemoryCorrection:
    from scipy.optimize import nnls

    mixes = np.array([_part_shares(run.parts, run.measured_bytes) for run in runs])
    ridge = np.diag([math.sqrt(RIDGE[name]) for name in PARTS])
    coefficients, _ = nnls(np.vstack((mixes, ridge)), np.concatenate((np.ones(len(runs)), ridge.sum(axis=1))))
    precision = np.linalg.inv(mixes.T @ mixes + ridge.T @ ridge)
    measured = [run.measured_bytes for run in runs]
    return MemoryCorrection(
        kind=kind,
        coefficients=dict(zip(PARTS, coefficients.tolist(), strict=True)),
        spread=spread,
        errors=errors,
        precision=tuple(map(tuple, precision.tolist())),
        range_bytes=(min(measured), max(measured)),
        configurations=configurations,
        most_devices=max(run.devices for run in runs),
    )


def _part_shares(parts: Mapping[str, float], whole_bytes: float) -> Floats:
    return np.array([parts[name] for name in PARTS]) / whole_bytes


def _student_quantile(correction: MemoryCorrection) -> float:
    from scipy.special import stdtrit

    return -float(stdtrit(max(1, correction.configurations - 1), STATED))
