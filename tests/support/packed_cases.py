"""Examples of the operators of packed images, each with the same thing in plain PyTorch, written independently."""

from __future__ import annotations

import math
from typing import Any

import torch
from tests.support.op_case import make_example

from pipefit.testing.operator_example import ROWS, TOKENS


def _packed_attention(scale: float) -> Any:
    """One token and head at a time."""

    def plain(q: Any, k: Any, v: Any, documents: Any) -> Any:
        out = []
        for row, starts in enumerate(documents.tolist()):
            for t, start in enumerate(starts):
                same = [s for s, other in enumerate(starts) if other == start]
                for h in range(q.shape[2]):
                    weights = torch.stack([(q[row, t, h] * k[row, s, h]).sum() * scale for s in same]).exp()
                    out.append(sum(w * v[row, s, h] for w, s in zip(weights / weights.sum(), same, strict=True)))
        return torch.stack(out).view(q.shape)

    return plain


def _square_attention(scale: float, unused: tuple[int, int]) -> Any:
    """Tokens of several patches as the images of patches: one image at a time, without its unused patches."""

    def plain(q: Any, k: Any, v: Any, documents: Any) -> Any:
        patches, out = q.shape[2], []
        q, k, v = (x.flatten(1, 2) for x in (q, k, v))
        for row, starts in enumerate(documents.tolist()):
            result = list(torch.zeros_like(q[row]))
            for start in sorted({*starts}):
                image = [t * patches + m for t, first in enumerate(starts) if first == start for m in range(patches)]
                used = image[unused[0] : len(image) - unused[1]]
                weights = (torch.einsum("thk,shk->hts", q[row, used], k[row, used]) * scale).softmax(-1)
                values = torch.einsum("hts,shk->thk", weights, v[row, used])
                for number, patch in enumerate(used):
                    result[patch] = values[number]
            out.append(torch.stack(result).unflatten(0, (-1, patches)))
        return torch.stack(out)

    return plain


def _window_attention(scale: float, side: int) -> Any:
    """The windows as images of their own."""

    def plain(q: Any, k: Any, v: Any, documents: Any, grid: Any) -> Any:
        names = [
            [(start, row // side, column // side) for start, (row, column, _, _) in zip(*pair, strict=True)]
            for pair in zip(documents.tolist(), grid.tolist(), strict=True)
        ]
        windows = torch.tensor([[row.index(name) for name in row] for row in names])
        return (_square_attention(scale, (0, 0)) if q.dim() == 5 else _packed_attention(scale))(q, k, v, windows)

    return plain


def _axis_rotary(axes: list[int], theta: float, merge: int = 0) -> Any:
    """One pair of one patch at a time, as complex numbers."""

    def plain(x: Any, positions: Any) -> Any:
        out, half = torch.zeros_like(x), len(axes)
        for index in torch.cartesian_prod(*map(torch.arange, x.shape[:-1])).tolist():
            places = positions[index[0], index[1]].tolist()
            if merge:
                places = [places[0] * merge + index[2] // merge, places[1] * merge + index[2] % merge]
            pairs = torch.complex(x[tuple(index)][:half], x[tuple(index)][half:])
            angles = [places[axis] * theta ** (-i / half) for i, axis in enumerate(axes)]
            turns = torch.tensor(angles, dtype=torch.float64)
            turned = pairs * torch.complex(turns.cos(), turns.sin())
            out[tuple(index)] = torch.cat((turned.real, turned.imag))
        return out

    return plain


def _axis_case(merge: int) -> Any:
    patches, axes = (merge**2,) if merge else (), [0, 1, 1, 0] if merge else [0, 1, 2, 1]
    positions = torch.randint(0, 9, (ROWS, TOKENS, 4 if merge else 3), generator=torch.Generator().manual_seed(1))
    attributes = {"theta": 100.0, "dim": 8, "scaling": None, "style": "half", "axes": axes}
    return make_example(
        "rotary",
        {"x": ("B", "T", *patches, 3, 8), "grid": ("B", "T", positions.shape[-1])},
        _axis_rotary(axes, 100.0, merge),
        {**attributes, **({"merge": merge} if merge else {})},
        integers={"grid": 9},
        fixed_values={"grid": positions.tolist()},
    )


def _seen_ahead(scale: float, window: int | None) -> Any:
    """Causal attention, one query and head at a time, to the key that `ends` names."""

    def plain(q: Any, k: Any, v: Any, ends: Any) -> Any:
        rows = []
        for row in range(q.shape[0]):
            for t in range(q.shape[1]):
                first = 0 if window is None else max(0, t - window + 1)
                seen = slice(first, max(t, int(ends[row, t])) + 1)
                for h in range(q.shape[2]):
                    g = h // (q.shape[2] // k.shape[2])
                    weights = ((k[row, seen, g] * q[row, t, h]).sum(-1) * scale).softmax(0)
                    rows.append((weights.unsqueeze(-1) * v[row, seen, g]).sum(0))
        return torch.stack(rows).view(*q.shape[:3], -1)

    return plain


def _put(h: Any, x: Any, places: Any) -> Any:
    rows = list(h.reshape(-1, h.shape[-1]))
    for place, row in zip(places[0].tolist(), x[0], strict=True):
        if place >= 0:
            rows[place] = row
    return torch.stack(rows).view(h.shape)


def _take(h: Any, places: Any) -> Any:
    return torch.stack([h[place // TOKENS, place % TOKENS] for place in places[0].tolist()]).unsqueeze(0)


def _positions(side: int) -> Any:
    """PyTorch's own interpolation, one token at a time."""

    def plain(x: Any, grid: Any, table: Any, start: Any) -> Any:
        patches = table if start is None else table[1:]
        square = patches.view(side, side, -1).permute(2, 0, 1).unsqueeze(0)
        rows = []
        for token, (row, column, tall, broad) in zip(x.flatten(0, 1), grid.flatten(0, 1).tolist(), strict=True):
            if row < 0:
                rows.append(start + table[0])
            else:
                sized = torch.nn.functional.interpolate(square, (tall, broad), mode="bicubic", align_corners=False)
                rows.append(token + sized[0, :, row, column])
        return torch.stack(rows).view(x.shape)

    return plain


def _aligned_positions(side: int) -> Any:
    """One token and entry at a time: hats around the entries, the outer ones at the edges of an image."""

    def plain(x: Any, grid: Any, table: Any, start: Any) -> Any:
        rows = []
        for token, (row, column, tall, broad) in zip(x.flatten(0, 1), grid.flatten(0, 1).tolist(), strict=True):
            down, right = (
                [max(0.0, 1 - abs(place * (side - 1) / max(count - 1, 1) - entry)) for entry in range(side)]
                for place, count in ((row, tall), (column, broad))
            )
            rows.append(
                token + sum(a * b * table[i * side + j] for i, a in enumerate(down) for j, b in enumerate(right))
            )
        return torch.stack(rows).view(x.shape)

    return plain


def _square_positions(side: int, merge: int) -> Any:
    """The patches of every square on their own."""

    def plain(x: Any, grid: Any, table: Any, start: Any) -> Any:
        steps = [(i, j) for i in range(merge) for j in range(merge)]
        patches = [
            [
                [-1, 0, 1, 1] if row < 0 else [row * merge + i, column * merge + j, tall * merge, broad * merge]
                for row, column, tall, broad in of_row
                for i, j in steps
            ]
            for of_row in grid.tolist()
        ]
        return _positions(side)(x.flatten(1, 2), torch.tensor(patches), table, start).view_as(x)

    return plain


def _features(count: int) -> Any:
    def plain(time: Any) -> Any:
        turns = torch.stack([time * 1000 * 10000 ** (-k / count) for k in range(count)], -1)
        return torch.cat((torch.sin(turns + math.pi / 2), torch.cos(turns - math.pi / 2)), -1)

    return plain


_HEADS, _SQUARES = ("B", "T", 4, 5), ("B", "T", 3, 2, 5)
_GRID = [
    [[-1, 0, 2, 2], [0, 0, 2, 2], [0, 1, 2, 2], [1, 0, 2, 2], [1, 1, 2, 2], [2, 1, 5, 2]],
    [[0, 0, 3, 3], [2, 2, 3, 3], [1, 6, 2, 7], [-1, 0, 0, 0], [0, 0, 1, 1], [3, 0, 4, 9]],
]
_WINDOW_GRID = [
    [[0, 0, 2, 2], [0, 1, 2, 2], [1, 0, 2, 2], [1, 1, 2, 2], [0, 0, 1, 2], [0, 1, 1, 2]],
    [[0, 0, 2, 3], [0, 1, 2, 3], [1, 0, 2, 3], [1, 1, 2, 3], [0, 2, 2, 3], [1, 2, 2, 3]],
]
_PATCHES = [[[max(0, n) for n in one] for one in row] for row in _GRID]
_PATCHES[1][3] = [0, 0, 1, 1]

CASES = [
    make_example(
        "packed_attention",
        {"q": _HEADS, "k": _HEADS, "v": _HEADS, "documents": ("B", "T")},
        _packed_attention(0.4),
        {"scale": 0.4},
        integers={"documents": TOKENS},
        fixed_values={"documents": [[0, 0, 0, 3, 4, 4], [0] * TOKENS]},
    ),
    make_example(
        "packed_attention",
        {"q": _HEADS, "k": _HEADS, "v": _HEADS, "documents": ("B", "T")},
        _packed_attention(0.7),
        {"scale": 0.7},
        integers={"documents": TOKENS},
        fixed_values={"documents": [[0, 0, 2, 2, 4, 4], [0, 1, 1, 3, 3, 5]]},
    ),
    *(
        make_example(
            "packed_attention",
            {"q": _SQUARES, "k": _SQUARES, "v": _SQUARES, "documents": ("B", "T")},
            _square_attention(0.4, unused),
            {"scale": 0.4, **({"unused": list(unused)} if any(unused) else {})},
            integers={"documents": TOKENS},
            fixed_values={"documents": [[0, 0, 0, 3, 3, 3], [0, 0, 2, 2, 2, 2]]},
        )
        for unused in ((0, 0), (2, 0), (2, 3))
    ),
    *(
        make_example(
            "packed_attention",
            {"q": heads, "k": heads, "v": heads, "documents": ("B", "T"), "grid": ("B", "T", 4)},
            _window_attention(0.4, 2),
            {"scale": 0.4, "window": 2},
            integers={"documents": TOKENS, "grid": 9},
            fixed_values={"documents": [[0, 0, 0, 0, 4, 4], [0] * TOKENS], "grid": _WINDOW_GRID},
        )
        for heads in (_HEADS, _SQUARES)
    ),
    _axis_case(0),
    _axis_case(2),
    *(
        make_example(
            "attention",
            {"q": _HEADS, "k": ("B", "T", 2, 5), "v": ("B", "T", 2, 5), "ends": ("B", "T")},
            _seen_ahead(0.4, window),
            {"causal": True, "scale": 0.4, "window": window, "ahead": True},
            integers={"ends": TOKENS},
            fixed_values={"ends": [[0, 3, 3, 3, 4, 5], [1, 1, 2, 5, 5, 5]]},
        )
        for window in (None, 2)
    ),
    make_example(
        "put_tokens",
        {"h": ("B", "T", 7), "x": (1, 4, 7), "places": (1, 4)},
        _put,
        {"drops": True},
        integers={"places": ROWS * TOKENS},
        fixed_values={"places": [[-1, 0, 2, -1]]},
    ),
    make_example(
        "put_tokens",
        {"h": ("B", "T", 7), "x": (1, 4, 7), "places": (1, 4)},
        _put,
        integers={"places": ROWS * TOKENS},
        fixed_values={"places": [[7, 0, 2, 11]]},
    ),
    make_example(
        "take_tokens",
        {"h": ("B", "T", 7), "places": (1, 5)},
        _take,
        integers={"places": ROWS * TOKENS},
        fixed_values={"places": [[3, 4, 11, 6, 3]]},
    ),
    make_example(
        "image_positions",
        {"x": ("B", "T", 6), "grid": ("B", "T", 4), "table": (10, 6), "start": (6,)},
        _positions(3),
        {"rows": 3, "columns": 3},
        frozenset(("table", "start")),
        integers={"grid": 9},
        fixed_values={"grid": _GRID},
    ),
    make_example(
        "image_positions",
        {"x": ("B", "T", 6), "grid": ("B", "T", 4), "table": (9, 6), "start": None},
        _positions(3),
        {"rows": 3, "columns": 3},
        frozenset(("table",)),
        integers={"grid": 9},
        fixed_values={"grid": _PATCHES},
    ),
    make_example(
        "image_positions",
        {"x": ("B", "T", 4, 6), "grid": ("B", "T", 4), "table": (10, 6), "start": (6,)},
        _square_positions(3, 2),
        {"rows": 3, "columns": 3, "merge": 2},
        frozenset(("table", "start")),
        integers={"grid": 9},
        fixed_values={"grid": _GRID},
    ),
    make_example(
        "image_positions",
        {"x": ("B", "T", 6), "grid": ("B", "T", 4), "table": (9, 6), "start": None},
        _aligned_positions(3),
        {"rows": 3, "columns": 3, "aligned": True},
        frozenset(("table",)),
        integers={"grid": 9},
        fixed_values={"grid": _PATCHES},
    ),
    make_example("fourier_features", {"time": ("B", "T")}, _features(3), {"frequencies": 3}),
    make_example(
        "squared_error", {"prediction": ("B", "T", 5), "target": ("B", "T", 5)}, lambda a, b: ((a - b) ** 2).sum()
    ),
]
