"""Find classes of similar hosts (racks, regions, slow hosts) from the measured links between them.

After subtracting the hosts' own effects, link times fall into two clusters if hosts form classes: pairs that are faster
than their ends predict, and the rest. Hosts joined by most of their fast pairs form a class. If the two clusters are
not separated, there are no classes. For comparison, a normal distribution cut in the middle has a gap of 2.65 standard
deviations of its halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array
from pipefit.profile.estimate import Bools, LinkShape, LinkTable, LogTimes, link_logs

MIN_CLUSTER_GAP = 4.0
"""Minimum gap between the two clusters, in standard deviations."""

LEAST_GAP = 0.08
"""Minimum gap between the two clusters, as a difference of logarithms."""

CLUSTER_PASSES = 3


@dataclass(frozen=True, slots=True)
class HostClasses:
    """The class of every host, and the pairs of classes that were compared."""

    classes: tuple[int, ...]
    "By host; a host unlike all others has a class of its own."
    compared: Bools
    "[class, class]: whether a link between them was measured."
    gap: float
    "Difference (of logarithms) between links across classes and links inside classes."

    @property
    def link_shape(self) -> LinkShape:
        return LinkShape(classes=self.classes)


def find_classes(table: LinkTable, bottleneck: bool = False) -> HostClasses | None:
    """Return the classes of the hosts in a table of one message size, or None."""
    known: HostClasses | None = None
    for _ in range(CLUSTER_PASSES):
        logs = link_logs(table, LinkShape(classes=known.classes if known else (), bottleneck=bottleneck))
        now = _group_hosts(_beyond_hosts(logs, table, known))
        if now is None or (known is not None and now.classes == known.classes):
            return now
        known = now
    return known


def _beyond_hosts(logs: LogTimes, table: LinkTable, known: HostClasses | None) -> Array:
    """Return the residual of each measured pair after its hosts' effects, mean of both directions; NaN if not
    measured."""
    count = len(table.members)
    effects = logs.fitted.effects
    rest = effects["link"].value.reshape(count, count).copy()
    if known is not None:
        labels = np.array(known.classes)
        kinds = int(labels.max()) + 1
        rest += effects["block"].value[labels[:, None] * kinds + labels[None, :]]
        rest += effects["same"].value[(labels[:, None] == labels[None, :]).astype(int)]
    rest = np.where(logs.measured, rest, np.nan)
    both = np.stack([rest, rest.T])
    known_ways = np.isfinite(both).sum(axis=0)
    return np.asarray(np.where(known_ways > 0, np.nansum(both, axis=0) / np.maximum(known_ways, 1), np.nan))


def _group_hosts(rest: Array) -> HostClasses | None:
    """Return classes from a symmetric value of each pair of hosts, low for pairs of one class; NaN if unknown."""
    either = np.isfinite(rest) & ~np.eye(len(rest), dtype=bool)
    values = rest[np.triu(either, 1)]
    if len(values) < 4:
        return None
    split = split_values(values)
    if split is None:
        return None
    border, gap = split
    together = either & (np.nan_to_num(rest, nan=np.inf) < border)
    labels = merge_groups(together.astype(np.int64), (either & ~together).astype(np.int64))
    kinds = int(labels.max()) + 1
    if kinds in (1, len(labels)):
        return None
    compared = np.zeros((kinds, kinds), dtype=bool)
    a, b = np.nonzero(either)
    compared[labels[a], labels[b]] = True
    return HostClasses(tuple(int(label) for label in labels), compared, gap)


def split_values(values: Array) -> tuple[float, float] | None:
    """Return (border, distance) of the best split of numbers into two clusters; None if they are not separated."""
    ordered = np.sort(values)
    count = np.arange(1, len(ordered))
    below, total = np.cumsum(ordered)[:-1], ordered.sum()
    squares, all_squares = np.cumsum(ordered**2)[:-1], float((ordered**2).sum())
    low, high = below / count, (total - below) / (len(ordered) - count)
    inside = squares - count * low**2 + (all_squares - squares) - (len(ordered) - count) * high**2
    best = int(np.argmin(inside))
    gap = float(high[best] - low[best])
    sigma = float(np.sqrt(max(0.0, inside[best]) / len(ordered)))
    if gap < max(LEAST_GAP, MIN_CLUSTER_GAP * sigma):
        return None
    return float((ordered[best] + ordered[best + 1]) / 2), gap


def merge_groups(together: NDArray[np.int64], apart: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return labels from 0 by host. Groups with more links that join than links that part are merged, largest gain
    first."""
    count = len(together)
    joins, parts = together.copy(), apart.copy()
    np.fill_diagonal(joins, 0)
    np.fill_diagonal(parts, 0)
    label = np.arange(count)
    alive = np.ones(count, dtype=bool)
    while True:
        gain = np.where(alive[:, None] & alive[None, :], joins - parts, -1)
        np.fill_diagonal(gain, -1)
        a, b = divmod(int(np.argmax(gain)), count)
        if gain[a, b] <= 0:
            break
        for matrix in (joins, parts):
            matrix[a] += matrix[b]
            matrix[:, a] += matrix[:, b]
            matrix[b], matrix[:, b] = 0, 0
        alive[b] = False
        label[label == b] = a
    return np.unique(label, return_inverse=True)[1].astype(np.int64)
