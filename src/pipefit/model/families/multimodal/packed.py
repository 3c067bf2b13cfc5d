"""Parts of models with packed rows of images: attention within an image, positions, moving tokens, the loss.

Each part is one operator of a graph; its forward is the reference in plain PyTorch. Shape suffixes: B rows, T tokens, D
features, H heads, K features of a head, I image tokens, L latent tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipefit.model.families.common import OperatorModule, rotate_axes, statistics_dtype
from pipefit.model.ops.fourier_features import fourier_frequencies


class PatchCells(NamedTuple):
    """Patches of a token, first and last patches of an image that take no part in attention, and the side in tokens of
    the windows of attention (0: none)."""

    patches: int = 1
    unused: tuple[int, int] = (0, 0)
    window: int = 0


ONE_PATCH = PatchCells()
"""A token is one patch, and all of them attend."""


class PackedAttention(OperatorModule):
    """softmax(q k^T / sqrt(K)) v over the patches of the same image, in both directions.

    A token may stand for several patches: q, k, v (B, T, patches, H, K). `unused` are first and last patches of an
    image that take no part: those that fill a start token, and an end token. With `window`, patches attend within
    windows of that many tokens a side; tokens of a window follow each other, and `grid` names their rows and columns.
    """

    kind = "packed_attention"

    def __init__(self, scale: float, cells: PatchCells = ONE_PATCH) -> None:
        super().__init__()
        self.scale, self.patches, self.unused, self.window = scale, *cells

    def operator_attributes(self) -> dict[str, Any]:
        unused = {"unused": list(self.unused)} if any(self.unused) else {}
        return {"scale": self.scale, **unused, **({"window": self.window} if self.window else {})}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor, *grid_BT4: Tensor) -> Tensor:
        if q.dim() == 5:
            q, k, v = (t.flatten(1, 2) for t in (q, k, v))
        out_BTHK = torch.zeros_like(q)
        if self.window:
            documents_BT = _window_starts(documents_BT, grid_BT4[0], self.window)
        for row, starts in enumerate(documents_BT.tolist()):
            for first, last in pairwise([*sorted({*starts}), len(starts)]):
                start, stop = first * self.patches + self.unused[0], last * self.patches - self.unused[1]
                own_q, own_k, own_v = (t[row : row + 1, start:stop].transpose(1, 2) for t in (q, k, v))
                o = F.scaled_dot_product_attention(own_q, own_k, own_v, scale=self.scale)
                out_BTHK[row : row + 1, start:stop] = o.transpose(1, 2)
        return out_BTHK if self.patches == 1 else out_BTHK.unflatten(1, (-1, self.patches))


def _window_starts(documents_BT: Tensor, grid_BT4: Tensor, side: int) -> Tensor:
    """Return the first position in the row of every token's window."""
    keys_BT3 = torch.cat((documents_BT.unsqueeze(-1), grid_BT4[..., :2] // side), dim=-1)
    changed_BT = F.pad((keys_BT3[:, 1:] != keys_BT3[:, :-1]).any(-1), (1, 0))
    place_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    return torch.where(changed_BT, place_T, 0).cummax(dim=1).values


class GridRotary(OperatorModule):
    """Rotary embedding of q or k (B, T, patches, H, K) by the row and column of every patch. Half of the pairs of
    features turn with the row, and half with the column, at equal frequencies."""

    kind = "rotary"

    def __init__(self, features: int, theta: float, merge: int) -> None:
        super().__init__()
        self.features, self.theta, self.merge = features, theta, merge

    def operator_attributes(self) -> dict[str, Any]:
        quarter = self.features // 4
        values = [self.theta ** (-i / quarter) for i in range(quarter)]
        return {
            "theta": self.theta,
            "dim": self.features,
            "scaling": {"rope_type": "frequencies", "values": values * 2},
            "style": "half",
            "axes": [0] * quarter + [1] * quarter,
            "merge": self.merge,
        }

    def forward(self, x: Tensor, grid_BT4: Tensor) -> Tensor:
        if self.merge > 1:
            grid_BT4 = patch_grid(grid_BT4, self.merge).unflatten(1, (-1, self.merge**2))
        return rotate_axes(x, grid_BT4, self.operator_attributes())


class ImagePositions(OperatorModule):
    """x plus a learned table of positions, interpolated to the size of each image; start tokens get their own value.

    grid (B, T, 4) int64: row, column, rows, columns; row -1 marks the start token of an image. If a token stands for
    `merge` x `merge` patches, x is (B, T, merge^2, D) and the grid counts these squares. The interpolation is bicubic,
    or bilinear with aligned corners.
    """

    kind = "image_positions"

    def __init__(self, side: int, features: int, start: bool, merge: int = 1, aligned: bool = False) -> None:
        super().__init__()
        self.side, self.merge, self.aligned = side, merge, aligned
        self.table = nn.Parameter(torch.empty(side * side + int(start), features))
        self.start = nn.Parameter(torch.empty(features)) if start else None

    def operator_attributes(self) -> dict[str, Any]:
        merge = {"merge": self.merge} if self.merge > 1 else {}
        return {"rows": self.side, "columns": self.side, **merge, **({"aligned": True} if self.aligned else {})}

    def operator_parameters(self) -> tuple[str, ...]:
        return ("table",) if self.start is None else ("table", "start")

    def forward(self, x: Tensor, grid_BT4: Tensor) -> Tensor:
        if self.merge > 1:
            grid_BT4 = patch_grid(grid_BT4, self.merge)
        y_BTD = self._add_positions(x.flatten(1, -2), grid_BT4)
        return y_BTD.view_as(x)

    def _add_positions(self, x_BTD: Tensor, grid_BT4: Tensor) -> Tensor:
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
        mode = "bilinear" if self.aligned else "bicubic"
        sized = F.interpolate(square, size=(rows, columns), mode=mode, align_corners=self.aligned)
        return sized[0].permute(1, 2, 0).flatten(0, 1)


class PatchSum(OperatorModule):
    """The sum over the patches of a token: (B,T,M,D) -> (B,T,D)."""

    kind = "sum"

    def operator_attributes(self) -> dict[str, Any]:
        return {"dims": [2], "keepdim": False}

    def forward(self, x_BTMD: Tensor) -> Tensor:
        return x_BTMD.sum(dim=2)


def patch_grid(grid_BT4: Tensor, merge: int) -> Tensor:
    """Return the grid (B, T merge^2, 4) of patches from the grid of squares of merge x merge patches, row by row within
    a square. Start tokens keep row -1."""
    step = torch.arange(merge, device=grid_BT4.device)
    row_BT, column_BT, rows_BT, columns_BT = grid_BT4.unbind(-1)
    rows = row_BT[..., None, None] * merge + step[:, None].expand(merge, merge)
    columns = column_BT[..., None, None] * merge + step.expand(merge, merge)
    rows = torch.where(row_BT[..., None, None] < 0, -1, rows)
    sizes = [(size_BT * merge)[..., None, None].expand_as(rows) for size_BT in (rows_BT, columns_BT)]
    return torch.stack((rows, columns, *sizes), dim=-1).flatten(1, 3)


class PutTokens(OperatorModule):
    """h (B,T,D) with the rows of x (1,I,D) at the positions b T + t (1,I). With `drops`, rows at -1 are left out."""

    kind = "put_tokens"

    def __init__(self, drops: bool = False) -> None:
        super().__init__()
        self.drops = drops

    def operator_attributes(self) -> dict[str, Any]:
        return {"drops": True} if self.drops else {}

    def forward(self, h_BTD: Tensor, x_1ID: Tensor, places_1I: Tensor) -> Tensor:
        places_I, x_ID = places_1I.flatten(), x_1ID.flatten(0, 1)
        if self.drops:
            places_I, x_ID = places_I[places_I >= 0], x_ID[places_I >= 0]
        return h_BTD.flatten(0, 1).index_copy(0, places_I, x_ID).view_as(h_BTD)


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
