"""Choose the pairs of hosts to measure next, and stop when the rest can be predicted: fewer rounds than a tournament if
hosts form classes.

Rounds come in batches. One round of every batch is an audit: pairs drawn at random, predicted before they are measured.
The error of these predictions decides when to stop. The other rounds measure the least certain links, and links between
groups of hosts that were not compared yet. As in sorting into equivalence classes, one comparison of two groups
classifies all their hosts (Devanny, Goodrich and Jetviroj 2016: about as many rounds as classes). If predictions stay
poor, the full tournament is measured, at little more than its own cost. Pure: `next_rounds` is called repeatedly.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipefit.cost.types import Array
from pipefit.profile.classes import HostClasses
from pipefit.profile.completion import LinkCompletion, complete_links, mean_logs, subtract_noise
from pipefit.profile.estimate import Bools, LinkShape, LinkTable, tabulate_samples
from pipefit.profile.links import LinkSample
from pipefit.profile.tournament import HostPair, round_robin

TARGET = 0.03
"""Mean relative error of predicted links at which measuring stops."""

MISS_TARGETS = 5.0
"""A prediction that is off by more than this many targets (and three standard deviations of the noise) is a miss."""

MISSES = 0.01
"""Allowed share of misses among the audited pairs."""

OPEN = 0.02
"""Allowed share of unmeasured links between uncompared classes, which may be one class."""

ALL_PAIRS_HOSTS = 16
"""Up to this number of hosts all pairs are measured."""

PATIENCE = 24
"""Rounds before poor predictions are given up: structure of low rank shows only then (`low_rank.py`)."""

MAX_FAILED_SHARE = 0.6
"""After this share of a tournament without success the rest is measured too."""

OpenGames = list[list[HostPair]]


@dataclass(frozen=True, slots=True)
class AuditRound:
    """One round that was predicted before it was measured."""

    ways: tuple[HostPair, ...]
    "Ordered pairs of member positions."
    predicted: Array
    "[pair]: logarithms."
    claimed: Array
    "[pair]: the variance that the prediction claimed."


@dataclass(slots=True)
class SurveyProgress:
    """The state of a survey."""

    rounds: int = 0
    full_rounds: int = 0
    held_out: list[float] = field(default_factory=list)
    "Mean error of the audited predictions after each batch, without noise; over the last two audits together."
    misses: float = 1.0
    "Share of misses in the last two audits' predictions."
    unsure: float = 1.0
    "Share of unmeasured links on which plausible prediction models disagree widely."
    uncompared: float = 0.0
    "Share of unmeasured links that are between two classes without a measured link."
    merged: int = 0
    "Classes that the last batch merged into others; after a merge there may be more."
    doubt: float = 1.0
    "Factor by which predictions underestimated their variance in the last two audits."
    completion: LinkCompletion | None = None
    "None before the first measurement."
    everything: bool = False
    "Whether all pairs were measured."

    @property
    def host_shape(self) -> LinkShape | None:
        """The structure shared by the hosts' links; None before the first measurement."""
        if self.completion is None:
            return None
        shape = self.completion.shape
        return replace(shape, doubt=max(1.0, shape.doubt * self.doubt)) if self.held_out else shape


class AdaptiveSurvey:
    """The rounds of one survey of `members`, in batches.

    `rounds_wanted`: exactly this many rounds; None: until the audits' mean error is at most `target`.
    """

    def __init__(
        self, members: Sequence[int], *, target: float = TARGET, rounds_wanted: int | None = None, seed: int = 0
    ) -> None:
        self.members, self.target, self.wanted = list(members), target, rounds_wanted
        self._random = random.Random(seed)
        self._grid: OpenGames = round_robin(self._random.sample(self.members, len(self.members)))
        self._random.shuffle(self._grid)
        self._met: set[frozenset[int]] = set()
        self._audits: list[AuditRound] = []
        self._errors: list[Array] = []
        self._noise = 0.0
        self.progress = SurveyProgress(full_rounds=len(self._grid))
        self.batch = max(2, round(len(members) ** 0.5 / 2))

    def next_rounds(self, samples: Sequence[LinkSample]) -> OpenGames:
        """Return the rounds to measure next, given all samples so far; an empty list when no more are needed."""
        if not self._met:
            batch = _neighbour_rounds(self.members) + [self._from_grid() for _ in range(self.batch)]
        else:
            table = tabulate_samples(samples, self.members)
            largest = table.select_size(len(table.sizes_bytes) - 1)
            before = self.progress.completion
            completion = self.progress.completion = complete_links(largest)
            self.progress.merged = max(
                0, _class_count(before, len(self.members)) - _class_count(completion, len(self.members))
            )
            self._judge_audit(largest, completion)
            if self.progress.everything:
                return []
            if self._is_enough():
                return []
            if self.wanted is None and self._is_hopeless():
                batch = [self._from_grid() for _ in range(len(self._grid))]
            else:
                audit = self._from_grid()
                position = {member: index for index, member in enumerate(self.members)}
                directed = [(position[a], position[b]) for pair in audit for a, b in (pair, pair[::-1])]
                logs, link_index = completion.logs, tuple(zip(*directed, strict=True))
                self._audits.append(AuditRound(tuple(directed), logs.log_s[link_index], logs.error[link_index]))
                batch = [audit, *self._choose_rounds(completion, audit)]
        batch = [pairs for pairs in batch if pairs]
        if self.wanted is not None:
            batch = batch[: self.wanted - self.progress.rounds]
        self._met |= {frozenset(pair) for pairs in batch for pair in pairs}
        self.progress.rounds += len(batch)
        self.progress.everything = len(self._met) == len(self.members) * (len(self.members) - 1) // 2
        return batch

    def _from_grid(self) -> list[HostPair]:
        """Return a remaining round of the tournament, without the pairs already measured."""
        while self._grid:
            pairs = [pair for pair in self._grid.pop() if frozenset(pair) not in self._met]
            if pairs:
                return pairs
        return []

    def _judge_audit(self, table: LinkTable, found: LinkCompletion) -> None:
        """Compute the errors of the latest audit from its measurements."""
        if not self._audits or len(self._errors) == len(self._audits):
            return
        audit = self._audits[-1]
        means = mean_logs(table, found.logs)[tuple(zip(*audit.ways, strict=True))]
        self._errors.append(np.where(np.isfinite(means), means - audit.predicted, 0.0))
        repeats = len(table.source) / max(1, int(found.logs.measured.sum()))
        noise = found.logs.fitted.noise / repeats
        errors = np.concatenate(self._errors[-2:])
        claimed = np.concatenate([recent.claimed for recent in self._audits[-2:]])
        away = np.abs(errors)
        self.progress.held_out.append(subtract_noise(float(away.mean()), float(np.sqrt(2 / np.pi * noise))))
        far = MISS_TARGETS * self.target
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
        """Return whether predictions stay poor, or so much was measured that the rest costs little."""
        held_out, completion = self.progress.held_out, self.progress.completion
        clustered = completion is not None and completion.alike is not None
        stuck = not clustered and len(held_out) >= 2 and held_out[-1] > max(2 * self.target, 0.8 * held_out[-2])
        stuck = stuck and self.progress.rounds >= PATIENCE
        return stuck or self.progress.rounds > MAX_FAILED_SHARE * self.progress.full_rounds

    def _choose_rounds(self, found: LinkCompletion, audit: Sequence[HostPair]) -> OpenGames:
        """Return the rounds of a batch beside its audit: the most uncertain pairs, or any pairs if no structure was
        found."""
        if found.alike is None and found.held_out > 2 * self.target:
            return [self._from_grid() for _ in range(self.batch - 1)]
        count = len(self.members)
        score = found.logs.error + found.disagreement
        score = (score + score.T) / 2
        labels = np.array(found.alike.classes) if found.alike else np.arange(count)
        compared = found.alike.compared.copy() if found.alike else np.ones((count, count), dtype=bool)
        gap = found.alike.gap if found.alike else 0.0
        met = {*self._met, *(frozenset(pair) for pair in audit)}
        result: OpenGames = []
        for _ in range(self.batch - 1):
            value = score + gap**2 * _comparison_value(labels, compared)
            pairs = self._match_pairs(value, met, labels, compared)
            met |= {frozenset(pair) for pair in pairs}
            result.append(pairs)
        return result

    def _match_pairs(self, value: Array, met: set[frozenset[int]], labels: Array, compared: Bools) -> list[HostPair]:
        """Return disjoint unmeasured pairs, the most valuable first, and mark the classes that they compare.

        Two pairs of one round compare the same two classes only if no other classes are left.
        """
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
    """Return the number of host classes; each host is its own class if none were found."""
    return len(set(found.alike.classes)) if found is not None and found.alike is not None else count


def _open_share(alike: HostClasses | None, unmeasured: Bools) -> float:
    """Return the share of unmeasured links between uncompared classes, at least one of them of several hosts."""
    if alike is None or not unmeasured.any():
        return 0.0
    labels = np.array(alike.classes)
    several = np.bincount(labels) > 1
    between = ~alike.compared & (several[:, None] | several[None, :])
    np.fill_diagonal(between, False)
    return float(between[labels[:, None], labels[None, :]][unmeasured].mean())


def _comparison_value(labels: Array, compared: Bools) -> Array:
    """Return [host, host]: the value of one comparison of their classes; 0 if it was made.

    The value is the number of pairs that it decides, relative to the maximum.
    """
    size = np.bincount(labels)
    worth = np.where(compared, 0.0, np.outer(size, size).astype(np.float64))
    np.fill_diagonal(worth, 0.0)
    largest = worth.max(initial=0.0)
    return np.asarray((worth / largest if largest else worth)[labels[:, None], labels[None, :]])


def _neighbour_rounds(members: Sequence[int]) -> OpenGames:
    """Return two rounds that chain the members in order: hosts with neighbouring names often share a rack."""
    even = [(members[i], members[i + 1]) for i in range(0, len(members) - 1, 2)]
    odd = [(members[i], members[i + 1]) for i in range(1, len(members) - 1, 2)]
    return [pairs for pairs in (even, odd) if pairs]
