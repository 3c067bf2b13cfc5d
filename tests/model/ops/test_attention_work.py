"""The pairs of a query and a key that attention computes: against a count of all visible pairs, and against the kernel
calls of the runtime."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipefit.layout import split_by_shares
from pipefit.model.analysis.totals import executed_flops, graph_flops
from pipefit.model.graph import Graph, Operator, TensorSpec
from pipefit.model.ops import KINDS
from pipefit.model.ops.attention import (
    BACKWARD_SCORE_PASSES,
    EARLIER_SLICES,
    FIRST_QUERY,
    FORWARD_SCORE_PASSES,
    QUERY_BLOCK,
    computed_pairs,
)
from pipefit.model.ops.kind import OperatorCall
from pipefit.run.autograd.attention_runs import AttentionSpec, KeyValueCache, key_runs

SLICINGS = [(24,), (12, 12), (8, 8, 8), (11, 7, 6), (1, 22, 1), (3,) * 8, (1,) * 24]


def attention_call(
    queries: int, keys: int, window: int | None = None, causal: bool = True, cut: Any = None, **symbols: int
) -> OperatorCall:
    attributes = {"causal": causal, "scale": 0.5, "window": window, **({"cut": cut} if cut else {})}
    q, k = (1, queries, 4, 8), (1, keys, 2, 8)
    named = {{"earlier": EARLIER_SLICES, "first": FIRST_QUERY}.get(name, name): size for name, size in symbols.items()}
    return OperatorCall((q, k, k), (q,), attributes, named, 4)


def visible_pairs(length: int, window: int | None = None) -> int:
    """Count the pairs of a sequence one by one."""
    return sum(
        key <= query and (window is None or query - key < window) for query in range(length) for key in range(length)
    )


def pairs_of_slices(
    slices: tuple[int, ...], window: int | None = None, shares: tuple[int, ...] = (1,)
) -> list[list[int]]:
    """Return the computed pairs by slice and device."""
    pairs = []
    for index, (tokens, stop) in enumerate(zip(slices, accumulate(slices), strict=True)):
        sizes = {"P": stop - tokens, "earlier": index}
        runs = split_by_shares(tokens, shares)
        cut = [1, -1, "T"] if len(shares) > 1 else None
        pairs.append(
            [
                computed_pairs(attention_call(end - first, tokens, window, cut=cut, first=first, **sizes))
                for first, end in runs
            ]
        )
    return pairs


def runtime_pairs(
    slices: tuple[int, ...], window: int | None = None, shares: tuple[int, ...] = (1,)
) -> list[list[int]]:
    """Return the pairs of the kernel calls that the runtime makes, by slice and device."""
    past, pairs = KeyValueCache(), []
    for index, tokens in enumerate(slices):
        past.put_keys(index, *(torch.ones(1, tokens, 2, 8) for _ in range(2)))
        row = []
        for position, (first, end) in enumerate(split_by_shares(tokens, shares)):
            feed = SimpleNamespace(documents=None, document_bounds=(0, 0))
            record: Any = SimpleNamespace(slice=index, feed=feed, masks={})
            shard = SimpleNamespace(position=position, runs=lambda length: split_by_shares(length, shares))
            q = torch.ones(1, end - first, 4, 8)
            row.append(0)
            for run in key_runs(past, record, q, AttentionSpec(0.5, window, shard, None)):
                keys, queries = run.stop - run.start, end - first
                assert run.causal == (run.mask is None and run.slice_ == index and run.start == first)
                row[-1] += queries * (queries + 1) // 2 if run.causal else queries * keys
        pairs.append(row)
    return pairs


@pytest.mark.parametrize("slices", SLICINGS)
@pytest.mark.parametrize("shares", [(1,), (1, 1), (3, 1), (1, 2, 1)])
def test_slices_and_devices_add_up_to_the_visible_pairs_of_the_sequence(
    slices: tuple[int, ...], shares: tuple[int, ...]
) -> None:
    pairs = pairs_of_slices(slices, shares=shares)
    assert sum(map(sum, pairs)) == visible_pairs(24) == computed_pairs(attention_call(24, 24))
    assert pairs == runtime_pairs(slices, shares=shares)


@pytest.mark.parametrize("slices", [slices for slices in SLICINGS if len({*slices}) == 1])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 9, 12, 13, 23, 24, 40])
@pytest.mark.parametrize("shares", [(1,), (3, 1)])
def test_windows_are_computed_as_the_runtime_calls_its_kernels(
    slices: tuple[int, ...], window: int, shares: tuple[int, ...]
) -> None:
    pairs = pairs_of_slices(slices, window, shares)
    assert pairs == runtime_pairs(slices, window, shares)
    assert sum(map(sum, pairs)) >= visible_pairs(24, window), "masked kernels also compute what they hide"
    if window >= 24:
        assert sum(map(sum, pairs)) == visible_pairs(24)


def test_a_masked_window_computes_the_square_of_a_sequence_and_less_in_slices() -> None:
    assert pairs_of_slices((24,), 12) == [[24 * 24]]
    assert pairs_of_slices((12, 12), 12) == [[12 * 13 // 2], [12 * 13 // 2 + 12 * 12]]
    assert pairs_of_slices((4,) * 6, 4) == [[10]] + [[10 + 16]] * 5


def test_without_a_causal_mask_every_pair_is_computed() -> None:
    assert computed_pairs(attention_call(24, 24, causal=False)) == 24 * 24
    assert computed_pairs(attention_call(6, 24, causal=False, cut=[1, -1, "T"])) == 6 * 24


def test_a_part_of_unknown_place_is_the_last_one() -> None:
    whole = [computed_pairs(attention_call(6, 24, cut=[1, -1, "T"], first=first)) for first in (0, 6, 12, 18)]
    assert computed_pairs(attention_call(6, 24, cut=[1, -1, "T"])) == whole[-1] == max(whole)
    assert computed_pairs(attention_call(6, 24, cut=[1, 6, 24])) == whole[1]


def test_reported_flops_count_the_square_and_executed_ones_the_triangle() -> None:
    shape = (2, "T", 4, 8)
    operator = Operator(
        kind="attention",
        inputs=("x", "x", "x"),
        outputs=("o",),
        attributes={"causal": True, "scale": 0.5, "window": None},
    )
    graph = Graph(
        inputs=(TensorSpec(name="x", shape=shape),),
        outputs=("o",),
        operators=(operator,),
        parameters=(),
        tensors=(TensorSpec(name="o", shape=shape),),
    )
    reported, executed = graph_flops(graph, {"T": 24}), executed_flops(graph, operator, {"T": 24})
    product = 2 * 2 * 4 * 8  # rows, heads, features, a multiply-add
    assert (reported.forward, reported.input_gradient) == (2 * product * 24 * 24, 4 * product * 24 * 24)
    assert (executed.forward, executed.input_gradient) == tuple(times * product * visible_pairs(24) for times in (2, 5))
    assert reported.weight_gradient == executed.weight_gradient == 0


def test_capped_scores_are_computed_in_blocks_of_queries() -> None:
    def capped_pairs(queries: int) -> int:
        call = attention_call(queries, queries)
        return computed_pairs(replace(call, attributes={**call.attributes, "softcap": 30.0}))

    queries = 2 * QUERY_BLOCK + 7
    assert capped_pairs(queries) == QUERY_BLOCK * (QUERY_BLOCK + 2 * QUERY_BLOCK) + 7 * queries
    assert capped_pairs(queries) > visible_pairs(queries)
    assert capped_pairs(5) == 25


def test_the_kernels_of_capped_scores_read_and_write_them() -> None:
    call = attention_call(5, 5)
    traffic = KINDS["attention"].kernel_traffic
    assert traffic is not None and traffic(call) == (0, 0)
    capped = replace(call, attributes={**call.attributes, "softcap": 30.0})
    scores = 4 * 25 * 4  # heads, pairs, bytes
    assert traffic(capped) == (FORWARD_SCORE_PASSES * scores, BACKWARD_SCORE_PASSES * scores)
