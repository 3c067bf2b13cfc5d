"""Crossed random effects: split each measurement into effects of the sender, the receiver, the link and the moment.

value = mean + one effect of each term + noise. Every term has a variance of its own, estimated with the effects (Bates
et al. 2015, "Fitting linear mixed-effects models using lme4", section 2). The fit uses mean-field expectation
maximisation, because links and rounds cross each other. Differences that do not repeat are shrunk, by the amount that
the data supports. Measurements far from others of their link get less weight, high ones from a smaller deviation on: a
disturbance only ever adds time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipefit.cost.types import Array, Ints

ABOVE, BELOW = 1.5, 3.0
"""Deviations above or below, in standard deviations, from which a measurement gets less weight (Huber 1964)."""

REWEIGHT = (5, 12, 25)
"""Iterations in which weights are renewed."""

MAX_MOMENT_DEVIATIONS = 4.0
"""Bound on the effect of a moment, in standard deviations. If many links were only ever measured together, their common
deviation could come from the moment or from the links; then it is attributed to the links."""

MIN_VARIANCE = 1e-10
"""The smallest variance: of logarithms, so 1e-5 of the value."""


@dataclass(frozen=True, slots=True)
class EffectTerm:
    """A grouping of the measurements: level[i] is the group of measurement i."""

    name: str
    level: Ints
    count: int
    "Number of levels, with or without measurements."
    free: bool = False
    "Not shrunk: for terms of one or two levels."
    passing: bool = False
    "An effect of the moment, not of the link: its variance is at most that of a link's repetitions."


@dataclass(frozen=True, slots=True)
class TermEffect:
    """The effects of a term, by level. A level without measurements has the effect 0 and the whole variance."""

    value: Array
    error: Array
    "Variance of the estimate of the value."
    variance: float
    "Between levels."


@dataclass(frozen=True, slots=True)
class EffectFit:
    """All terms of one set of measurements."""

    mean: float
    effects: dict[str, TermEffect]
    noise: float
    "Variance of one measurement beside all terms."
    residual: Array
    weight: Array


def fit_effects(values: Array, terms: Sequence[EffectTerm], rounds: int = 50) -> EffectFit:
    """Return effects and variances of `terms` in `values` [measurement]; the last term is the link. Deterministic."""
    count = len(values)
    groups = [_FittedTerm(term, values) for term in terms]
    link = groups[-1]
    mean, weight = float(values.mean()), np.ones(count)
    residual = values - mean
    noise = _repetition_variance(values, link.level)
    for group in groups:
        if group.term.passing:
            group.most = group.variance = noise
    for turn in range(rounds):
        unknown = np.zeros(count)
        for group in groups:
            residual = group.update_levels(residual, weight, noise)
            unknown += group.error[group.level]
        shift = float((weight * residual).sum() / weight.sum())
        mean, residual = mean + shift, residual - shift
        if len(link.met) < count:
            noise = max(MIN_VARIANCE, float((weight * (residual**2 + unknown)).sum() / weight.sum()))
        if turn in REWEIGHT:
            weight = _robust_weights(residual + link.value[link.level], link.level, noise)
    return EffectFit(mean, {group.term.name: group.as_effect() for group in groups}, noise, residual, weight)


class _FittedTerm:
    """A term during the fit: only the levels with measurements."""

    def __init__(self, term: EffectTerm, values: Array) -> None:
        self.term = term
        self.met, level = np.unique(term.level, return_inverse=True)
        self.level: Ints = level.astype(np.int64)
        total_variance = max(MIN_VARIANCE, float(np.var(values)))
        self.variance, self.most = (100 * total_variance, np.inf) if term.free else (total_variance / 2, np.inf)
        self.value, self.error = np.zeros(len(self.met)), np.zeros(len(self.met))

    def update_levels(self, residual: Array, weight: Array, noise: float) -> Array:
        """Update effects and variance from the residual of the other terms; return the new residual."""
        residual = residual + self.value[self.level]
        known = np.bincount(self.level, weights=weight) + noise / self.variance
        self.value = np.bincount(self.level, weights=weight * residual) / known
        if self.term.passing:
            self.value = np.clip(
                self.value, -MAX_MOMENT_DEVIATIONS * self.variance**0.5, MAX_MOMENT_DEVIATIONS * self.variance**0.5
            )
        self.error = noise / known
        if not self.term.free:
            self.variance = min(self.most, max(MIN_VARIANCE, float(np.mean(self.value**2 + self.error))))
        return np.asarray(residual - self.value[self.level])

    def as_effect(self) -> TermEffect:
        value, error = np.zeros(self.term.count), np.full(self.term.count, self.variance)
        value[self.met], error[self.met] = self.value, self.error
        return TermEffect(value, error, self.variance)


def _repetition_variance(values: Array, link: Ints) -> float:
    """Return the pooled variance of the repetitions of each link, or `MIN_VARIANCE` without repetitions.

    Without repetitions all differences between links are attributed to the links.
    """
    count = np.bincount(link)
    mean = np.bincount(link, weights=values) / np.maximum(count, 1)
    free = int(np.maximum(count - 1, 0).sum())
    return max(MIN_VARIANCE, float(((values - mean[link]) ** 2).sum() / free)) if free else MIN_VARIANCE


def _robust_weights(values: Array, link: Ints, noise: float) -> Array:
    """Return weights by the distance of each value from the lower median of its link.

    The distance from the model's expectation would treat a link that is unlike all others as a disturbance.
    """
    order = np.lexsort((values, link))
    _, first, count = np.unique(link[order], return_index=True, return_counts=True)
    middle = values[order][first + (count - 1) // 2]
    away = np.empty_like(values)
    away[order] = values[order] - np.repeat(middle, count)
    limit = np.where(away > 0, ABOVE, BELOW) * np.sqrt(noise)
    return np.asarray(np.minimum(1.0, limit / np.maximum(np.abs(away), 1e-12)))
