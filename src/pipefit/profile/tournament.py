"""Rounds of disjoint pairs in which every two members meet once: the circle method of round-robin tournaments.

Works for every number of members (if it is odd, one member rests in each round): n - 1 rounds for even n, n for odd n.
Pipette halves recursively, which needs a power of two and the same number of rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

HostPair = tuple[int, int]


def round_robin(members: Sequence[int]) -> list[list[HostPair]]:
    """Return rounds of unordered pairs; in each round a member is in at most one pair."""
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


def parallel_tournaments(groups: Sequence[Sequence[int]]) -> list[list[HostPair]]:
    """Return the tournaments of disjoint groups, run at the same time."""
    tournaments = [round_robin(group) for group in groups]
    longest = max(map(len, tournaments), default=0)
    return [[pair for games in tournaments if turn < len(games) for pair in games[turn]] for turn in range(longest)]


def shuffle_members(groups: Sequence[Sequence[int]], seed: int = 0) -> Callable[[int], list[list[HostPair]]]:
    """Return a function from repetition to `parallel_tournaments` with shuffled members.

    The composition of rounds changes, so that a moment in which everything was slow can be told from a slow link.
    """

    def shuffled_rounds(repeat: int) -> list[list[HostPair]]:
        order = random.Random(f"{seed}/{repeat}")
        return parallel_tournaments([order.sample(list(group), len(group)) for group in groups])

    return shuffled_rounds


def shuffle_rounds(games: Sequence[Sequence[HostPair]], seed: int = 0) -> Callable[[int], list[list[HostPair]]]:
    """Return a function from repetition to the same pairs in the same number of rounds, but in other combinations.

    The pairs of two rounds form paths and even cycles, along each of which the pairs may swap rounds (Kempe 1879).
    """

    def swapped_rounds(repeat: int) -> list[list[HostPair]]:
        order = random.Random(f"{seed}/{repeat}")
        result = [list(pairs) for pairs in games]
        for _ in range(2 * len(result) if len(result) > 1 else 0):
            a, b = order.sample(range(len(result)), 2)
            result[a], result[b] = _swap_components(result[a], result[b], order)
        return [pairs for pairs in result if pairs]

    return swapped_rounds


def _swap_components(
    one: Sequence[HostPair], other: Sequence[HostPair], order: random.Random
) -> tuple[list[HostPair], list[HostPair]]:
    """Return two rounds after swapping each path or cycle of their pairs with probability 1/2."""
    edges_at: dict[int, list[tuple[HostPair, int]]] = {}
    for turn, pairs in enumerate((one, other)):
        for pair in pairs:
            for member in pair:
                edges_at.setdefault(member, []).append((pair, turn))
    result: tuple[list[HostPair], list[HostPair]] = ([], [])
    seen: set[tuple[HostPair, int]] = set()
    for start in edges_at:
        chain, coin = list(edges_at[start]), order.random() < 0.5
        while chain:
            edge = chain.pop()
            if edge not in seen:
                seen.add(edge)
                result[edge[1] ^ coin].append(edge[0])
                chain += [next_edge for member in edge[0] for next_edge in edges_at[member]]
    return result


def thin_rounds(
    games: Sequence[Sequence[HostPair]], width: int, classes: Mapping[int, int] | None = None
) -> list[list[HostPair]]:
    """Split rounds: at most `width` pairs at a time, and at most one pair that leaves each class."""
    result: list[list[HostPair]] = []
    for pairs in games:
        parts: list[tuple[list[HostPair], set[int]]] = []
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
