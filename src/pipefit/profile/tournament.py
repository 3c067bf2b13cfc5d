"""Rounds of disjoint pairs in which everybody meets everybody once: the circle method of round-robin tournaments.

Works for every count, odd ones too (each round one member rests): n - 1 rounds for even n, n for odd. Pipette halves
recursively, which needs a power of two, and takes as many rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

Pair = tuple[int, int]


def round_robin(members: Sequence[int]) -> list[list[Pair]]:
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


def parallel_tournaments(groups: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """The tournaments of disjoint groups played at the same time."""
    each = [round_robin(group) for group in groups]
    longest = max(map(len, each), default=0)
    return [[pair for games in each if turn < len(games) for pair in games[turn]] for turn in range(longest)]


def shuffle_members(groups: Sequence[Sequence[int]], seed: int = 0) -> Callable[[int], list[list[Pair]]]:
    """`parallel_tournaments`, for each repetition with the members in another order: who plays beside whom, and when,
    changes, so that a moment in which everything was slow can be told from a slow link."""

    def shuffled_rounds(repeat: int) -> list[list[Pair]]:
        order = random.Random(f"{seed}/{repeat}")
        return parallel_tournaments([order.sample(list(group), len(group)) for group in groups])

    return shuffled_rounds


def shuffle_rounds(games: Sequence[Sequence[Pair]], seed: int = 0) -> Callable[[int], list[list[Pair]]]:
    """The same pairs in as many rounds, for each repetition beside others: two rounds together are paths and even
    cycles, along each of which their pairs may change places (Kempe 1879)."""

    def swapped_rounds(repeat: int) -> list[list[Pair]]:
        order = random.Random(f"{seed}/{repeat}")
        result = [list(pairs) for pairs in games]
        for _ in range(2 * len(result) if len(result) > 1 else 0):
            a, b = order.sample(range(len(result)), 2)
            result[a], result[b] = _swap_components(result[a], result[b], order)
        return [pairs for pairs in result if pairs]

    return swapped_rounds


def _swap_components(one: Sequence[Pair], other: Sequence[Pair], order: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Two rounds after a coin was tossed for each path or cycle of their pairs."""
    at: dict[int, list[tuple[Pair, int]]] = {}
    for turn, pairs in enumerate((one, other)):
        for pair in pairs:
            for member in pair:
                at.setdefault(member, []).append((pair, turn))
    result: tuple[list[Pair], list[Pair]] = ([], [])
    seen: set[tuple[Pair, int]] = set()
    for start in at:
        chain, coin = list(at[start]), order.random() < 0.5
        while chain:
            edge = chain.pop()
            if edge not in seen:
                seen.add(edge)
                result[edge[1] ^ coin].append(edge[0])
                chain += [next_edge for member in edge[0] for next_edge in at[member]]
    return result


def thin_rounds(
    games: Sequence[Sequence[Pair]], width: int, classes: Mapping[int, int] | None = None
) -> list[list[Pair]]:
    """The same pairs in more rounds: at most `width` at a time, and of each class at most one that leaves it."""
    result: list[list[Pair]] = []
    for pairs in games:
        parts: list[tuple[list[Pair], set[int]]] = []
        for pair in pairs:
            ends = {classes[member] for member in pair} if classes else set()
            crossing = ends if len(ends) > 1 else set()
            for part, used in parts:
                if len(part) < width and not used & crossing:
                    part.append(pair)
                    used |= crossing
                    break
            else:
                parts.append(([pair], set(crossing)))
        result += [part for part, _ in parts]
    return result
