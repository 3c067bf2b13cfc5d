"""What a stage costs whose rows are packed: images one behind the other, another number of tokens in every microbatch.

A layer's time goes by the tokens of the row and by the sum of its images' tokens squared, which attention within
images takes. Both are looked up on a grid (tokens by half octaves, tokens of an image by octaves) and interpolated in
between: a roofline bends at few places, and equal sizes come up again and again over the candidates of a search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from pipefit.cost.compute.roofline import MicrobatchShape
from pipefit.cost.types import Array
from pipefit.cost.work import StageWork
from pipefit.model.ops.packed_attention import SQUARES

CostsAt = Callable[[StageWork], Mapping[str, tuple[float, ...]]]
"""The costs of a stage whose rows are alike, by kind of device."""


def with_equal_rows(stage: StageWork, tokens: int, squares: int) -> StageWork:
    """The stage with the same row in every microbatch and on every replica."""
    symbols = (*stage.symbols, (SQUARES, squares))
    return replace(stage, rows=(1,) * len(stage.rows), slices=(tokens,), packed=(), symbols=symbols)


def packed_costs(stage: StageWork, costs_at: CostsAt) -> list[Mapping[str, tuple[float, ...]]]:
    """For every microbatch, the costs of the fullest replica, by kind of device."""
    grid = _PackedCostGrid(lambda tokens, each: costs_at(with_equal_rows(stage, tokens, round(tokens * each))))
    return [grid.interpolate_at(max(t for t, _ in row), max(s for _, s in row)) for row in stage.packed]


def equivalent_rows(place: MicrobatchShape) -> tuple[float, float]:
    """(rows, tokens of each) that take as much as the place's: of a packed row its images as rows of one length, whose
    tokens and squared tokens add up to the same."""
    squares = dict(place.symbols).get(SQUARES, 0)
    every = place.rows * place.tokens
    if not squares or not every:
        return place.rows, place.tokens
    return every**2 / squares, squares / every


class _PackedCostGrid:
    """Costs by kind of device, by (tokens of a row, tokens of an image on average), looked up at most once."""

    def __init__(self, look_up: Callable[[int, float], Mapping[str, tuple[float, ...]]]) -> None:
        self._look_up = look_up
        self._known: dict[tuple[int, float], dict[str, Array]] = {}
        self._answers: dict[tuple[int, int], Mapping[str, tuple[float, ...]]] = {}

    def interpolate_at(self, tokens: int, squares: int) -> Mapping[str, tuple[float, ...]]:
        """Interpolated costs of a row of so many tokens whose images' squares add up to `squares`."""
        if (tokens, squares) not in self._answers:
            each = squares / tokens if tokens else 1.0
            found: dict[str, Array] = {}
            for row, row_part in _bracket_weights(tokens, _half_octave_knots(tokens)):
                for image, image_part in _bracket_weights(each, _octave_knots(each)):
                    for kind, costs in self._corner_costs(int(row), image).items():
                        found[kind] = found.get(kind, 0.0) + row_part * image_part * costs
            self._answers[tokens, squares] = {kind: tuple(costs.tolist()) for kind, costs in found.items()}
        return self._answers[tokens, squares]

    def _corner_costs(self, tokens: int, each: float) -> dict[str, Array]:
        key = (tokens, each)
        if key not in self._known:
            self._known[key] = {kind: np.array(costs) for kind, costs in self._look_up(tokens, each).items()}
        return self._known[key]


def _bracket_weights(value: float, ends: tuple[float, float]) -> Iterator[tuple[float, float]]:
    """(end, part of it) of the two ends that a value lies between."""
    low, high = ends
    part = (value - low) / (high - low) if high > low else 0.0
    yield from ((end, own) for end, own in ((low, 1.0 - part), (high, part)) if own > 0.0)


def _half_octave_knots(tokens: int) -> tuple[float, float]:
    """The numbers 2^n and 1.5 x 2^n around a number of tokens; small ones by themselves."""
    if tokens < 4:
        return float(tokens), float(tokens)
    low = 1 << (tokens.bit_length() - 1)
    middle = low + low // 2
    return (float(low), float(middle)) if tokens < middle else (float(middle), float(2 * low))


def _octave_knots(each: float) -> tuple[float, float]:
    if each <= 1.0:
        return 1.0, 1.0
    low = 2.0 ** math.floor(math.log2(each))
    return low, 2.0 * low
