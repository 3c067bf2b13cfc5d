"""How well links that were not measured can be concluded from those that were, and in which way best.

Of every way (hosts' effects alone, a bottleneck at the slower end, classes of hosts) a part of the measured pairs is
hidden and predicted; the simplest way whose error is near the smallest is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipefit.profile.classes import Alike, find_classes
from pipefit.profile.effects import Array
from pipefit.profile.estimate import Logs, Shape, Table, link_logs

FOLDS = 3
SIMPLER = 1.05
"""A simpler way is taken whose error is at most so many times the smallest."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The chosen way, and what it says of all links."""

    shape: Shape
    logs: Logs
    alike: Alike | None
    held_out: float
    "Mean relative error of the prediction of pairs that were hidden; the noise of the measurements left out."


def complete(table: Table) -> Completion:
    """The best way to conclude links from others, for messages of one size."""
    ways = [(classes, bottleneck) for classes in (False, True) for bottleneck in (False, True)]
    tried = [(way, _hidden(table, *way)) for way in ways]
    least = min(_mean(errors) for _, (errors, _) in tried)
    (classes, bottleneck), (errors, claimed) = next(
        each for each in tried if _mean(each[1][0]) <= SIMPLER * least + 1e-3
    )
    alike = find_classes(table, bottleneck) if classes else None
    made = float(np.mean(errors**2)) if len(errors) else 1.0
    doubt = max(1.0, made / max(1e-12, float(np.mean(claimed)))) if len(errors) else 1.0
    shape = Shape(classes=alike.classes if alike else (), bottleneck=bottleneck, doubt=doubt)
    logs = link_logs(table, shape)
    noise = np.sqrt(2 / np.pi) * np.sqrt(logs.fitted.noise / _repeats(table))
    return Completion(shape, logs, alike, beside_noise(_mean(errors), float(noise)))


def beside_noise(error: float, noise: float) -> float:
    """What of a mean error is not noise: both add as squares."""
    return float(np.sqrt(max(0.0, error**2 - noise**2)))


def _hidden(table: Table, classes: bool, bottleneck: bool) -> tuple[Array, Array]:
    """(errors of hidden pairs, the variances that were claimed for them)."""
    count = len(table.members)
    low, high = np.minimum(table.source, table.target), np.maximum(table.source, table.target)
    pair = low * count + high
    pairs = np.unique(pair)
    fold = np.random.default_rng(len(pairs)).permutation(len(pairs)) % FOLDS
    fold_of = fold[np.searchsorted(pairs, pair)]
    errors, claimed = [], []
    for turn in range(FOLDS if len(pairs) < 4000 else 1):
        seen, hidden = table.only(fold_of != turn), table.only(fold_of == turn)
        if not len(seen.one_way_s) or not len(hidden.one_way_s):
            continue
        shape = Shape(bottleneck=bottleneck)
        if classes:
            alike = find_classes(seen, bottleneck)
            shape = replace(shape, classes=alike.classes if alike else ())
        logs = link_logs(seen, shape)
        means = means_of(hidden, logs)
        where = np.isfinite(means)
        errors.append((means - logs.log_s)[where])
        claimed.append(logs.error[where])
    if not errors:
        return np.zeros(0), np.zeros(0)
    return np.concatenate(errors), np.concatenate(claimed)


def means_of(table: Table, logs: Logs) -> Array:
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


def _repeats(table: Table) -> float:
    way = table.source * len(table.members) + table.target
    return len(way) / max(1, len(np.unique(way)))


def _mean(errors: Sequence[float] | Array) -> float:
    return float(np.mean(np.abs(errors))) if len(errors) else 1.0
