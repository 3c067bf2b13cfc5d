"""How measuring ranks tell each other what they found: through the rendezvous store, which outlives a dead rank.

Rank 0 collects what everybody posts, waits only so long, and publishes who is missing, so that all ranks hold the
same view and go on without the lost ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pipefit.errors import RunError


class StoreExchange:
    """This rank's place at the store (a torch.distributed store, or None for one process alone)."""

    def __init__(self, store: Any, rank: int, members: Sequence[int], timeout_s: float) -> None:
        self.store, self.rank, self.timeout_s = store, rank, timeout_s
        self.members = list(members)
        "Ranks that are still there."
        self.lost: dict[int, str] = {}
        self._turn = 0

    def gather(self, value: Any, timeout_s: float | None = None) -> dict[int, Any]:
        """What every member posted in this turn (JSON values), by rank. Who does not post in time is lost from now on.

        All members call it in the same order. Raises RunError where rank 0, which keeps the store, is gone.
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
                "Rank 0, which gathers what is measured, is gone.",
                where=f"rank {self.rank}",
                seen=str(error).splitlines()[0],
                next_step="look at the log of rank 0's host; what was measured until then is in its .partial.json file",
            ) from None
        for rank, why in answer["lost"].items():
            self.lost[int(rank)] = why
        self.members = [rank for rank in self.members if rank not in self.lost]
        return {int(rank): found for rank, found in answer["found"].items()}

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait for all members."""
        self.gather(None, timeout_s)

    def _collect_posts(self, topic: str, own: Any, limit_s: float) -> dict[str, Any]:
        found, lost = {0: own}, {}
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
            found[rank] = json.loads(self.store.get(key).decode())
            self.store.delete_key(key)
        if self._turn > 2:
            self.store.delete_key(f"profile/{self._turn - 2}/all")
        return {"found": found, "lost": lost}
