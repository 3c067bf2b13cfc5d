"""Parts of models with packed rows of images: attention within an image, positions, moving tokens, the loss.

Each part is one operator of a graph; its forward is the reference in plain PyTorch. Shape suffixes: B rows, T tokens, D
features, H heads, K features of a head, I image tokens, L latent tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipefit.model.families.common import OperatorModule, statistics_dtype
from pipefit.model.ops.fourier_features import fourier_frequencies


class PackedAttention(OperatorModule):
    """softmax(q k^T / sqrt(K)) v over the tokens of the same image, in both directions."""

    kind = "packed_attention"

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def operator_attributes(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def forward(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, documents_BT: Tensor) -> Tensor:
        out = torch.zeros_like(q_BTHK)
        for row, starts in enumerate(documents_BT.tolist()):
            for start, stop in pairwise([*sorted({*starts}), len(starts)]):
                q, k, v = (t[row : row + 1, start:stop].transpose(1, 2) for t in (q_BTHK, k_BTHK, v_BTHK))
                o = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
                out[row : row + 1, start:stop] = o.transpose(1, 2)
        return out


class ImagePositions(OperatorModule):
    """x plus a learned table of positions, interpolated to the size of each image; start tokens get their own value.

    grid (B, T, 4) int64: row, column, rows, columns; row -1 marks the start token of an image.
    """

    kind = "image_positions"

    def __init__(self, side: int, features: int, start: bool) -> None:
        super().__init__()
        self.side = side
        self.table = nn.Parameter(torch.empty(side * side + int(start), features))
        self.start = nn.Parameter(torch.empty(features)) if start else None

    def operator_attributes(self) -> dict[str, Any]:
        return {"rows": self.side, "columns": self.side}

    def operator_parameters(self) -> tuple[str, ...]:
        return ("table",) if self.start is None else ("table", "start")

    def forward(self, x_BTD: Tensor, grid_BT4: Tensor) -> Tensor:
        grid_N4, positions_ND = grid_BT4.flatten(0, 1), torch.zeros_like(x_BTD.flatten(0, 1))
        for rows, columns in {(r, c) for start, _, r, c in grid_N4.tolist() if start >= 0}:
            same_size = (grid_N4[:, 0] >= 0) & (grid_N4[:, 2] == rows) & (grid_N4[:, 3] == columns)
            patch_index = grid_N4[same_size, 0] * columns + grid_N4[same_size, 1]
            positions_ND = positions_ND.masked_scatter(
                same_size.unsqueeze(1), self._resized_table(rows, columns)[patch_index]
            )
        y_BTD = x_BTD + positions_ND.view_as(x_BTD)
        if self.start is None:
            return y_BTD
        return torch.where(grid_BT4[..., :1] < 0, self.start + self.table[0], y_BTD)

    def _resized_table(self, rows: int, columns: int) -> Tensor:
        """(rows x columns, D): the table for images of rows x columns patches."""
        patches = self.table if self.start is None else self.table[1:]
        if (rows, columns) == (self.side, self.side):
            return patches
        square = patches.unflatten(0, (self.side, self.side)).permute(2, 0, 1).unsqueeze(0)
        sized = F.interpolate(square, size=(rows, columns), mode="bicubic", align_corners=False)
        return sized[0].permute(1, 2, 0).flatten(0, 1)


class PutTokens(OperatorModule):
    """h (B,T,D) with the rows of x (1,I,D) at the positions b T + t (1,I)."""

    kind = "put_tokens"

    def forward(self, h_BTD: Tensor, x_1ID: Tensor, places_1I: Tensor) -> Tensor:
        return h_BTD.flatten(0, 1).index_copy(0, places_1I.flatten(), x_1ID.flatten(0, 1)).view_as(h_BTD)


class TakeTokens(OperatorModule):
    """The rows of h (B,T,D) at the positions b T + t (1,L): (1,L,D)."""

    kind = "take_tokens"

    def forward(self, h_BTD: Tensor, places_1L: Tensor) -> Tensor:
        return h_BTD.flatten(0, 1)[places_1L]


class FourierFeatures(OperatorModule):
    """Cosines and sines of times (B,T) at fixed frequencies: (B,T,2K), float32 or wider."""

    kind = "fourier_features"

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def operator_attributes(self) -> dict[str, Any]:
        return {"frequencies": self.count}

    def forward(self, time_BT: Tensor) -> Tensor:
        rates = torch.tensor(
            fourier_frequencies(self.count), dtype=statistics_dtype(time_BT.dtype), device=time_BT.device
        )
        angle = time_BT.to(rates.dtype).unsqueeze(-1) * rates
        return torch.cat((angle.cos(), angle.sin()), dim=-1)


class SquaredError(OperatorModule):
    """Sum of the squared differences, in float32 or wider."""

    kind = "squared_error"

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        kind = statistics_dtype(prediction.dtype)
        return (prediction.to(kind) - target.to(kind)).square().sum()
