"""Rounds of disjoint pairs in which everybody meets everybody once: the circle method of round-robin tournaments.

Works for every count, odd ones too (each round one member rests): n - 1 rounds for even n, n for odd. Pipette halves
recursively, which needs a power of two, and takes as many rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Pair = tuple[int, int]


def rounds(members: Sequence[int]) -> list[list[Pair]]:
    """Rounds of unordered pairs; in each round a member is in at most one pair."""
    players: list[int | None] = list(members)
    if len(players) % 2:
        players.append(None)
    count = len(players)
    result = []
    for _ in range(max(0, count - 1)):
        ends = [(players[i], players[count - 1 - i]) for i in range(count // 2)]
        result.append([(a, b) for a, b in ends if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return [pairs for pairs in result if pairs]


def several(groups: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """The tournaments of disjoint groups played at the same time."""
    each = [rounds(group) for group in groups]
    longest = max(map(len, each), default=0)
    return [[pair for games in each if turn < len(games) for pair in games[turn]] for turn in range(longest)]


def mixed(groups: Sequence[Sequence[int]], seed: int = 0) -> Callable[[int], list[list[Pair]]]:
    """`several`, for each repetition with the members in another order: who plays beside whom, and when, changes, so
    that a moment in which everything was slow can be told from a slow link."""

    def games(repeat: int) -> list[list[Pair]]:
        order = random.Random(f"{seed}/{repeat}")
        return several([order.sample(list(group), len(group)) for group in groups])

    return games
