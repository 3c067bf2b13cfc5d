"""The cost of converting a value from the forms in which it is held to others.

Forms are integers, sets of forms are bit masks. A conversion adds a form and removes none, so the cheapest way to
obtain a set of forms is a shortest path over sets: a cheapest tree of conversions, shared by all readers of the value.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from math import fsum

BITS = 8
"""Number of forms: I is 0, P is 1, G(d) is 2 + d, and the last is `frontier.ALIKE`."""

Conversions = Mapping[tuple[int, int], float]
"""(source form, target form) -> seconds."""

_Reached = dict[int, tuple[float, int, tuple[int, int]]]
"""Set of forms -> (seconds, previous set, last conversion)."""


class FormConverter:
    """The conversions of one value."""

    def __init__(self, conversions: Conversions) -> None:
        self.conversions = conversions
        self.between_s = _shortest_paths(conversions)
        "[source form][target form]: seconds of the cheapest path of conversions."
        self._known: dict[tuple[int, int], float] = {}
        self._bounds: dict[tuple[int, int], float] = {}
        self._reached: dict[int, _Reached] = {}
        self._options: dict[tuple[int, int], tuple[tuple[int, float], ...]] = {}

    def cheapest_s(self, have: int, want: int) -> float:
        """Return the seconds to hold a value in all forms `want`, if it is held in `have`; infinite if impossible."""
        missing = want & ~have
        if not missing:
            return 0.0
        if not missing & (missing - 1) and not have & (have - 1):
            return self.between_s[have.bit_length() - 1][missing.bit_length() - 1]
        key = have, want
        if key not in self._known:
            reached = self._reachable_sets(have)
            able = [seconds for mask, (seconds, _, _) in reached.items() if not want & ~mask]
            self._known[key] = min(able, default=float("inf"))
        return self._known[key]

    def bound_s(self, have: int, want: int) -> float:
        """Return a fast upper bound of `cheapest_s`: every missing form converted by its own path."""
        missing = want & ~have
        if not missing:
            return 0.0
        key = have, want
        if key not in self._bounds:
            starts = [self.between_s[form] for form in range(BITS) if have >> form & 1]
            self._bounds[key] = fsum(
                min((distances[form] for distances in starts), default=float("inf"))
                for form in range(BITS)
                if missing >> form & 1
            )
        return self._bounds[key]

    def conversion_options(self, have: int, want: int) -> tuple[tuple[int, float], ...]:
        """Return (set, seconds) of the sets of forms that may be useful and contain `want`.

        A set is omitted if a smaller one, plus later conversions to the missing forms, costs no more.
        """
        key = have, want
        if key not in self._options:
            if not want & ~have:
                self._options[key] = ((have, 0.0),)
                return self._options[key]
            able = sorted((s, mask) for mask, (s, _, _) in self._reachable_sets(have).items() if not want & ~mask)
            options: list[tuple[int, float]] = []
            for seconds, mask in able:
                if not any(other_s + self.bound_s(subset, mask) <= seconds for subset, other_s in options):
                    options.append((mask, seconds))
            self._options[key] = tuple(options)
        return self._options[key]

    def conversion_tree(self, have: int, want: int) -> dict[int, int]:
        """Return target form -> source form of all conversions on the cheapest way to `want`."""
        if not want & ~have:
            return {}
        reached = self._reachable_sets(have)
        mask = min((m for m in reached if not want & ~m), key=lambda m: (reached[m][0], m.bit_count()))
        sources: dict[int, int] = {}
        while mask != have:
            _, mask, (source, target) = reached[mask]
            sources[target] = source
        return sources

    def _reachable_sets(self, have: int) -> _Reached:
        """Return every set of forms reachable from `have`."""
        if have not in self._reached:
            final: _Reached = {}
            queue: list[tuple[float, int, int, tuple[int, int]]] = [(0.0, have, have, (0, 0))]
            while queue:
                seconds, mask, before, move = heapq.heappop(queue)
                if mask in final:
                    continue
                final[mask] = seconds, before, move
                for (source, target), more_s in self.conversions.items():
                    if mask >> source & 1 and not mask >> target & 1 and mask | 1 << target not in final:
                        heapq.heappush(queue, (seconds + more_s, mask | 1 << target, mask, (source, target)))
            self._reached[have] = final
        return self._reached[have]


def _shortest_paths(conversions: Conversions) -> list[list[float]]:
    """Return the seconds from every form to every other, by Floyd and Warshall."""
    distances = [[0.0 if a == b else float("inf") for b in range(BITS)] for a in range(BITS)]
    for (source, target), seconds in conversions.items():
        distances[source][target] = min(distances[source][target], seconds)
    used = sorted({form for move in conversions for form in move})
    for via in used:
        for source in used:
            first = distances[source][via]
            for target in used:
                if first + distances[via][target] < distances[source][target]:
                    distances[source][target] = first + distances[via][target]
    return distances
