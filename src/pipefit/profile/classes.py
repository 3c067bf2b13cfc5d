"""Which hosts are alike: racks, regions, slow hosts, found from the links that were measured between them.

What the hosts' own effects leave of each link falls into two heaps where hosts cluster: pairs that are faster than
their ends say, and the rest. Hosts that most of their fast pairs join form a class. Where the heaps do not stand apart,
there are no classes: a normal distribution cut in the middle is 2.65 of its parts' standard deviations apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipefit.profile.effects import Array
from pipefit.profile.estimate import Bools, LinkShape, LinkTable, LogTimes, link_logs

APART = 4.0
"""Standard deviations that must lie between the heaps."""

LEAST_GAP = 0.08
"""Smallest difference (of logarithms) between the heaps that is worth a class."""

PASSES = 3


@dataclass(frozen=True, slots=True)
class HostClasses:
    """Hosts by class, and which classes were compared."""

    classes: tuple[int, ...]
    "By host; a host that is like no other has a class of its own."
    compared: Bools
    "[class, class]: whether a link between them was measured."
    gap: float
    "By how much (of the logarithm) links inside classes are faster."

    @property
    def link_shape(self) -> LinkShape:
        return LinkShape(classes=self.classes)


def find_classes(table: LinkTable, bottleneck: bool = False) -> HostClasses | None:
    """Classes of the hosts of a table with messages of one size, or None."""
    found: HostClasses | None = None
    for _ in range(PASSES):
        logs = link_logs(table, LinkShape(classes=found.classes if found else (), bottleneck=bottleneck))
        now = _group_hosts(_beyond_hosts(logs, table, found))
        if now is None or (found is not None and now.classes == found.classes):
            return now
        found = now
    return found


def _beyond_hosts(logs: LogTimes, table: LinkTable, known: HostClasses | None) -> Array:
    """What of each measured pair, mean of both directions, is not its hosts' effect; NaN where not measured."""
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
    """Classes from one symmetric figure of each pair of hosts, low for those that belong together; NaN for unknown."""
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
    """(border, distance) of the best division of numbers into two heaps; None where they do not stand apart."""
    ordered = np.sort(values)
    count = np.arange(1, len(ordered))
    below, whole = np.cumsum(ordered)[:-1], ordered.sum()
    squares, all_squares = np.cumsum(ordered**2)[:-1], float((ordered**2).sum())
    low, high = below / count, (whole - below) / (len(ordered) - count)
    inside = squares - count * low**2 + (all_squares - squares) - (len(ordered) - count) * high**2
    best = int(np.argmin(inside))
    gap = float(high[best] - low[best])
    sigma = float(np.sqrt(max(0.0, inside[best]) / len(ordered)))
    if gap < max(LEAST_GAP, APART * sigma):
        return None
    return float((ordered[best] + ordered[best + 1]) / 2), gap


def merge_groups(together: NDArray[np.int64], apart: NDArray[np.int64]) -> NDArray[np.int64]:
    """Labels from 0 by host: groups that more links join than part are merged, those with the most first."""
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
