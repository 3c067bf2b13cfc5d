"""Which pairs of hosts to measure next, and when enough are known: fewer rounds than a tournament where hosts cluster.

Batches of rounds. One round of every batch is an audit: pairs drawn at random, predicted before they are measured; the
error of these predictions decides. The other rounds go where predictions are least certain, and between groups of
hosts that were not compared yet: as in sorting into equivalence classes, one comparison of two groups tells of all
their hosts (Devanny, Goodrich and Jetviroj 2016: about as many rounds as classes). Where predictions do not become good
the whole tournament is played, for little more than it costs alone. Pure: `next_rounds` is asked again and again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipefit.profile.classes import HostClasses
from pipefit.profile.completion import LinkCompletion, complete_links, mean_logs, subtract_noise
from pipefit.profile.effects import Array
from pipefit.profile.estimate import Bools, LinkShape, LinkTable, tabulate_samples
from pipefit.profile.links import LinkSample
from pipefit.profile.tournament import Pair, round_robin

TARGET = 0.03
"""Mean relative error of predicted links that is good enough."""

FAR = 5.0
"""A prediction that is off by more than so many targets (and three standard deviations of the noise) is a miss."""

MISSES = 0.01
"""The share of the audited pairs that may be misses."""

OPEN = 0.02
"""The share of the links that were not measured that may be between classes that were not compared: they may be one."""

SMALL = 16
"""Up to so many hosts all pairs are measured."""

PATIENCE = 24
"""Rounds before predictions that stay bad are given up: places in a space show only then (`low_rank.py`)."""

MOST = 0.6
"""After this share of a tournament without success the rest is played too."""

Games = list[list[Pair]]


@dataclass(frozen=True, slots=True)
class AuditRound:
    """One round that was predicted before it was measured."""

    ways: tuple[Pair, ...]
    "Ordered, places of members."
    predicted: Array
    "[way]: logarithms."
    claimed: Array
    "[way]: the variance that the prediction claimed."


@dataclass(slots=True)
class SurveyProgress:
    """How a survey stands."""

    rounds: int = 0
    full_rounds: int = 0
    held_out: list[float] = field(default_factory=list)
    "Mean error of the audited predictions after each batch, noise left out; of the last two audits together."
    misses: float = 1.0
    "Share of the last two audits' predictions that were far off."
    unsure: float = 1.0
    "Share of the links that were not measured on which ways to predict them that may be right are far apart."
    uncompared: float = 0.0
    "Share of the links that were not measured that are between classes of which no two hosts were."
    merged: int = 0
    "Classes that the last batch found to be one: where it found some, there may be more."
    doubt: float = 1.0
    "By how much the variance that predictions claimed was too small, in the last two audits."
    completion: LinkCompletion | None = None
    "None until something was measured."
    everything: bool = False
    "Whether all pairs were measured."

    @property
    def host_shape(self) -> LinkShape | None:
        """What hosts have in common; None before anything was measured."""
        if self.completion is None:
            return None
        found = self.completion.shape
        return replace(found, doubt=max(1.0, found.doubt * self.doubt)) if self.held_out else found


class AdaptiveSurvey:
    """The rounds of one survey of `members`, one batch after the other.

    `rounds_wanted`: as many rounds and no more; None: until the audits' mean error is at most `target`.
    """

    def __init__(
        self, members: Sequence[int], *, target: float = TARGET, rounds_wanted: int | None = None, seed: int = 0
    ) -> None:
        self.members, self.target, self.wanted = list(members), target, rounds_wanted
        self._random = random.Random(seed)
        self._grid: Games = round_robin(self._random.sample(self.members, len(self.members)))
        self._random.shuffle(self._grid)
        self._met: set[frozenset[int]] = set()
        self._audits: list[AuditRound] = []
        self._errors: list[Array] = []
        self._noise = 0.0
        self.progress = SurveyProgress(full_rounds=len(self._grid))
        self.batch = max(2, round(len(members) ** 0.5 / 2))

    def next_rounds(self, samples: Sequence[LinkSample]) -> Games:
        """What to measure now, from all that was measured so far; nothing when it is enough."""
        if not self._met:
            batch = _neighbour_rounds(self.members) + [self._from_grid() for _ in range(self.batch)]
        else:
            table = tabulate_samples(samples, self.members)
            largest = table.select_size(len(table.sizes_bytes) - 1)
            before = self.progress.completion
            found = self.progress.completion = complete_links(largest)
            self.progress.merged = max(
                0, _class_count(before, len(self.members)) - _class_count(found, len(self.members))
            )
            self._judge_audit(largest, found)
            if self.progress.everything:
                return []
            if self._is_enough():
                return []
            if self.wanted is None and self._is_hopeless():
                batch = [self._from_grid() for _ in range(len(self._grid))]
            else:
                audit = self._from_grid()
                place = {member: index for index, member in enumerate(self.members)}
                ways = [(place[a], place[b]) for pair in audit for a, b in (pair, pair[::-1])]
                logs, at = found.logs, tuple(zip(*ways, strict=True))
                self._audits.append(AuditRound(tuple(ways), logs.log_s[at], logs.error[at]))
                batch = [audit, *self._choose_rounds(found, audit)]
        batch = [pairs for pairs in batch if pairs]
        if self.wanted is not None:
            batch = batch[: self.wanted - self.progress.rounds]
        self._met |= {frozenset(pair) for pairs in batch for pair in pairs}
        self.progress.rounds += len(batch)
        self.progress.everything = len(self._met) == len(self.members) * (len(self.members) - 1) // 2
        return batch

    def _from_grid(self) -> list[Pair]:
        """A round of the tournament that is left, without the pairs that were measured."""
        while self._grid:
            pairs = [pair for pair in self._grid.pop() if frozenset(pair) not in self._met]
            if pairs:
                return pairs
        return []

    def _judge_audit(self, table: LinkTable, found: LinkCompletion) -> None:
        """The errors of the latest audit, now that it was measured."""
        if not self._audits or len(self._errors) == len(self._audits):
            return
        audit = self._audits[-1]
        means = mean_logs(table, found.logs)[tuple(zip(*audit.ways, strict=True))]
        self._errors.append(np.where(np.isfinite(means), means - audit.predicted, 0.0))
        repeats = len(table.source) / max(1, int(found.logs.measured.sum()))
        noise = found.logs.fitted.noise / repeats
        errors = np.concatenate(self._errors[-2:])
        claimed = np.concatenate([each.claimed for each in self._audits[-2:]])
        away = np.abs(errors)
        self.progress.held_out.append(subtract_noise(float(away.mean()), float(np.sqrt(2 / np.pi * noise))))
        far = FAR * self.target
        self.progress.misses = float(np.mean(away > far + 3 * np.sqrt(noise)))
        self.progress.doubt = max(0.0, float(np.mean(errors**2)) - noise) / max(1e-12, float(np.mean(claimed)))
        unmeasured = ~found.logs.measured & ~np.eye(len(self.members), dtype=bool)
        self.progress.uncompared = _open_share(found.alike, unmeasured)
        unsure = found.disagreement[unmeasured]
        self.progress.unsure = float(np.mean(unsure > far**2)) if len(unsure) else 0.0

    def _is_enough(self) -> bool:
        if self.wanted is not None:
            return self.progress.rounds >= self.wanted
        held_out = self.progress.held_out
        good = bool(held_out) and held_out[-1] <= self.target
        settled = self.progress.uncompared <= OPEN and not self.progress.merged
        return good and settled and max(self.progress.misses, self.progress.unsure) <= MISSES

    def _is_hopeless(self) -> bool:
        """Whether predictions stay bad, or so much was measured that the rest costs little."""
        held_out, found = self.progress.held_out, self.progress.completion
        clustered = found is not None and found.alike is not None
        stuck = not clustered and len(held_out) >= 2 and held_out[-1] > max(2 * self.target, 0.8 * held_out[-2])
        stuck = stuck and self.progress.rounds >= PATIENCE
        return stuck or self.progress.rounds > MOST * self.progress.full_rounds

    def _choose_rounds(self, found: LinkCompletion, audit: Sequence[Pair]) -> Games:
        """The rounds of a batch beside its audit: pairs by how much is not known of them; any, where nothing that
        hosts have in common is to be seen."""
        if found.alike is None and found.held_out > 2 * self.target:
            return [self._from_grid() for _ in range(self.batch - 1)]
        count = len(self.members)
        score = found.logs.error + found.disagreement
        score = (score + score.T) / 2
        labels = np.array(found.alike.classes) if found.alike else np.arange(count)
        compared = found.alike.compared.copy() if found.alike else np.ones((count, count), dtype=bool)
        gap = found.alike.gap if found.alike else 0.0
        met = {*self._met, *(frozenset(pair) for pair in audit)}
        result: Games = []
        for _ in range(self.batch - 1):
            value = score + gap**2 * _comparison_value(labels, compared)
            pairs = self._match_pairs(value, met, labels, compared)
            met |= {frozenset(pair) for pair in pairs}
            result.append(pairs)
        return result

    def _match_pairs(self, value: Array, met: set[frozenset[int]], labels: Array, compared: Bools) -> list[Pair]:
        """Disjoint pairs that were not measured, the most valuable first; marks the classes that they compare. Two
        pairs of one round compare the same two classes only where no others are left."""
        count = len(self.members)
        rows, columns = np.triu_indices(count, 1)
        noise = np.array([self._random.random() for _ in range(len(rows))])
        order = np.argsort(-value[rows, columns] * (1 + 0.1 * noise), kind="stable")
        free, pairs = np.ones(count, dtype=bool), []
        for strict in (True, False):
            asked: set[tuple[int, int]] = set()
            for index in order:
                a, b = int(rows[index]), int(columns[index])
                if not (free[a] and free[b]) or frozenset((self.members[a], self.members[b])) in met:
                    continue
                classes = (int(min(labels[a], labels[b])), int(max(labels[a], labels[b])))
                if strict and (classes in asked or compared[classes]):
                    continue
                asked.add(classes)
                free[a] = free[b] = False
                pairs.append((self.members[a], self.members[b]))
                compared[classes] = compared[classes[::-1]] = True
        return pairs


def _class_count(found: LinkCompletion | None, count: int) -> int:
    """How many classes the hosts are in; each in its own where none were found."""
    return len(set(found.alike.classes)) if found is not None and found.alike is not None else count


def _open_share(alike: HostClasses | None, unmeasured: Bools) -> float:
    """Share of links that were not measured between classes, one of several hosts at least, that were not compared."""
    if alike is None or not unmeasured.any():
        return 0.0
    labels = np.array(alike.classes)
    several = np.bincount(labels) > 1
    between = ~alike.compared & (several[:, None] | several[None, :])
    np.fill_diagonal(between, False)
    return float(between[labels[:, None], labels[None, :]][unmeasured].mean())


def _comparison_value(labels: Array, compared: Bools) -> Array:
    """[host, host]: how much one comparison of their classes would tell: pairs that it decides, as a share of the
    most that any does; 0 where it was made."""
    size = np.bincount(labels)
    worth = np.where(compared, 0.0, np.outer(size, size).astype(np.float64))
    np.fill_diagonal(worth, 0.0)
    most = worth.max(initial=0.0)
    return np.asarray((worth / most if most else worth)[labels[:, None], labels[None, :]])


def _neighbour_rounds(members: Sequence[int]) -> Games:
    """Two rounds that chain the members in their order: hosts with neighbouring names often share a rack."""
    even = [(members[i], members[i + 1]) for i in range(0, len(members) - 1, 2)]
    odd = [(members[i], members[i + 1]) for i in range(1, len(members) - 1, 2)]
    return [pairs for pairs in (even, odd) if pairs]
