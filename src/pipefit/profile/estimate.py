"""Estimate the time of every link from message samples, separating noise, order of measurement and structure.

The logarithm of a time is a sum of effects: of the sender, the receiver, the two hosts' classes, the link, and the
moment (the round of pairs in which it was measured); see `effects.py`. The effect of the moment is removed, and each
other effect is shrunk according to its repetitions. An unmeasured link gets the prediction of its hosts and their
classes, with the error of that prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array, Ints
from pipefit.profile.config import TINY
from pipefit.profile.effects import EffectFit, EffectTerm, fit_effects
from pipefit.profile.links import LinkSample
from pipefit.profile.low_rank import factor_residuals

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LinkTable:
    """Measurements as arrays, [measurement]; members are numbered by position. `one_way_s` is the round trip minus half
    of the link's tiny round trip (for the tiny message: half of it)."""

    members: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    size: Ints
    "Index into `sizes_bytes`."
    source: Ints
    target: Ints
    repeat: Ints
    job: Ints
    one_way_s: Array

    def select_size(self, index: int) -> LinkTable:
        """Return the messages of one size."""
        return self.select_rows(self.size == index)

    def select_rows(self, chosen: Bools) -> LinkTable:
        """Return the chosen measurements."""
        return LinkTable(
            self.members,
            self.sizes_bytes,
            self.size[chosen],
            self.source[chosen],
            self.target[chosen],
            self.repeat[chosen],
            self.job[chosen],
            self.one_way_s[chosen],
        )


@dataclass(frozen=True, slots=True)
class LinkShape:
    """The structure of link times beyond fast and slow senders and receivers."""

    classes: tuple[int, ...] = ()
    "By host: hosts with the same number behave alike; empty for none."
    bottleneck: bool = False
    "Whether a link is as slow as the slower of its two ends, rather than the sum of both."
    rank: int = 0
    "Rank of the product of host vectors that link times follow (`low_rank.py`); 0 for none."
    doubt: float = 1.0
    "Factor on the variance of a predicted link: errors in cross-validation exceed those of the formulas."


@dataclass(frozen=True, slots=True)
class LogTimes:
    """Logarithms of times, [source, target]; the diagonal is meaningless."""

    log_s: Array
    error: Array
    """Variance of the estimate `log_s`; for an unmeasured link, of its deviation from the prediction of its hosts."""
    measured: Bools
    between: float
    "Variance between links."
    within: float
    "Variance of one measurement of a link, order of measuring included."
    order: float
    "Variance between moments, a part of `within`."
    fitted: EffectFit


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Times of one message from each member to each other: arrays [size, source, target]; NaN where not known."""

    members: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    time_s: Array
    spread: Array
    "(slowest - fastest repetition) / fastest, as measured; NaN for an unmeasured link."
    repeatability: Array
    """[source, target], of the largest size: the correlation of this entry with one more measurement of it; the
    repeatable part of the differences between links."""
    error: Array
    "[source, target], of the largest size: relative standard error of the time."
    predicted: Bools
    "[source, target]: not measured, but predicted from other links of the two hosts."
    noise: float
    "Relative standard deviation of one measurement of the largest size, without the effect of the order."
    order_share: float
    "Share of the moment's effect in the variance of single measurements of the largest size."


def tabulate_samples(samples: Sequence[LinkSample], members: Sequence[int]) -> LinkTable:
    """Return the table of the samples between these members."""
    position = {member: index for index, member in enumerate(members)}
    chosen = [sample for sample in samples if sample.source in position and sample.target in position]
    sizes = sorted({sample.size_bytes for sample in chosen} | {TINY})
    size_index = {size: index for index, size in enumerate(sizes)}

    def as_indices(values: list[int]) -> Ints:
        return np.array(values, dtype=np.int64)

    size = as_indices([size_index[sample.size_bytes] for sample in chosen])
    source = as_indices([position[sample.source] for sample in chosen])
    target = as_indices([position[sample.target] for sample in chosen])
    job = as_indices([sample.job if sample.job >= 0 else -1 - i for i, sample in enumerate(chosen)])
    trip_s = np.array([sample.round_trip_s for sample in chosen], dtype=np.float64)
    tiny = size == size_index[TINY]
    fastest_s = np.full((len(members), len(members)), np.inf)
    np.minimum.at(fastest_s, (source[tiny], target[tiny]), trip_s[tiny])
    back_s = np.where(np.isfinite(fastest_s), fastest_s, 0.0)[source, target] / 2
    one_way_s = np.maximum(np.where(tiny, trip_s / 2, trip_s - back_s), np.maximum(back_s, 1e-9))
    repeat = as_indices([sample.repeat for sample in chosen])
    _, jobs = np.unique(job, return_inverse=True)
    return LinkTable(tuple(members), tuple(sizes), size, source, target, repeat, jobs.astype(np.int64), one_way_s)


def pair_times(
    samples: Sequence[LinkSample], members: Sequence[int], *, shape: LinkShape | None = None, predict: bool = False
) -> PairTimes:
    """Return the time of every link between `members`, shrunk towards the structure `shape`.

    With `predict`, unmeasured links are included.
    """
    table = tabulate_samples(samples, members)
    count = len(members)
    cube = (len(table.sizes_bytes), count, count)
    time_s, spread = np.full(cube, np.nan), np.full(cube, np.nan)
    logs: LogTimes | None = None
    for index in range(len(table.sizes_bytes)):
        part = table.select_size(index)
        if len(part.one_way_s):
            logs = link_logs(part, shape or LinkShape())
            keep = logs.measured | (predict & ~np.eye(count, dtype=bool))
            time_s[index] = np.where(keep, np.exp(logs.log_s), np.nan)
            spread[index] = _repetition_spread(part)
    if logs is None:
        nothing = np.full((count, count), np.nan)
        return PairTimes(
            tuple(members), table.sizes_bytes, time_s, spread, nothing, nothing, np.isnan(nothing), 0.0, 0.0
        )
    apart = ~np.eye(count, dtype=bool)
    return PairTimes(
        tuple(members),
        table.sizes_bytes,
        time_s,
        spread,
        _link_repeatability(table.select_size(len(table.sizes_bytes) - 1), logs),
        np.sqrt(logs.error),
        apart & ~logs.measured,
        float(np.sqrt(logs.fitted.noise)),
        logs.order / (logs.between + logs.within) if logs.between + logs.within else 0.0,
    )


def link_logs(table: LinkTable, shape: LinkShape) -> LogTimes:
    """Fit effects of hosts, classes, links and moments to the times of messages of one size."""
    count = len(table.members)
    values = np.log(table.one_way_s)
    floor = _end_floors(table, values) if shape.bottleneck else np.zeros((count, count))
    if shape.rank:
        floor += factor_residuals(
            values - floor[table.source, table.target], table.source, table.target, count, shape.rank
        )
    link = table.source * count + table.target
    terms = [EffectTerm("link", link, count * count)]
    if count > 2:
        terms = [EffectTerm("out", table.source, count), EffectTerm("in", table.target, count), *terms]
    jobs = int(table.job.max()) + 1
    if len(values) >= 2 * len(np.unique(table.job)):
        terms = [EffectTerm("order", table.job, jobs, passing=True), *terms]
    labels = np.array(shape.classes or range(count), dtype=np.int64)
    if shape.classes:
        kinds = int(labels.max()) + 1
        block = labels[table.source] * kinds + labels[table.target]
        same = (labels[table.source] == labels[table.target]).astype(np.int64)
        terms = [EffectTerm("same", same, 2, free=True), EffectTerm("block", block, kinds * kinds), *terms]
    fit = fit_effects(values - floor[table.source, table.target], terms)
    log_s, error = floor + fit.mean, np.zeros((count, count))
    a, b = np.indices((count, count))
    for name, index in _term_levels(labels, a, b).items():
        if name in fit.effects:
            effect = fit.effects[name]
            log_s, error = log_s + effect.value[index], error + effect.error[index]
    measured = np.zeros((count, count), dtype=bool)
    measured[table.source, table.target] = True
    error = np.where(measured, error, error * shape.doubt)
    order = fit.effects["order"].variance if "order" in fit.effects else 0.0
    between = float(np.var(log_s[measured])) if measured.sum() > 2 else 0.0
    return LogTimes(log_s, error, measured, between, fit.noise + order, order, fit)


def _term_levels(labels: Ints, a: Ints, b: Ints) -> dict[str, Ints]:
    """Return the level of every ordered pair in every term of a link."""
    kinds = int(labels.max()) + 1 if len(labels) else 1
    return {
        "out": a,
        "in": b,
        "link": a * len(labels) + b,
        "same": (labels[a] == labels[b]).astype(np.int64),
        "block": labels[a] * kinds + labels[b],
    }


def _end_floors(table: LinkTable, values: Array) -> Array:
    """Return the time of the slower end of each link, [source, target]: the larger of its ends' lower quartiles."""
    count = len(table.members)
    ends = []
    for host_index in (table.source, table.target):
        order = np.lexsort((values, host_index))
        met, first, number = np.unique(host_index[order], return_index=True, return_counts=True)
        quartile = np.full(count, np.nan)
        quartile[met] = values[order][first + (number - 1) // 4]
        ends.append(np.where(np.isnan(quartile), np.nanmedian(quartile), quartile))
    return np.asarray(np.maximum(ends[0][:, None], ends[1][None, :]))


def _repetition_spread(table: LinkTable) -> Array:
    count = len(table.members)
    fastest, slowest = np.full((count, count), np.inf), np.full((count, count), -np.inf)
    np.minimum.at(fastest, (table.source, table.target), table.one_way_s)
    np.maximum.at(slowest, (table.source, table.target), table.one_way_s)
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(fastest), (slowest - fastest) / fastest, np.nan)


def _link_repeatability(table: LinkTable, logs: LogTimes) -> Array:
    """Return the variance between links over (it + variance of one measurement of this link).

    This is the intraclass correlation (Shrout and Fleiss 1979): 1 if the differences between links repeat, 0 if they
    are noise. For an unmeasured link the numerator is the variance explained by its hosts. With fewer than three links
    or a single repetition it cannot be estimated and is 1.
    """
    count = len(table.members)
    link = table.source * count + table.target
    times = np.bincount(link, minlength=count * count).reshape(count, count)
    if logs.measured.sum() < 3 or times.max(initial=0) < 2:
        return np.ones((count, count))
    squares = np.bincount(link, weights=logs.fitted.residual**2, minlength=count * count).reshape(count, count)
    noise = (squares + 2 * logs.fitted.noise) / (np.maximum(times - 1, 0) + 2)
    within = noise + logs.order
    known = np.where(logs.measured, logs.between, np.maximum(0.0, logs.between - logs.error))
    total = logs.between + within
    return np.where(total > 0, known / np.where(total > 0, total, 1.0), 1.0)
