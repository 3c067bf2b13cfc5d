"""Crossed random effects: what of a measurement belongs to the sender, the receiver, the link, and to the moment.

value = mean + one effect of each term + noise. Every term has a variance of its own, estimated with the effects
(Bates et al. 2015, "Fitting linear mixed-effects models using lme4", section 2; here by mean-field expectation
maximisation, because links and rounds cross each other): differences that do not come back are shrunk away, by as much
as the data says. Measurements far from the others of their link count less, and those above from earlier on: a
disturbance only ever adds time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

ABOVE, BELOW = 1.5, 3.0
"""Deviations beyond so many standard deviations count with less weight (Huber 1964)."""

REWEIGHT = (5, 12, 25)
"""The turns of the iteration in which weights are renewed."""

PASSING = 4.0
"""A moment is at most so many standard deviations from the others. Where many links were only ever measured together,
what they have in common could be either; then it is the links'."""

LEAST = 1e-10
"""The smallest variance: of logarithms, so 1e-5 of the value."""


@dataclass(frozen=True, slots=True)
class EffectTerm:
    """A grouping of the measurements: level[i] is the group of measurement i."""

    name: str
    level: Indices
    count: int
    "Levels, met or not."
    free: bool = False
    "Not shrunk: for terms of one or two levels."
    passing: bool = False
    "Of the moment, not of the link: it varies by no more than the repetitions of a link do."


@dataclass(frozen=True, slots=True)
class TermEffect:
    """What a term does: arrays by level. A level that was not met has the effect 0 and the whole variance."""

    value: Array
    error: Array
    "Variance of what is not known of the value."
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
    """Effects and variances of `terms` in `values` [measurement]; the last term is the link. Deterministic."""
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
            noise = max(LEAST, float((weight * (residual**2 + unknown)).sum() / weight.sum()))
        if turn in REWEIGHT:
            weight = _robust_weights(residual + link.value[link.level], link.level, noise)
    return EffectFit(mean, {group.term.name: group.as_effect() for group in groups}, noise, residual, weight)


class _FittedTerm:
    """A term while it is fitted: only the levels that were met."""

    def __init__(self, term: EffectTerm, values: Array) -> None:
        self.term = term
        self.met, level = np.unique(term.level, return_inverse=True)
        self.level: Indices = level.astype(np.int64)
        whole = max(LEAST, float(np.var(values)))
        self.variance, self.most = (100 * whole, np.inf) if term.free else (whole / 2, np.inf)
        self.value, self.error = np.zeros(len(self.met)), np.zeros(len(self.met))

    def update_levels(self, residual: Array, weight: Array, noise: float) -> Array:
        """Effects and variance from what the other terms leave; the new residual."""
        residual = residual + self.value[self.level]
        known = np.bincount(self.level, weights=weight) + noise / self.variance
        self.value = np.bincount(self.level, weights=weight * residual) / known
        if self.term.passing:
            self.value = np.clip(self.value, -PASSING * self.variance**0.5, PASSING * self.variance**0.5)
        self.error = noise / known
        if not self.term.free:
            self.variance = min(self.most, max(LEAST, float(np.mean(self.value**2 + self.error))))
        return np.asarray(residual - self.value[self.level])

    def as_effect(self) -> TermEffect:
        value, error = np.zeros(self.term.count), np.full(self.term.count, self.variance)
        value[self.met], error[self.met] = self.value, self.error
        return TermEffect(value, error, self.variance)


def _repetition_variance(values: Array, link: Indices) -> float:
    """Pooled variance of the repetitions of each link; next to nothing where there are none: then all that links
    differ by is theirs."""
    count = np.bincount(link)
    mean = np.bincount(link, weights=values) / np.maximum(count, 1)
    free = int(np.maximum(count - 1, 0).sum())
    return max(LEAST, float(((values - mean[link]) ** 2).sum() / free)) if free else LEAST


def _robust_weights(values: Array, link: Indices, noise: float) -> Array:
    """By how far each value is from the lower median of its link: not from what the model expects of that link, or a
    link that is unlike the others would be taken for a disturbance."""
    order = np.lexsort((values, link))
    _, first, count = np.unique(link[order], return_index=True, return_counts=True)
    middle = values[order][first + (count - 1) // 2]
    away = np.empty_like(values)
    away[order] = values[order] - np.repeat(middle, count)
    limit = np.where(away > 0, ABOVE, BELOW) * np.sqrt(noise)
    return np.asarray(np.minimum(1.0, limit / np.maximum(np.abs(away), 1e-12)))
