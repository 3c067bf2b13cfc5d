"""Costs of a stage with packed rows: consecutive images, with a different number of tokens in every microbatch.

A layer's time depends on the tokens of the row and, for attention within images, on the sum of the squared tokens of
each image. Both are looked up on a grid (tokens by half octaves, tokens per image by octaves) and interpolated. A
roofline has few bends, and a search asks for the same sizes many times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from pipefit.cost.compute.layer_query import MicrobatchShape
from pipefit.cost.types import Array
from pipefit.cost.work import StageWork
from pipefit.model.ops.attention import CONTEXT_PARTS
from pipefit.model.ops.packed_attention import SQUARES

CostsAt = Callable[[StageWork], Mapping[str, tuple[float, ...]]]
"""A function from a stage with equal rows to its costs by device kind."""


def with_equal_rows(stage: StageWork, tokens: int, squares: int) -> StageWork:
    """Return the stage with the same row in every microbatch and on every replica."""
    symbols = (*stage.symbols, (SQUARES, squares))
    return replace(stage, rows=(1,) * len(stage.rows), slices=(tokens,), packed=(), symbols=symbols)


def packed_costs(stage: StageWork, costs_at: CostsAt) -> list[Mapping[str, tuple[float, ...]]]:
    """Return the costs of the fullest replica for every microbatch, by device kind."""
    grid = _PackedCostGrid(lambda tokens, each: costs_at(with_equal_rows(stage, tokens, round(tokens * each))))
    return [grid.interpolate_at(max(t for t, _ in row), max(s for _, s in row)) for row in stage.packed]


def equivalent_rows(shape: MicrobatchShape) -> tuple[float, float]:
    """Return (rows, tokens of each row) with the same cost as `shape`.

    A packed row becomes rows of equal length with the same sum of tokens and of squared tokens. One of c equal parts of
    each sequence has a c-th of the pairs of tokens of the complete one, and so costs a c-th of the rows.
    """
    symbols = dict(shape.symbols)
    parts, squares = symbols.get(CONTEXT_PARTS, 1), symbols.get(SQUARES, 0)
    if parts > 1:
        return shape.rows / parts, shape.tokens * parts
    total_tokens = shape.rows * shape.tokens
    if not squares or not total_tokens:
        return shape.rows, shape.tokens
    return total_tokens**2 / squares, squares / total_tokens


class _PackedCostGrid:
    """Costs by device kind on a grid of (tokens of a row, mean tokens of an image); each point is looked up once."""

    def __init__(self, look_up: Callable[[int, float], Mapping[str, tuple[float, ...]]]) -> None:
        self._look_up = look_up
        self._known: dict[tuple[int, float], dict[str, Array]] = {}
        self._answers: dict[tuple[int, int], Mapping[str, tuple[float, ...]]] = {}

    def interpolate_at(self, tokens: int, squares: int) -> Mapping[str, tuple[float, ...]]:
        """Return interpolated costs of a row with `tokens` tokens, whose squared image sizes sum to `squares`."""
        if (tokens, squares) not in self._answers:
            image_tokens = squares / tokens if tokens else 1.0
            blended: dict[str, Array] = {}
            for row, row_part in _bracket_weights(tokens, _half_octave_knots(tokens)):
                for image, image_part in _bracket_weights(image_tokens, _octave_knots(image_tokens)):
                    for kind, costs in self._corner_costs(int(row), image).items():
                        blended[kind] = blended.get(kind, 0.0) + row_part * image_part * costs
            self._answers[tokens, squares] = {kind: tuple(costs.tolist()) for kind, costs in blended.items()}
        return self._answers[tokens, squares]

    def _corner_costs(self, tokens: int, each: float) -> dict[str, Array]:
        key = (tokens, each)
        if key not in self._known:
            self._known[key] = {kind: np.array(costs) for kind, costs in self._look_up(tokens, each).items()}
        return self._known[key]


def _bracket_weights(value: float, ends: tuple[float, float]) -> Iterator[tuple[float, float]]:
    """Yield (end, weight) of the two interval ends around a value; ends with weight 0 are omitted."""
    low, high = ends
    part = (value - low) / (high - low) if high > low else 0.0
    yield from ((end, weight) for end, weight in ((low, 1.0 - part), (high, part)) if weight > 0.0)


def _half_octave_knots(tokens: int) -> tuple[float, float]:
    """Return the two neighbours of `tokens` among the numbers 2^n and 1.5 x 2^n; numbers below 4 are returned as is."""
    if tokens < 4:
        return float(tokens), float(tokens)
    low = 1 << (tokens.bit_length() - 1)
    middle = low + low // 2
    return (float(low), float(middle)) if tokens < middle else (float(middle), float(2 * low))


def _octave_knots(each: float) -> tuple[float, float]:
    if each <= 1.0:
        return 1.0, 1.0
    low = math.ldexp(1.0, math.frexp(each)[1] - 1)
    return low, 2.0 * low
