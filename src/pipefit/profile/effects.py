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

LEAST = 1e-10
"""The smallest variance: of logarithms, so 1e-5 of the value."""


@dataclass(frozen=True, slots=True)
class Term:
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
class Effect:
    """What a term does: arrays by level. A level that was not met has the effect 0 and the whole variance."""

    value: Array
    error: Array
    "Variance of what is not known of the value."
    variance: float
    "Between levels."


@dataclass(frozen=True, slots=True)
class Fit:
    """All terms of one set of measurements."""

    mean: float
    effects: dict[str, Effect]
    noise: float
    "Variance of one measurement beside all terms."
    residual: Array
    weight: Array


def fit(values: Array, terms: Sequence[Term], rounds: int = 60) -> Fit:
    """Effects and variances of `terms` in `values` [measurement]; the last term is the link. Deterministic."""
    count = len(values)
    mean, weight = float(values.mean()), np.ones(count)
    residual = values - mean
    whole = max(LEAST, float(np.var(values)))
    within = _within(values, terms[-1].level)
    noise = within or whole / 4
    start = {term.name: noise if term.passing else 100 * whole if term.free else whole / 2 for term in terms}
    variance = dict(start)
    value = {term.name: np.zeros(term.count) for term in terms}
    error = {term.name: np.zeros(term.count) for term in terms}
    for turn in range(rounds):
        unknown = np.zeros(count)
        for term in terms:
            name, level = term.name, term.level
            residual += value[name][level]
            known = np.bincount(level, weights=weight, minlength=term.count)
            total = np.bincount(level, weights=weight * residual, minlength=term.count)
            prior = noise / variance[name]
            value[name], error[name] = total / (known + prior), noise / (known + prior)
            residual -= value[name][level]
            unknown += error[name][level]
            met = known > 0
            if not term.free and met.any():
                variance[name] = max(LEAST, float(np.mean(value[name][met] ** 2 + error[name][met])))
                if term.passing:
                    variance[name] = min(variance[name], start[name])
        shift = float((weight * residual).sum() / weight.sum())
        mean, residual = mean + shift, residual - shift
        noise = max(LEAST, float((weight * (residual**2 + unknown)).sum() / weight.sum()))
        if turn in REWEIGHT:
            link = terms[-1]
            weight = _weights(residual + value[link.name][link.level], link.level, noise)
    effects = {term.name: Effect(value[term.name], error[term.name], variance[term.name]) for term in terms}
    return Fit(mean, effects, noise, residual, weight)


def _within(values: Array, link: Indices) -> float:
    """Pooled variance of the repetitions of each link; 0 where there are none."""
    count = np.bincount(link)
    mean = np.bincount(link, weights=values) / np.maximum(count, 1)
    free = int(np.maximum(count - 1, 0).sum())
    return max(LEAST, float(((values - mean[link]) ** 2).sum() / free)) if free else 0.0


def _weights(values: Array, link: Indices, noise: float) -> Array:
    """By how far each value is from the lower median of its link: not from what the model expects of that link, or a
    link that is unlike the others would be taken for a disturbance."""
    order = np.lexsort((values, link))
    _, first, count = np.unique(link[order], return_index=True, return_counts=True)
    middle = values[order][first + (count - 1) // 2]
    away = np.empty_like(values)
    away[order] = values[order] - np.repeat(middle, count)
    limit = np.where(away > 0, ABOVE, BELOW) * np.sqrt(noise)
    return np.asarray(np.minimum(1.0, limit / np.maximum(np.abs(away), 1e-12)))
