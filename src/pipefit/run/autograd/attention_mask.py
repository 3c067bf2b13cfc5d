"""Which keys the queries of a slice see: all earlier ones, those of a sliding window, those of the own document.

Query i of a slice that starts at place `first` of its row stands at place p = first + i and sees keys from
`lower(i)` to p. What a run of earlier keys needs is decided on the host, from the places where documents start, which
every rank knows before the step: nothing where no query sees it, no mask where every query sees all of it, else a
mask of that run alone. Masks are made once an action and shared by its layers (`Record.masks`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from pipefit.run.autograd.attention_kernels import hidden_score
from pipefit.run.autograd.saved_forward import SavedForward


class AttentionMask:
    """What the queries q (B, T, H, K) at places first, first + 1, ... see. `window`: so many last keys; None: all.
    `part`: of the slice's tokens, those that have queries here."""

    def __init__(
        self, record: SavedForward, first: int, q: torch.Tensor, window: int | None, shard: Any, part: tuple[int, int]
    ) -> None:
        self.first, self.count, self.window, self.row = first, q.shape[1], window, 0
        self.documents = record.feed.documents
        if self.documents is not None:
            self.documents = self.documents[:, slice(*part)]
        if self.documents is not None and self.documents.shape[0] != q.shape[0]:  # rows split over the shards
            start, stop = shard.runs(self.documents.shape[0])[shard.position]
            self.documents, self.row = self.documents[start:stop], start
        self.masks = record.masks
        self.dtype, self.device = q.dtype, q.device
        count = self.count
        self.lowest, self.highest = record.feed.document_bounds if self.documents is not None else (0, 0)
        if window is not None:
            self.lowest = max(self.lowest, first - window + 1)
            self.highest = max(self.highest, first + count - window)

    def earlier_mask(self, start: int, stop: int) -> torch.Tensor | Literal["nothing"] | None:
        """The mask of the earlier keys at places start to stop; None where all are seen."""
        if stop <= self.lowest:
            return "nothing"
        return None if self.highest <= start else self._build_mask(start, stop)

    def own_mask(self) -> torch.Tensor | None:
        """The mask of the slice's own keys; None where causality alone decides."""
        return None if self.highest <= self.first else self._build_mask(self.first, self.first + self.count)

    def _build_mask(self, start: int, stop: int) -> torch.Tensor:
        """(B or 1, 1, T, stop - start): 0 where a key is seen, a large negative number where it is not."""
        rows = 0 if self.documents is None else len(self.documents)
        key = (self.window, self.first, self.count, start, stop, self.row, rows)  # layers may have shares of their own
        if key not in self.masks:
            places = torch.arange(self.first, self.first + self.count, device=self.device).unsqueeze(0)
            lower: Any = places - self.window + 1 if self.window is not None else torch.zeros_like(places)
            if self.documents is not None:
                lower = torch.maximum(self.documents, lower)
            keys = torch.arange(start, stop, device=self.device)
            seen = (keys >= lower.unsqueeze(-1)) & (keys <= places.unsqueeze(-1))
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
            self.masks[key] = mask.masked_fill_(~seen, hidden_score(self.dtype)).unsqueeze(1)
        return self.masks[key]
