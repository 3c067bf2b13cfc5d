"""What every rank derives from the step plan for one (microbatch, slice): never sent from stage to stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(slots=True, kw_only=True)
class StageInputs:
    """The local rows of one microbatch, cut to one slice. B rows of this device, T tokens of the slice.

    A stage reads only the fields that its graphs name as roles: a middle stage without rotary embeddings needs
    none of them but `rows` (for dropout).
    """

    tokens: torch.Tensor | None = None
    "int64 (B, T): input tokens. Needed by the stage that holds the embedding."
    positions: torch.Tensor | None = None
    "int64 (B, T): place of every token in its sequence, counted from the start of the sequence, not of the slice."
    labels: torch.Tensor | None = None
    "int64 (B, T): the token that follows; -100 where nothing is to be learned. Needed by the last stage."
    documents: torch.Tensor | None = None
    "int64 (B, T): the place in its row where a token's document starts; None where attention crosses documents."
    document_bounds: tuple[int, int] = (0, 0)
    "The lowest such place over the rows' first tokens, the highest over their last: `documents`, known to the host."
    image_lengths: tuple[int, ...] | None = None
    "The tokens of every image of a packed row, in order: `documents`, known to the host. None: not told."
    rows: torch.Tensor | None = None
    "int64 (B,): the number of every row within the step, so that dropout does not depend on the layout."
    data: Mapping[str, torch.Tensor] = field(default_factory=dict)
    "Any other inputs of a captured model by name, rows in front: images, token types, masks."
    step: int = 0
    "The training step, counted from 0; part of the key of dropout."

    def extent(self, hidden: torch.Tensor | None) -> tuple[int, int]:
        """(B, T) of the local rows; `hidden` is the state that comes in, for a stage that is fed nothing like it: over
        shards it may be a part of the tokens."""
        fields = (self.positions, self.tokens, self.labels, self.documents, hidden, self.rows)
        found = next((tensor for tensor in fields if tensor is not None), None)
        assert found is not None, "neither inputs nor a feed that says how many rows there are"
        rows = found.shape[0] if self.rows is None else len(self.rows)
        return rows, found.shape[1] if found.dim() > 1 else 1
