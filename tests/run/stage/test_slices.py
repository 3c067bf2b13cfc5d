"""A sequence run in slices gives the loss and every gradient of the uncut sequence, on one device."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stage_toys import assert_close, cut_feed, fill, plain_gradients, toy_feed, toy_layers

from pipefit.run.stage.program import StageProgram, StageSetup

EXACT = 1e-10
TOKENS = 12


def sliced_step(program, feeds, lengths, mode, divisor):
    """One step with every microbatch cut into slices of these lengths, split over two stages at once by the caller."""
    program.begin_step(0, divisor)
    stops = list(itertools.accumulate(lengths))
    loss = 0
    for m, feed in enumerate(feeds):
        for s, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
            loss = loss + program.forward(m, s, {}, cut_feed(feed, start, stop))["loss"]
    order = [(m, s) for m in range(len(feeds)) for s in reversed(range(len(lengths)))]
    for m, s in order:
        if mode == "B":
            program.backward(m, s, {})
        else:
            program.backward_input(m, s, {})
    if mode == "IW":
        for m, s in order:
            program.backward_weight(m, s)
    return loss


def check(lengths, mode, recompute, window=None):
    program = StageProgram(
        toy_layers(window=window), StageSetup(recompute=recompute, dtype=torch.float64, slices=max(len(lengths), 2))
    )
    buffers = fill(program)
    feeds = [toy_feed(2, TOKENS, seed=i) for i in range(2)]
    wanted_loss, wanted = plain_gradients(program, feeds, 41, window=window)
    loss = sliced_step(program, feeds, lengths, mode, 41)
    assert abs(loss - wanted_loss) <= EXACT * abs(wanted_loss)
    assert_close(buffers, wanted, EXACT)
    assert not program._past and not program._records


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("mode", ["B", "IW"])
@pytest.mark.parametrize("lengths", [(6, 6), (5, 4, 2, 1), (1, 10, 1)])
def test_slices_equal_the_whole_sequence(lengths, mode, recompute):
    check(lengths, mode, recompute)


@pytest.mark.parametrize("window", [2, 3, 7])
def test_a_sliding_window_reaches_into_earlier_slices(window):
    check((5, 4, 3), "B", "none", window)


@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(1, TOKENS - 1), max_size=5), window=st.sampled_from([None, 2, 5]))
def test_random_slicings(cuts, window):
    edges = [0, *sorted(cuts), TOKENS]
    check(tuple(b - a for a, b in itertools.pairwise(edges)), "IW", "selective", window)


def test_the_window_of_an_uncut_sequence():
    program = StageProgram(toy_layers(window=4), StageSetup(dtype=torch.float64))
    buffers = fill(program)
    feed = toy_feed(2, TOKENS)
    _, wanted = plain_gradients(program, [feed], 9, window=4)
    program.begin_step(0, 9)
    program.forward(0, 0, {}, feed)
    program.backward(0, 0, {})
    assert_close(buffers, wanted, 1e-12)


@pytest.mark.parametrize("kind", ["evaluation", "frozen"])
def test_forwards_alone_come_in_slices_and_leave_nothing(kind):
    feed, edges = toy_feed(2, TOKENS), list(itertools.pairwise((0, 5, 9, TOKENS)))
    cut = StageProgram(toy_layers(), StageSetup(dtype=torch.float64, slices=3, backward=kind == "evaluation"))
    fill(cut)
    whole = StageProgram(toy_layers(), StageSetup(dtype=torch.float64))
    fill(whole)
    call = cut.evaluate_slice if kind == "evaluation" else cut.forward
    for microbatch in (0, 1, 0):
        loss = sum(call(microbatch, i, {}, cut_feed(feed, a, b))["loss"] for i, (a, b) in enumerate(edges))
        assert torch.allclose(loss, whole.evaluate_slice(0, 0, {}, feed)["loss"], rtol=1e-12)
        assert not cut._past
