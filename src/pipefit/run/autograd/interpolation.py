"""Taps of a learned position table, for an image whose size differs from the table's.

Bicubic interpolation with a = -0.75 (Keys, 1981, equation 4), corners not aligned, edges repeated, no antialiasing: the
weights of PyTorch's `interpolate(mode="bicubic", align_corners=False)`. Bilinear interpolation has aligned corners, as
`interpolate(mode="bilinear", align_corners=True)`. The dimensions are separable: the weight of an entry is the product
of its weights along rows and columns.
"""

from __future__ import annotations

import torch

_A = -0.75


def bicubic_taps(
    place: torch.Tensor, count: torch.Tensor, size: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (indices, weights) along one dimension for patches at `place` of `count`, both int64 (N,): four tensors
    (N,) each, int64 below `size`, and `dtype`. If `count` is `size` the weights are exactly 0, 1, 0, 0."""
    where = (place.to(dtype) + 0.5) * (size / count.to(dtype)) - 0.5
    low = where.floor()
    rest = where - low
    distances = (rest + 1, rest, 1 - rest, 2 - rest)
    weights = [
        _far_weight(distances[0]),
        _near_weight(distances[1]),
        _near_weight(distances[2]),
        _far_weight(distances[3]),
    ]
    first = low.long()
    return [(first + step).clamp(0, size - 1) for step in (-1, 0, 1, 2)], weights


def bilinear_taps(
    place: torch.Tensor, count: torch.Tensor, size: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (indices, weights) as `bicubic_taps` does, two tensors each: the first and the last patch read the first
    and the last entry."""
    where = place.to(dtype) * (size - 1) / (count - 1).clamp(min=1).to(dtype)
    low = where.floor()
    rest, first = where - low, low.long()
    return [first, (first + 1).clamp(max=size - 1)], [1 - rest, rest]


def _near_weight(x: torch.Tensor) -> torch.Tensor:
    """Return the kernel at a distance of at most 1."""
    return ((_A + 2) * x - (_A + 3)) * x * x + 1


def _far_weight(x: torch.Tensor) -> torch.Tensor:
    """Return the kernel at a distance between 1 and 2."""
    return ((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A
