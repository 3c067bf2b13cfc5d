"""Dropout draws the same numbers however the work is laid out, and numbers that are good enough."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from tests.support.stage_toys import cut_feed, fill, toy_feed, toy_layers

from pipefit.run.autograd.random import feature_bits, keep_mask, mix_key, token_bits
from pipefit.run.stage.program import StageProgram, StageSetup
from pipefit.run.stage_inputs import StageInputs

P, STEP = 0.3, 5


def mask(seed=0, step=0, layer=0, index=0, rows=64, tokens=64, features=48, p=P):
    bits = token_bits(mix_key(seed, step, layer, index), torch.arange(rows), torch.arange(tokens).expand(rows, tokens))
    return keep_mask(bits, feature_bits(0, features, torch.device("cpu")), p)


def test_the_share_of_zeros_is_p_along_every_axis():
    for p in (0.1, 0.5, 0.9):
        drop = ~mask(p=p)
        count = drop.numel()
        assert abs(drop.double().mean() - p) < 5 * (p * (1 - p) / count) ** 0.5
        for dims in ((1, 2), (0, 2), (0, 1)):
            means = drop.double().mean(dims)
            size = count / len(means)
            assert (means - p).abs().max() < 5 * (p * (1 - p) / size) ** 0.5


def test_neighbours_and_different_keys_are_uncorrelated():
    base = mask().double() - (1 - P)
    variance, count = P * (1 - P), base.numel()
    limit = 5 * variance / count**0.5
    for other in (mask(seed=1), mask(step=1), mask(layer=1), mask(index=1)):
        assert (base * (other.double() - (1 - P))).mean().abs() < limit
    for dim in range(3):
        near = base.narrow(dim, 0, base.shape[dim] - 1) * base.narrow(dim, 1, base.shape[dim] - 1)
        assert near.mean().abs() < 5 * variance / near.numel() ** 0.5


def test_zero_drops_nothing_and_one_drops_everything():
    assert mask(p=0.0).all() and not mask(p=1.0).any()


def gradients(programs, feeds, slices):
    """One step over a chain of stages; (loss, gradients by name). `feeds` are microbatches; slices are token counts."""
    buffers = {}
    for program in programs:
        buffers |= fill(program)
        program.begin_step(STEP, 10)
    loss = 0
    stops = [0, *itertools.accumulate(slices)]
    for m, feed in enumerate(feeds):
        for s, (start, stop) in enumerate(itertools.pairwise(stops)):
            values = {}
            for program in programs:
                values = program.forward(m, s, values, cut_feed(feed, start, stop))
            loss = loss + values["loss"]
    for m, s in itertools.product(range(len(feeds)), reversed(range(len(slices)))):
        back = {}
        for program in reversed(programs):
            back = program.backward(m, s, back)
    return loss, buffers


def whole_feed() -> StageInputs:
    return dataclasses.replace(toy_feed(rows=4, tokens=12), step=STEP)


def rows_of(feed: StageInputs, *numbers: int) -> StageInputs:
    pick = list(numbers)
    return StageInputs(
        tokens=feed.tokens[pick],
        labels=feed.labels[pick],
        positions=feed.positions[pick],
        rows=feed.rows[pick],
        step=STEP,
    )


def stages(*cuts, recompute="none", slices=1, seed=3):
    layers = toy_layers(dropout=P)
    edges = [0, *cuts, len(layers)]
    return [
        StageProgram(
            layers[a:b],
            StageSetup(recompute=recompute, dtype=torch.float64, seed=seed, first_layer_index=a, slices=slices),
        )
        for a, b in itertools.pairwise(edges)
    ]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", ["rows", "stages", "slices"])
def test_dropout_does_not_depend_on_the_layout(layout, recompute):
    feed = whole_feed()
    wanted_loss, wanted = gradients(stages(), [feed], [12])
    if layout == "rows":
        loss, found = gradients(
            stages(recompute=recompute), [rows_of(feed, 3, 0), rows_of(feed, 1), rows_of(feed, 2)], [12]
        )
    elif layout == "stages":
        loss, found = gradients(stages(1, 2, 3, recompute=recompute), [feed], [12])
    else:
        loss, found = gradients(stages(2, recompute=recompute, slices=3), [feed], [7, 4, 1])
    assert abs(loss - wanted_loss) < 1e-12 * wanted_loss
    for name in wanted:
        assert torch.allclose(found[name], wanted[name], rtol=0, atol=float(1e-11 * wanted[name].abs().max())), name


def test_another_seed_or_step_drops_other_elements():
    feed = whole_feed()
    loss, _ = gradients(stages(), [feed], [12])
    other_seed, _ = gradients(stages(seed=4), [feed], [12])
    other_step, _ = gradients(stages(), [dataclasses.replace(feed, step=STEP + 1)], [12])
    assert len({float(loss), float(other_seed), float(other_step)}) == 3
