"""Compact JSON encoding of the traces in the report. `assets/decode.js` is the inverse.

Numbers are variable-length base-64 text, as in source maps: six bits a character, the top bit marks continuation, the
lowest bit of the value is its sign. Times are multiples of horizon / 2^20. Each action is (gap since the action before
it, duration), about five characters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipefit.cost.types import Array
from pipefit.schedule.actions import Action
from pipefit.schedule.taskgraph.memory import MemoryCurve
from pipefit.show.trace import StepTrace, TraceRow

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
TIME_TICKS = 1 << 20
MOST_SPANS = 240_000
"""Above this number of actions the report keeps, of each lane's devices, the first and the slowest."""
CURVE_POINTS = 240


def encode_numbers(values: Iterable[int]) -> str:
    """Encode the values as text."""
    out: list[str] = []
    for value in values:
        rest = value << 1 if value >= 0 else (-value << 1) | 1
        while rest >= 32:
            out.append(ALPHABET[(rest & 31) | 32])
            rest >>= 5
        out.append(ALPHABET[rest])
    return "".join(out)


def encode_traces(traces: Sequence[StepTrace], slices: int) -> dict[str, Any]:
    """Encode all rows on one clock. A sequence of actions that several rows share is stored once."""
    horizon_s = max((trace.stop_s for trace in traces), default=0.0)
    tick_s = horizon_s / TIME_TICKS if horizon_s else 1.0
    sequences: dict[tuple[Action, ...], int] = {}
    rows = []
    for trace in traces:
        for row in _rows_to_draw(trace):
            rows.append(
                {
                    "trace": trace.name,
                    "lane": row.lane,
                    "device": row.device,
                    "sequence": sequences.setdefault(row.actions, len(sequences)),
                    "times": encode_numbers(_row_ticks(row, tick_s)),
                    **({} if row.wait_s is None else {"waits": encode_numbers(_round_values(row.wait_s / tick_s))}),
                }
            )
    return {
        "horizon_s": horizon_s,
        "tick_s": tick_s,
        "sequences": [encode_actions(actions, slices) for actions in sequences],
        "rows": rows,
        "left_out": sum(len(trace.rows) for trace in traces) - len(rows),
    }


def encode_actions(actions: Sequence[Action], slices: int) -> dict[str, Any]:
    """Encode a sequence as words (kind, stage, peer, tensor) and their order.

    The k-th use of a word is of microbatch k // slices and slice k % slices, or counted down in the backward pass.
    Otherwise `places` holds the word's (microbatch, slice) pairs.
    """
    words: dict[tuple[str, int, int, str], int] = {}
    order = []
    places: list[list[tuple[int, int]]] = []
    for action in actions:
        word = (action.kind, action.stage, action.peer, action.what)
        index = words.setdefault(word, len(words))
        if index == len(places):
            places.append([])
        places[index].append((action.microbatch, action.slice))
        order.append(index)
    return {
        "words": [list(word) for word in words],
        "order": encode_numbers(order),
        "places": [
            0 if pairs == _counted_places(len(pairs), slices, False) else 1 if pairs == _counted_places(len(pairs),
            slices, True) else encode_numbers(number for pair in pairs for number in pair)
            for pairs in places
        ],
    }  # fmt: skip


def encode_curve(curve: MemoryCurve, horizon_s: float) -> dict[str, Any]:
    """Encode a memory curve as at most CURVE_POINTS values: the largest in each interval, so that the peak stays
    exact."""
    count = CURVE_POINTS
    if not len(curve.time_s) or not horizon_s:
        return {"static": curve.static_bytes, "bytes": [round(curve.static_bytes)]}
    bins = np.minimum((curve.time_s / horizon_s * count).astype(np.int64), count - 1)
    last = np.searchsorted(bins, np.arange(count), side="right") - 1
    before = np.where(last >= 0, curve.bytes[np.maximum(last, 0)], curve.static_bytes)
    carried = np.concatenate(([curve.static_bytes], before[:-1]))
    highest = carried.copy()
    np.maximum.at(highest, bins, curve.bytes)
    return {"static": curve.static_bytes, "bytes": [round(float(value)) for value in highest]}


def critical_flags(rows: Sequence[TraceRow], path: Sequence[tuple[int, Action]]) -> dict[int, str]:
    """Return, for each lane, the indices of its predicted actions on the critical path, encoded as differences."""
    wanted = set(path)
    flags = {}
    for row in rows:
        critical = [index for index, action in enumerate(row.actions) if (row.lane, action) in wanted]
        steps = [critical[0], *(b - a for a, b in itertools.pairwise(critical))] if critical else []
        flags[row.lane] = encode_numbers(steps)
    return flags


def _rows_to_draw(trace: StepTrace) -> Sequence[TraceRow]:
    if sum(len(row.actions) for row in trace.rows) <= MOST_SPANS:
        return trace.rows
    by_lane: dict[int, list[TraceRow]] = {}
    for row in trace.rows:
        by_lane.setdefault(row.lane, []).append(row)
    drawn = []
    for rows in by_lane.values():
        slowest = max(rows, key=lambda row: float((row.stop_s - row.start_s).sum()))
        drawn += [rows[0]] if slowest is rows[0] else [rows[0], slowest]
    return drawn


def _row_ticks(row: TraceRow, tick_s: float) -> Iterable[int]:
    start, stop = _round_values(row.start_s / tick_s), _round_values(row.stop_s / tick_s)
    before = 0
    for begin, end in zip(start, stop, strict=True):
        yield begin - before
        yield end - begin
        before = end


def _round_values(values: Array) -> list[int]:
    return [int(value) for value in np.rint(values)]


def _counted_places(count: int, slices: int, down: bool) -> list[tuple[int, int]]:
    return [(k // slices, slices - 1 - k % slices if down else k % slices) for k in range(count)]
