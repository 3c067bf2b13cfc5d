"""Attention that keeps the documents of a row apart: exact against a dense mask, uncut and in slices, with windows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stage_toys import assert_close, cut_feed, fill, plain_gradients, toy_feed, toy_layers

from pipefit.run.autograd.attention_mask import AttentionMask
from pipefit.run.ops import attention
from pipefit.run.stage.program import StageProgram, StageSetup

TOKENS = 12
STARTS = [[0, 0, 0, 3, 3, 3, 3, 3, 8, 8, 8, 11], [0, 1, 2, 2, 2, 5, 5, 7, 7, 7, 7, 7]]
LATE = [[0] * 10 + [10, 10], [0] * 12]


def feed_of(starts):
    feed = replace(toy_feed(2, TOKENS), documents=torch.tensor(starts))
    return cut_feed(feed, 0, TOKENS)  # fills in the bounds


def check(lengths, starts, window=None, recompute="none"):
    program = StageProgram(
        toy_layers(window=window), StageSetup(recompute=recompute, dtype=torch.float64, slices=len(lengths))
    )
    buffers = fill(program)
    feed = feed_of(starts)
    wanted_loss, wanted = plain_gradients(program, [feed], 23, window=window)
    program.begin_step(0, 23)
    edges = list(itertools.pairwise([0, *itertools.accumulate(lengths)]))
    loss = sum(program.forward(0, i, {}, cut_feed(feed, a, b))["loss"] for i, (a, b) in enumerate(edges))
    for index in reversed(range(len(edges))):
        program.backward(0, index, {})
    assert abs(loss - wanted_loss) <= 1e-12 * abs(wanted_loss)
    assert_close(buffers, wanted, 1e-10)
    again = sum(program.evaluate_slice(0, i, {}, cut_feed(feed, a, b))["loss"] for i, (a, b) in enumerate(edges))
    assert abs(again - wanted_loss) <= 1e-12 * abs(wanted_loss)
    return loss


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [(12,), (5, 4, 3), (3, 5, 4), (1,) * 12])
@pytest.mark.parametrize("starts", [STARTS, LATE])
def test_documents_are_apart(lengths, starts, window, recompute):
    check(lengths, starts, window, recompute)


def test_it_matters():
    assert check((5, 4, 3), STARTS) != check((5, 4, 3), [[0] * TOKENS] * 2)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_documents_and_slicings(data):
    def starts():
        firsts = {0, *data.draw(st.sets(st.integers(1, TOKENS - 1), max_size=6))}
        return [max(first for first in firsts if first <= place) for place in range(TOKENS)]

    cuts = data.draw(st.sets(st.integers(1, TOKENS - 1), max_size=5))
    lengths = tuple(b - a for a, b in itertools.pairwise([0, *sorted(cuts), TOKENS]))
    check(lengths, [starts(), starts()], data.draw(st.sampled_from([None, 2, 4])))


def calls_of(monkeypatch, starts, lengths, window=None):
    """[(slice, what its queries see of their own and of each earlier chunk that is looked at)]."""
    seen = []
    for name in ("own_mask", "earlier_mask"):
        inner = getattr(AttentionMask, name)

        def told(self, *place, inner=inner):
            found = inner(self, *place)
            seen.append(found if isinstance(found, str) else "all" if found is None else tuple(found.shape))
            return found

        monkeypatch.setattr(AttentionMask, name, told)
    program = StageProgram(toy_layers(1, window=window), StageSetup(dtype=torch.float64, slices=len(lengths)))
    fill(program)
    program.begin_step(0, 1)
    feed, result = feed_of(starts), []
    for index, (a, b) in enumerate(itertools.pairwise([0, *itertools.accumulate(lengths)])):
        seen.clear()
        program.forward(0, index, {}, cut_feed(feed, a, b))
        result.append(list(seen))
    return result


def test_masks_are_made_for_partly_visible_chunks_alone(monkeypatch):
    """Own chunk first, then earlier ones from the last; a chunk that no query sees ends the walk."""
    assert calls_of(monkeypatch, LATE, (4, 4, 4)) == [
        ["all"],
        ["all", "all"],
        [(2, 1, 4, 4), (2, 1, 4, 4), (2, 1, 4, 4)],
    ]
    apart = [[0] * 4 + [4] * 4 + [8] * 4] * 2
    assert calls_of(monkeypatch, apart, (4, 4, 4)) == [["all"], ["all", "nothing"], ["all", "nothing"]]
    window = calls_of(monkeypatch, [[0] * 12] * 2, (4, 4, 4), window=8)
    assert window == [["all"], ["all", "all"], ["all", "all", (2, 1, 4, 4)]]


def test_one_document_a_row_is_plain_attention(monkeypatch):
    monkeypatch.setattr(attention, "forward_over", None)
    check((12,), [[0] * TOKENS] * 2)
