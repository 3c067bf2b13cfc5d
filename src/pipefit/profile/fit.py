"""Fit curves to the measured points of a layer, by non-negative least squares on relative errors.

The time over tokens is a sum of segments with non-negative slopes, and attention is a sum of its features with
non-negative weights (`cost.compute.curves.FEATURES`). So a curve never falls when the work grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum

import numpy as np

from pipefit.cluster.measured import ActionCurve
from pipefit.cost.compute.curves import action_time_s, attention_features
from pipefit.cost.types import Array
from pipefit.profile.points import SMALLEST, WorkPoint

ODD = 0.03
"""Points that deviate from the fit by more than this share get less weight."""

REWEIGHTING_ROUNDS = 6
"""Rounds of reweighting."""

STRAIGHT = 0.03
"""A knot within this share of its neighbours' straight line is noise, or the effect of a round number."""


def fit_action(
    points: Sequence[WorkPoint], seconds: Sequence[float], attention: bool, fixed_s: float = 0.0
) -> ActionCurve:
    """Return the curve of one action through measured points; knots at every number of tokens where attention is small.

    `fixed_s` is the part of every measurement that the curve excludes: the overhead of an action. Minimises the sum of
    squares of (predicted + fixed - measured) / measured. Points that deviate by more than `ODD` get less weight
    (Huber's weights), so that a disturbed measurement does not bend the curve.
    """
    from scipy.optimize import nnls

    knots = _choose_knots(points, seconds, attention)
    counts = np.array([point.rows * point.tokens for point in points], dtype=np.float64)
    columns = segment_counts(counts, knots)
    if attention:
        rows, tokens, past, earlier = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
        columns = np.concatenate([columns, attention_features(rows, tokens, past, earlier)], axis=1)
    measured = np.asarray(seconds, dtype=np.float64)
    scale = np.maximum(columns.max(axis=0), 1e-300)
    matrix = columns / scale / measured[:, None]
    wanted = np.maximum(0.0, 1 - fixed_s / measured)
    trust = np.ones(len(points))
    for _ in range(REWEIGHTING_ROUNDS):
        weights = nnls(matrix * trust[:, None], wanted * trust, maxiter=50 * matrix.shape[1])[0]
        trust = 1 / np.sqrt(np.maximum(1.0, np.abs(matrix @ weights - wanted) / ODD))
    weights = weights / scale
    parts = weights[: len(knots)]
    time_s = segment_counts(knots, knots) @ parts
    return ActionCurve(
        tokens=tuple(float(knot) for knot in knots),
        time_s=tuple(float(value) for value in time_s),
        attention_s=tuple(float(weight) for weight in weights[len(knots) :]),
    )


def segment_counts(counts: Array, knots: Array) -> Array:
    """Return the part of each segment between knots that `counts` cover: [point, segment]; segment 0 is the constant.

    Beyond the last knot the last segment continues.
    """
    columns = [np.ones_like(counts)]
    for index in range(1, len(knots)):
        top = np.inf if index == len(knots) - 1 else knots[index]
        columns.append(np.clip(counts, knots[index - 1], top) - knots[index - 1])
    return np.stack(columns, axis=-1)


def fit_layer(
    points: Sequence[WorkPoint],
    seconds: Sequence[Mapping[str, float]],
    attention: bool,
    fixed_s: Mapping[str, float] | None = None,
) -> tuple[dict[str, ActionCurve], float]:
    """Return (curves by action, largest error at the points: relative, of a point's F and B together)."""
    fixed = fixed_s or {}
    curves = {
        action: fit_action(points, [times[action] for times in seconds], attention, fixed.get(action, 0.0))
        for action in ("F", "I", "W", "B")
    }
    worst = 0.0
    for point, times in zip(points, seconds, strict=True):
        predicted = fsum(action_time_s(curves[action], *point) + fixed.get(action, 0.0) for action in ("F", "B"))
        worst = max(worst, abs(predicted / (times["F"] + times["B"]) - 1))
    return curves, worst


def _choose_knots(points: Sequence[WorkPoint], seconds: Sequence[float], attention: bool) -> Array:
    """Return the numbers of tokens at which the curve may bend.

    These are the points measured without context and, for attention, in rows of at most an eighth of the longest, where
    attention hardly counts. With attention most points lie elsewhere and constrain the curve only between knots, so
    knots that bend by no more than `STRAIGHT` are removed, the straightest first. Slices may have fewer tokens than any
    row without context. The curve then begins with the smallest slice, or slices would pull down its first knot.
    """
    if not attention:
        return np.array(sorted({point.rows * point.tokens for point in points}), dtype=np.float64)
    short = max(SMALLEST, max(point.tokens for point in points if not point.past) // 8)
    known = {
        point.rows * point.tokens: time_s
        for point, time_s in zip(points, seconds, strict=True)
        if not point.past and point.tokens <= short
    }
    knots = np.array(sorted(known), dtype=np.float64)
    times = np.array([known[int(knot)] for knot in knots])
    while len(knots) > 2:
        slope = (times[2:] - times[:-2]) / (knots[2:] - knots[:-2])
        bend = np.abs(times[:-2] + slope * (knots[1:-1] - knots[:-2]) - times[1:-1]) / times[1:-1]
        if bend.min() > STRAIGHT:
            break
        knots, times = (np.delete(values, 1 + bend.argmin()) for values in (knots, times))
    least = min(point.rows * point.tokens for point in points)
    return knots if least >= knots[0] else np.concatenate(([least], knots))
