"""A stage program against the same model in plain PyTorch: loss and every gradient, for every way of running it."""

from __future__ import annotations

import pytest
import torch
from tests.run.stage_toys import (
    assert_close,
    fill,
    plain_gradients,
    toy_feed,
    toy_layers,
)

from pipefit.run.stage import StageProgram

EXACT = 1e-12


def run_step(program: StageProgram, feeds, mode: str, divisor: int):
    """All microbatches forward, then backward, in the given mode; the summed loss."""
    program.begin_step(0, divisor)
    loss = sum(program.forward(m, 0, {}, feed)["loss"] for m, feed in enumerate(feeds))
    for m in range(len(feeds)):
        if mode == "B":
            program.backward(m, 0, {})
        else:
            program.backward_input(m, 0, {})
    if mode != "B":
        for m in range(len(feeds)):
            program.backward_weight(m, 0)
    return loss


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("mode", ["B", "IW"])
def test_loss_and_gradients_equal_plain_pytorch(mode, recompute, tied):
    program = StageProgram(toy_layers(tied=tied), recompute=recompute, dtype=torch.float64)
    buffers = fill(program)
    feeds = [toy_feed(seed=i) for i in range(3)]
    wanted_loss, wanted = plain_gradients(program, feeds, divisor=57, tied=tied)
    loss = run_step(program, feeds, mode, 57)
    assert abs(loss - wanted_loss) <= EXACT * abs(wanted_loss)
    assert_close(buffers, wanted, EXACT)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_split_backward_gives_the_very_same_numbers(recompute):
    program = StageProgram(toy_layers(), recompute=recompute, dtype=torch.float64)
    buffers = fill(program)
    run_step(program, [toy_feed()], "B", 19)
    fused = {name: buffer.clone() for name, buffer in buffers.items()}
    for buffer in buffers.values():
        buffer.zero_()
    run_step(program, [toy_feed()], "IW", 19)
    for name in fused:
        assert torch.equal(fused[name], buffers[name]), name
