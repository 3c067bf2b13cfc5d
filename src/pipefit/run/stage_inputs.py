"""Inputs of one (microbatch, slice) that every rank derives from the step plan: never sent between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(slots=True, kw_only=True)
class StageInputs:
    """The local rows of one microbatch, cut to one slice. B rows of this device, T tokens of the slice.

    A stage reads only the fields that its graphs name as roles. A middle stage without rotary embeddings needs only
    `rows` (for dropout).
    """

    tokens: torch.Tensor | None = None
    "int64 (B, T): input tokens. Needed by the stage that holds the embedding."
    positions: torch.Tensor | None = None
    "int64 (B, T): position of every token, counted from the start of the sequence, not of the slice."
    labels: torch.Tensor | None = None
    "int64 (B, T): the next token; -100 where the loss ignores it. Needed by the last stage."
    documents: torch.Tensor | None = None
    "int64 (B, T): position in its row where a token's document starts; None if attention crosses documents."
    document_bounds: tuple[int, int] = (0, 0)
    "Lowest start over the rows' first tokens, highest over their last: `documents`, known to the host."
    image_lengths: tuple[int, ...] | None = None
    "The tokens of every image of a packed row, in order: `documents`, known to the host. None: unknown."
    rows: torch.Tensor | None = None
    "int64 (B,): the number of every row within the step, so that dropout does not depend on the layout."
    data: Mapping[str, torch.Tensor] = field(default_factory=dict)
    "Any other inputs of a captured model by name, rows in dimension 0: images, token types, masks."
    step: int = 0
    "The training step, counted from 0; part of the key of dropout."

    def extent(self, hidden: torch.Tensor | None) -> tuple[int, int]:
        """Return (B, T) of the local rows. `hidden` is the incoming state, used if the stage has no other input with
        tokens; over shards it may hold only a part of the tokens."""
        fields = (self.positions, self.tokens, self.labels, self.documents, hidden, self.rows)
        present = next((tensor for tensor in fields if tensor is not None), None)
        assert present is not None, "neither inputs nor a feed that says how many rows there are"
        rows = present.shape[0] if self.rows is None else len(self.rows)
        return rows, present.shape[1] if present.dim() > 1 else 1
