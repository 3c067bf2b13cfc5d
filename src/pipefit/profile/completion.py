"""Predict unmeasured links from measured ones, and choose the best prediction model.

The models are: hosts' effects alone, a bottleneck at the slower end, and classes of hosts; if these are poor, also
low-rank structure. For each model a part of the measured pairs is hidden and predicted. The simplest model with an
error near the smallest is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipefit.cost.types import Array
from pipefit.profile.classes import HostClasses, find_classes
from pipefit.profile.estimate import LinkShape, LinkTable, LogTimes, link_logs
from pipefit.profile.low_rank import RANKS

FOLDS = 3
ONE_FOLD_PAIRS = 4000
"""With this number of pairs a single fold is hidden."""

SIMPLER = 1.05
"""A simpler model is chosen if its error is at most this many times the smallest."""

POOR = 0.05
"""If every model has a larger error, noise included, and no classes are found, low-rank models are tried too."""

PLAUSIBLE = 1.5
"""Models with an error of at most this many times that of the chosen one are still plausible."""


@dataclass(frozen=True, slots=True)
class LinkCompletion:
    """The chosen model and its prediction of all links."""

    shape: LinkShape
    logs: LogTimes
    alike: HostClasses | None
    "Classes that were found, even if `shape` does not use them."
    disagreement: Array
    "[source, target]: variance of the logarithm over the plausible models (query by committee)."
    held_out: float
    "Mean relative error of pairs that were hidden and predicted, their noise included."


def complete_links(table: LinkTable) -> LinkCompletion:
    """Return the best model of unmeasured links, for messages of one size."""
    tried = {model: _hide_pairs(table, model) for model in WAYS}
    error = {model: _mean_error(errors) for model, (errors, _) in tried.items()}
    alike = {bottleneck: find_classes(table, bottleneck) for bottleneck in (False, True)}
    if min(error.values()) > POOR and not any(alike.values()):
        tried |= {model: _hide_pairs(table, model) for model in SPACES}
        error |= {model: _mean_error(tried[model][0]) for model in SPACES}
    least = min(error.values())
    chosen = next(model for model in error if error[model] <= SIMPLER * least + 1e-3)
    shapes = {
        model: replace(model.shape, classes=_class_labels(alike[model.shape.bottleneck] if model.classes else None))
        for model in error
        if error[model] <= PLAUSIBLE * error[chosen] + 1e-3
    }
    shape = replace(shapes[chosen], doubt=_claim_factor(*tried[chosen]))
    logs = link_logs(table, shape)
    said = [
        logs.log_s,
        *(link_logs(table, alternative).log_s for model, alternative in shapes.items() if model != chosen),
    ]
    disagreement = np.asarray(np.var(said, axis=0))
    return LinkCompletion(shape, logs, alike[chosen.shape.bottleneck], disagreement, error[chosen])


@dataclass(frozen=True, slots=True)
class CompletionModel:
    """A model that predicts links from others: a shape, whose classes are found anew."""

    classes: bool
    shape: LinkShape


WAYS = tuple(
    CompletionModel(classes, LinkShape(bottleneck=bottleneck))
    for classes in (False, True)
    for bottleneck in (False, True)
)
"""The simplest first."""

SPACES = tuple(CompletionModel(False, LinkShape(rank=rank)) for rank in RANKS)
"""Tried if the models in `WAYS` are poor."""


def _mean_error(errors: Array) -> float:
    return float(np.mean(np.abs(errors))) if len(errors) else 1.0


def _class_labels(alike: HostClasses | None) -> tuple[int, ...]:
    return alike.classes if alike else ()


def _claim_factor(errors: Array, claimed: Array) -> float:
    """Return the ratio of the typical hidden error to the claimed one.

    It compares squares by medians, because hiding pairs also hides the similarity of hosts.
    """
    if not len(errors):
        return 1.0
    return max(1.0, float(np.median(errors**2) / 0.455 / max(1e-12, np.median(claimed))))


def subtract_noise(error: float, noise: float) -> float:
    """Return a mean error without its noise: both add as squares."""
    return float(np.sqrt(max(0.0, error**2 - noise**2)))


def _hide_pairs(table: LinkTable, way: CompletionModel) -> tuple[Array, Array]:
    """Return (errors of hidden pairs, the variances that were claimed for them)."""
    count = len(table.members)
    low, high = np.minimum(table.source, table.target), np.maximum(table.source, table.target)
    pair = low * count + high
    pairs = np.unique(pair)
    fold = np.random.default_rng(len(pairs)).permutation(len(pairs)) % FOLDS
    fold_of = fold[np.searchsorted(pairs, pair)]
    errors, claimed = [], []
    for turn in range(FOLDS if len(pairs) < ONE_FOLD_PAIRS else 1):
        seen, hidden = table.select_rows(fold_of != turn), table.select_rows(fold_of == turn)
        if not len(seen.one_way_s) or not len(hidden.one_way_s):
            continue
        shape = way.shape
        if way.classes:
            shape = replace(shape, classes=_class_labels(find_classes(seen, shape.bottleneck)))
        logs = link_logs(seen, shape)
        means = mean_logs(hidden, logs)
        where = np.isfinite(means)
        errors.append((means - logs.log_s)[where])
        claimed.append(logs.error[where])
    if not errors:
        return np.zeros(0), np.zeros(0)
    return np.concatenate(errors), np.concatenate(claimed)


def mean_logs(table: LinkTable, logs: LogTimes) -> Array:
    """Return the mean logarithm of each link's measurements, without the effect of the order if known; NaN for other
    links."""
    count = len(table.members)
    values = np.log(table.one_way_s)
    order = logs.fitted.effects.get("order")
    if order is not None:
        unmet = max(0, int(table.job.max(initial=-1)) + 1 - len(order.value))
        values = values - np.pad(order.value, (0, unmet))[table.job]
    link = table.source * count + table.target
    times = np.bincount(link, minlength=count * count)
    total = np.bincount(link, weights=values, minlength=count * count)
    mean = np.where(times > 0, total / np.maximum(times, 1), np.nan)
    return np.asarray(mean.reshape(count, count))
