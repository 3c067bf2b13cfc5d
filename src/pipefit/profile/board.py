"""Exchange of values between measuring ranks through the rendezvous store, which outlives a dead rank.

Rank 0 collects all posts with a time limit and publishes the missing ranks, so that all ranks have the same view and
continue without the lost ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pipefit.errors import RunError


class StoreExchange:
    """One rank's connection to the store (a torch.distributed store, or None for a single process)."""

    def __init__(self, store: Any, rank: int, members: Sequence[int], timeout_s: float) -> None:
        self.store, self.rank, self.timeout_s = store, rank, timeout_s
        self.members = list(members)
        "Ranks that are not lost."
        self.lost: dict[int, str] = {}
        self._turn = 0

    def gather(self, value: Any, timeout_s: float | None = None) -> dict[int, Any]:
        """Return every member's value of this turn (JSON values), by rank. A member that does not post in time is lost
        from now on.

        All members call it in the same order. Raises RunError if rank 0, which hosts the store, is gone.
        """
        self._turn += 1
        if self.store is None:
            return {self.rank: value}
        limit = self.timeout_s if timeout_s is None else timeout_s
        topic = f"profile/{self._turn}"
        try:
            if self.rank == 0:
                answer = self._collect_posts(topic, value, limit)
                self.store.set(f"{topic}/all", json.dumps(answer))
            else:
                self.store.set(f"{topic}/{self.rank}", json.dumps(value))
                self.store.wait([f"{topic}/all"], timedelta(seconds=limit * 2 + 10))
                answer = json.loads(self.store.get(f"{topic}/all").decode())
        except RuntimeError as error:
            raise RunError(
                "Rank 0, which collects the measurements, is gone.",
                where=f"rank {self.rank}",
                seen=str(error).splitlines()[0],
                next_step="look at the log of rank 0's host; earlier measurements are in its .partial.json file",
            ) from None
        for rank, why in answer["lost"].items():
            self.lost[int(rank)] = why
        self.members = [rank for rank in self.members if rank not in self.lost]
        return {int(rank): posted for rank, posted in answer["found"].items()}

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait for all members."""
        self.gather(None, timeout_s)

    def _collect_posts(self, topic: str, own: Any, limit_s: float) -> dict[str, Any]:
        posts, lost = {0: own}, {}
        deadline = time.monotonic() + limit_s
        for rank in self.members:
            if rank == 0:
                continue
            key = f"{topic}/{rank}"
            try:
                self.store.wait([key], timedelta(seconds=max(0.05, deadline - time.monotonic())))
            except RuntimeError:
                if not self.store.check([key]):
                    lost[rank] = f"no answer for {limit_s:g} s"
                    continue
            posts[rank] = json.loads(self.store.get(key).decode())
            self.store.delete_key(key)
        if self._turn > 2:
            self.store.delete_key(f"profile/{self._turn - 2}/all")
        return {"found": posts, "lost": lost}
