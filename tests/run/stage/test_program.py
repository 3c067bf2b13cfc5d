"""A stage program against the same model in plain PyTorch: loss and every gradient, for every way of running it."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from tests.support.stage_toys import (
    assert_close,
    fill,
    plain_gradients,
    toy_feed,
    toy_layers,
)

from pipefit.errors import ModelError
from pipefit.run.ops.embedding import accumulate_rows
from pipefit.run.stage.parameters import bind_buffer
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup

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
    program = StageProgram(toy_layers(tied=tied), StageSetup(recompute=recompute, dtype=torch.float64))
    buffers = fill(program)
    feeds = [toy_feed(seed=i) for i in range(3)]
    wanted_loss, wanted = plain_gradients(program, feeds, divisor=57, tied=tied)
    loss = run_step(program, feeds, mode, 57)
    assert abs(loss - wanted_loss) <= EXACT * abs(wanted_loss)
    assert_close(buffers, wanted, EXACT)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_split_backward_gives_the_very_same_numbers(recompute):
    program = StageProgram(toy_layers(), StageSetup(recompute=recompute, dtype=torch.float64))
    buffers = fill(program)
    run_step(program, [toy_feed()], "B", 19)
    fused = {name: buffer.clone() for name, buffer in buffers.items()}
    for buffer in buffers.values():
        buffer.zero_()
    run_step(program, [toy_feed()], "IW", 19)
    for name in fused:
        assert torch.equal(fused[name], buffers[name]), name


def two_stages(recompute="none", **options):
    """The toy model cut in two: the embedding and one block, then the rest."""
    layers = toy_layers(**options)
    first = StageProgram(layers[:2], StageSetup(recompute=recompute, dtype=torch.float64))
    second = StageProgram(layers[2:], StageSetup(recompute=recompute, dtype=torch.float64, first_layer_index=2))
    return first, second


@pytest.mark.parametrize("mode", ["B", "IW"])
def test_two_stages_hand_over_hidden_states_and_gradients(mode):
    first, second = two_stages()
    buffers = {**fill(first), **fill(second)}
    feed = toy_feed()
    both = StageProgram(toy_layers(), StageSetup(dtype=torch.float64))
    fill(both)
    wanted_loss, wanted = plain_gradients(both, [feed], 7)
    for program in (first, second):
        program.begin_step(0, 7)
    hidden = first.forward(0, 0, {}, feed)
    assert set(hidden) == {""} and not hidden[""].requires_grad
    loss = second.forward(0, 0, hidden, feed)["loss"]
    if mode == "B":
        first.backward(0, 0, second.backward(0, 0, {}))
    else:
        first.backward_input(0, 0, second.backward_input(0, 0, {}))
        first.backward_weight(0, 0)
        second.backward_weight(0, 0)
    assert abs(loss - wanted_loss) <= EXACT * wanted_loss
    assert_close(buffers, wanted, EXACT)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("mode", ["B", "IW"])
def test_layers_announce_complete_gradients_last_layer_first(mode, recompute):
    program = StageProgram(toy_layers(3), StageSetup(recompute=recompute, dtype=torch.float64))
    buffers = fill(program)
    _, wanted = plain_gradients(program, [toy_feed()], 5, blocks=3)
    seen = []

    def announced(layer):
        seen.append(layer)
        for name in program.layers[layer].parameters.values():
            assert torch.allclose(buffers[name], wanted[name], rtol=1e-9, atol=1e-12), (layer, name)

    program.on_layer_gradients = announced
    run_step(program, [toy_feed()], mode, 5)
    assert seen == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_frozen_linear_layers_pass_gradients_and_get_none(recompute):
    program = StageProgram(toy_layers(trainable=False), StageSetup(recompute=recompute, dtype=torch.float64))
    buffers = fill(program)
    _, wanted = plain_gradients(program, [toy_feed()], 5)
    run_step(program, [toy_feed()], "IW", 5)
    frozen = {name for name, p in program.parameters.items() if not p.requires_grad}
    assert frozen == {f"layers.{i}.{k}.weight" for i in range(2) for k in "qkv"}
    assert all(not buffers[name].any() for name in frozen)
    rest = set(buffers) - frozen
    assert_close({n: buffers[n] for n in rest}, {n: wanted[n] for n in rest}, EXACT)


def test_bfloat16_accumulates_in_float32():
    program = StageProgram(toy_layers(), StageSetup(dtype=torch.bfloat16))
    buffers = fill(program)
    feeds = [toy_feed(seed=i) for i in range(16)]
    exact = StageProgram(toy_layers(), StageSetup(dtype=torch.float64))
    fill(exact)
    for name, parameter in program.parameters.items():
        exact.parameters[name].data.copy_(parameter.data)
    wanted_loss, wanted = plain_gradients(exact, feeds, 16)
    loss = run_step(program, feeds, "B", 16)
    assert loss.dtype == torch.float32 and all(b.dtype == torch.float32 for b in buffers.values())
    assert abs(loss - wanted_loss) < 0.02 * wanted_loss
    for name in wanted:
        error = (buffers[name] - wanted[name]).norm() / wanted[name].norm()
        assert error < 0.1, (name, float(error))
    assert all(p.grad is None for p in program.parameters.values()), "a bf16 gradient was left beside the buffer"


def test_rows_of_a_frequent_token_are_summed_before_they_are_rounded(monkeypatch):
    """4,096 equal rows of a table with bfloat16 gradients; the columns are summed in two blocks."""
    monkeypatch.setattr("pipefit.run.ops.embedding.SUM_ELEMENTS", 3 * 5)
    weight = torch.nn.Parameter(torch.zeros(5, 6, dtype=torch.bfloat16))
    buffer = torch.ones(5, 6, dtype=torch.bfloat16)
    bind_buffer(weight, buffer)
    indices, dy = torch.full((2, 2048), 3), torch.full((2, 2048, 6), 2**-9, dtype=torch.bfloat16)
    accumulate_rows(weight, indices, dy)
    assert torch.equal(buffer[3], torch.full((6,), 1.0 + 8.0, dtype=torch.bfloat16))
    assert (buffer[[0, 1, 2, 4]] == 1.0).all()


def test_many_small_gradients_are_not_rounded_away():
    """300 equal gradients add up to 300 times the first; a bfloat16 buffer would stop growing at 256."""
    program = StageProgram(toy_layers(1), StageSetup(dtype=torch.bfloat16))
    buffers = fill(program)
    run_step(program, [toy_feed()], "B", 1)
    first = {name: buffer.clone() for name, buffer in buffers.items()}
    run_step(program, [toy_feed()] * 299, "B", 1)
    assert_close(buffers, {name: 300 * value for name, value in first.items()}, 1e-4)


def test_nothing_of_a_microbatch_survives_its_backward():
    first, second = two_stages()
    fill(first), fill(second)
    for program in (first, second):
        program.begin_step(0, 7)
    feed = toy_feed()
    hidden = first.forward(0, 0, {}, feed)
    watched = [weakref.ref(feed.tokens), weakref.ref(hidden[""]), weakref.ref(first._records[0, 0])]
    second.forward(0, 0, hidden, feed)
    watched.append(weakref.ref(second._records[0, 0]))
    del hidden
    gradient = second.backward_input(0, 0, {})
    first.backward_input(0, 0, gradient)
    first.backward_weight(0, 0)
    second.backward_weight(0, 0)
    del feed, gradient
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4


def test_evaluation_keeps_nothing_and_drops_nothing():
    program = StageProgram(toy_layers(dropout=0.5), StageSetup(dtype=torch.float64))
    fill(program)
    plain = StageProgram(toy_layers(), StageSetup(dtype=torch.float64))
    fill(plain)
    feed = toy_feed()
    assert torch.equal(program.evaluate_slice(0, 0, {}, feed)["loss"], plain.evaluate_slice(0, 0, {}, feed)["loss"])
    assert not program._records


def test_a_step_with_a_microbatch_left_over_is_a_bug():
    program = StageProgram(toy_layers(), StageSetup(dtype=torch.float64))
    fill(program)
    program.begin_step(0, 1)
    program.forward(0, 0, {}, toy_feed())
    with pytest.raises(AssertionError, match="without their backward"):
        program.begin_step(1, 1)


def test_an_unknown_operator_kind_is_named():
    layer = toy_layers()[0]
    operator = dataclasses.replace(layer.graph.operators[0], kind="embbeding")
    graph = dataclasses.replace(layer.graph, operators=(operator,))
    with pytest.raises(ModelError, match=r"cannot execute the operator 'embbeding'(.|\n)*allowed: add, all_gather"):
        StageProgram([StageLayer("embed", graph, layer.parameters)])


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_regions_compute_the_same(recompute):
    layers = toy_layers(3, dropout=0.2)
    programs = [
        StageProgram(layers, StageSetup(recompute=recompute, dtype=torch.float64, backend=backend))
        for backend in (None, "aot_eager")
    ]
    results = []
    for program in programs:
        buffers = fill(program)
        results.append((run_step(program, [toy_feed()], "IW", 9), buffers))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-12)
    assert_close(results[1][1], results[0][1], EXACT)
