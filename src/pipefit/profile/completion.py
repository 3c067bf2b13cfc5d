"""How well links that were not measured can be concluded from those that were, and in which way best.

Of every way (hosts' effects alone, a bottleneck at the slower end, classes of hosts; where these are poor, places of
the hosts in a space of few dimensions) a part of the measured pairs is hidden and predicted; the simplest way whose
error is near the smallest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipefit.profile.classes import HostClasses, find_classes
from pipefit.profile.effects import Array
from pipefit.profile.estimate import LinkShape, LinkTable, LogTimes, link_logs
from pipefit.profile.low_rank import RANKS

FOLDS = 3
MANY = 4000
"""So many pairs are enough to hide a part of them once."""

SIMPLER = 1.05
"""A simpler way is taken whose error is at most so many times the smallest."""

POOR = 0.05
"""Where no way has a smaller error, noise included, and no classes are found, places in a space are tried, too."""

PLAUSIBLE = 1.5
"""Ways whose error is at most so many times that of the chosen one may still be right."""


@dataclass(frozen=True, slots=True)
class LinkCompletion:
    """The chosen way, and what it says of all links."""

    shape: LinkShape
    logs: LogTimes
    alike: HostClasses | None
    "Classes that were found, whether or not `shape` uses them."
    disagreement: Array
    "[source, target]: variance of the logarithm over the ways that may be right (query by committee)."
    held_out: float
    "Mean relative error of pairs that were hidden and predicted, their noise included."


def complete_links(table: LinkTable) -> LinkCompletion:
    """The best way to conclude links from others, for messages of one size."""
    tried = {way: _hide_pairs(table, way) for way in WAYS}
    error = {way: _mean_error(errors) for way, (errors, _) in tried.items()}
    alike = {bottleneck: find_classes(table, bottleneck) for bottleneck in (False, True)}
    if min(error.values()) > POOR and not any(alike.values()):
        tried |= {way: _hide_pairs(table, way) for way in SPACES}
        error |= {way: _mean_error(tried[way][0]) for way in SPACES}
    least = min(error.values())
    chosen = next(way for way in error if error[way] <= SIMPLER * least + 1e-3)
    shapes = {
        way: replace(way.shape, classes=_class_labels(alike[way.shape.bottleneck] if way.classes else None))
        for way in error
        if error[way] <= PLAUSIBLE * error[chosen] + 1e-3
    }
    shape = replace(shapes[chosen], doubt=_claim_factor(*tried[chosen]))
    logs = link_logs(table, shape)
    said = [logs.log_s, *(link_logs(table, other).log_s for way, other in shapes.items() if way != chosen)]
    disagreement = np.asarray(np.var(said, axis=0))
    return LinkCompletion(shape, logs, alike[chosen.shape.bottleneck], disagreement, error[chosen])


@dataclass(frozen=True, slots=True)
class CompletionModel:
    """A way to conclude links from others: a shape, whose classes are found anew."""

    classes: bool
    shape: LinkShape


WAYS = tuple(
    CompletionModel(classes, LinkShape(bottleneck=bottleneck))
    for classes in (False, True)
    for bottleneck in (False, True)
)
"""The simplest first."""

SPACES = tuple(CompletionModel(False, LinkShape(rank=rank)) for rank in RANKS)
"""Tried where the others are poor."""


def _mean_error(errors: Array) -> float:
    return float(np.mean(np.abs(errors))) if len(errors) else 1.0


def _class_labels(alike: HostClasses | None) -> tuple[int, ...]:
    return alike.classes if alike else ()


def _claim_factor(errors: Array, claimed: Array) -> float:
    """How much larger the usual hidden error is than was claimed: of squares, by medians, since hiding pairs also
    hides which hosts are alike."""
    if not len(errors):
        return 1.0
    return max(1.0, float(np.median(errors**2) / 0.455 / max(1e-12, np.median(claimed))))


def subtract_noise(error: float, noise: float) -> float:
    """What of a mean error is not noise: both add as squares."""
    return float(np.sqrt(max(0.0, error**2 - noise**2)))


def _hide_pairs(table: LinkTable, way: CompletionModel) -> tuple[Array, Array]:
    """(errors of hidden pairs, the variances that were claimed for them)."""
    count = len(table.members)
    low, high = np.minimum(table.source, table.target), np.maximum(table.source, table.target)
    pair = low * count + high
    pairs = np.unique(pair)
    fold = np.random.default_rng(len(pairs)).permutation(len(pairs)) % FOLDS
    fold_of = fold[np.searchsorted(pairs, pair)]
    errors, claimed = [], []
    for turn in range(FOLDS if len(pairs) < MANY else 1):
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
    """Mean logarithm of what was measured of every link, the order taken out where it is known; NaN for others."""
    count = len(table.members)
    values = np.log(table.one_way_s)
    order = logs.fitted.effects.get("order")
    if order is not None:
        unmet = max(0, int(table.job.max(initial=-1)) + 1 - len(order.value))
        values = values - np.pad(order.value, (0, unmet))[table.job]
    way = table.source * count + table.target
    times = np.bincount(way, minlength=count * count)
    total = np.bincount(way, weights=values, minlength=count * count)
    mean = np.where(times > 0, total / np.maximum(times, 1), np.nan)
    return np.asarray(mean.reshape(count, count))
