"""The moves and the seconds that a search of orders may still use."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(slots=True)
class MoveBudget:
    """The remaining budget of a search."""

    moves: int
    until_s: float
    "On the clock of `time.perf_counter`."
    spent: int = 0
    kept_s: float = 0.0
    "Time reserved for the steps after the search."

    def take_moves(self, most: int) -> int:
        """Return the number of moves to do now; 0 if the budget is spent."""
        if time.perf_counter() > self.until_s - self.kept_s:
            return 0
        return max(min(most, self.moves - self.spent), 0)

    def moves_share(self, share: float) -> MoveBudget:
        """Return a share of the remaining budget."""
        now = time.perf_counter()
        left = self.until_s - self.kept_s - now
        until_s = now + share * max(left, 0.0) if left < math.inf else math.inf
        return MoveBudget(int(share * (self.moves - self.spent)), until_s)
