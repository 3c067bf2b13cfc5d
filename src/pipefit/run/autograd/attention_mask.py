"""Masks for the visible keys of a slice: all earlier keys, those in a sliding window, or those of the same document.

Query i of a slice that starts at position `first` of its row has position p = first + i. It attends to keys from
`lower(i)` to p, or to the key that `ends` names. The host decides the mask of a run of earlier keys from the document
starts, which every rank knows before the step. The run is skipped if no query attends to it, and needs no mask if every
query attends to all of it. Otherwise it gets a mask of its own. Masks are made once per action and shared by its layers
(`SavedForward.masks`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from pipefit.run.autograd.attention_kernels import hidden_score
from pipefit.run.autograd.saved_forward import SavedForward


class AttentionMask:
    """Visible keys of the queries q (B, T, H, K) at positions first, first + 1, ... by the settings of the operator
    (`AttentionSpec`). `part`: the slice's tokens that have queries on this device."""

    def __init__(self, record: SavedForward, first: int, q: torch.Tensor, sees: Any, part: tuple[int, int]) -> None:
        window, shard, self.ends = sees.window, sees.shard, sees.ends
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
        """Return the mask of the earlier keys at positions start to stop; None if all are visible."""
        if stop <= self.lowest:
            return "nothing"
        return None if self.highest <= start else self._build_mask(start, stop)

    def own_mask(self) -> torch.Tensor | None:
        """Return the mask of the slice's own keys; None if causality alone decides."""
        causal = self.highest <= self.first and self.ends is None
        return None if causal else self._build_mask(self.first, self.first + self.count)

    def _build_mask(self, start: int, stop: int) -> torch.Tensor:
        """Return (B or 1, 1, T, stop - start): 0 for a visible key, a large negative number for a hidden one."""
        rows = 0 if self.documents is None else len(self.documents)
        seeing = 0 if self.ends is None else len(self.ends)
        # Layers may have different shares.
        key = (self.window, self.first, self.count, start, stop, self.row, rows, seeing)
        if key not in self.masks:
            places = torch.arange(self.first, self.first + self.count, device=self.device).unsqueeze(0)
            lower: Any = places - self.window + 1 if self.window is not None else torch.zeros_like(places)
            if self.documents is not None:
                lower = torch.maximum(self.documents, lower)
            keys = torch.arange(start, stop, device=self.device)
            upper = places if self.ends is None else torch.maximum(self.ends, places)
            seen = (keys >= lower.unsqueeze(-1)) & (keys <= upper.unsqueeze(-1))
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
            self.masks[key] = mask.masked_fill_(~seen, hidden_score(self.dtype)).unsqueeze(1)
        return self.masks[key]
