"""The worker's parts by themselves: transfers against whole tensors, rings, buckets, AdamW, clipping, first values."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.errors import PlanError, RunError
from pipefit.layout import Mesh, MeshAxis, held_box, parse_form
from pipefit.model.families import InitialValue
from pipefit.optimizers import FlatPiece, OptimizerState, find_optimizer
from pipefit.run.session.metrics import MeasuredStep, PeakFlops, RunLog, StepWork, find_peak, format_step, step_metrics
from pipefit.run.stage.initial_values import initial_value
from pipefit.run.transfers.pieces import incoming_pieces, outgoing_pieces
from pipefit.run.update.buckets import BucketEntry, make_buckets
from pipefit.run.update.grad_norm import clip_factor, counts_in_norm, sum_of_squares
from pipefit.run.update.optimizer import OptimizerConfig, check_config, learning_rate, optimizer_options
from pipefit.schedule.actions import parse_lanes
from pipefit.schedule.lowering.messages import post_ahead, receive_windows


def grid(replicas: tuple[int, ...], shards: tuple[int, ...], first: int = 0) -> Mesh:
    axes = (MeshAxis(name="replica", shares=replicas), MeshAxis(name="shard", shares=shards))
    return Mesh(axes=axes, devices=tuple(range(first, first + len(replicas) * len(shards))))


shares = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
FORMS = st.sampled_from([("G0", "I", "I"), ("G0", "I", "G1"), ("G0", "G1", "G1"), ("G0", "P", "I"), ("G0", "P", "G1")])


@settings(max_examples=60, deadline=None)
@given(shares, shares, shares, shares, FORMS, st.sampled_from(["I", "G1"]))
def test_pieces_carry_a_tensor_from_any_grid_to_any_other(r1, s1, r2, s2, form, received):
    """Executed by hand on a whole tensor: what every receiver puts together is its part of the whole."""
    replica, sent, wire = form
    source, target = grid(r1, s1), grid(r2, s2, 100)
    shape = (7, 6, 2)
    whole = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    local = {}
    for device in source.devices:
        box = held_box(shape, source, [parse_form(replica), parse_form(sent)], device)
        local[device] = whole[tuple(slice(*run) for run in box)]
    for device in target.devices:
        got = incoming_pieces(shape, source, (replica, wire), target, ("G0", received), device)
        buffer = np.full(got.shape, np.nan)
        for piece in got.pieces:
            out = outgoing_pieces(shape, source, (replica, sent), (replica, wire), target, ("G0", received), piece.peer)
            (match,) = [
                p
                for p in out.pieces
                if p.peer == device and _global(p, piece.peer, source, sent) == _to(piece, device, target, received)
            ]
            buffer[tuple(slice(*run) for run in piece.box)] = local[piece.peer][tuple(slice(*run) for run in match.box)]
            assert out.sum_over == (("shard",) if sent == "P" and len(s1) > 1 else ())
        box = held_box(shape, target, [parse_form("G0"), parse_form(received)], device)
        np.testing.assert_array_equal(buffer, whole[tuple(slice(*run) for run in box)])


def _global(piece, device, group, form):
    own = held_box((7, 6, 2), group, [parse_form("G0"), parse_form(form)], device)
    return tuple((a + low, b + low) for (a, b), (low, _) in zip(piece.box, own, strict=True))


_to = _global


def test_equal_grids_give_one_whole_message_each():
    source, target = grid((1, 1), (1, 1)), grid((1, 1), (1, 1), 4)
    for device in source.devices:
        out = outgoing_pieces((4, 6, 2), source, ("G0", "P"), ("G0", "P"), target, ("G0", "P"), device)
        assert [(piece.peer, piece.whole) for piece in out.pieces] == [(device + 4, True)]


def test_a_whole_gradient_that_arrives_as_a_partial_sum_goes_to_one_position():
    """Everyone else contributes zeros: the sum over the axis is the tensor once."""
    source, target = grid((1,), (1,)), grid((1,), (1, 1, 1), 4)
    got = [incoming_pieces((4, 6, 2), source, ("G0", "I"), target, ("G0", "P"), device) for device in target.devices]
    assert [len(entry.pieces) for entry in got] == [1, 0, 0]
    assert [entry.zero for entry in got] == [False, True, True]


def test_a_split_tensor_cannot_leave_whole():
    source, target = grid((1,), (1, 1)), grid((1,), (1, 1), 4)
    with pytest.raises(PlanError) as error:
        outgoing_pieces((4, 6, 2), source, ("G0", "G1"), ("G0", "I"), target, ("G0", "I"), 0)
    assert "cannot leave as I" in error.value.full_text() and "axis 'shard'" in error.value.full_text()


def test_a_window_is_what_the_receiver_has_open():
    lanes = ["0F0 0RECV_B0 0B0", "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2 1RECV_F3 1F3 1I0 1W0"]
    first, second = parse_lanes(lanes)
    assert receive_windows(second) == {("RECV_F", 1, 0, ""): 2}
    assert receive_windows(first) == {("RECV_B", 0, 1, ""): 1}


def test_receives_are_posted_one_message_ahead():
    """Before the use of the message ahead of it from the same lane, whatever either of them carries."""
    (lane,) = parse_lanes(["1RECV_F0 1F0 1SEND_F0 1F9 1RECV_F1 1RECV_B0 1F1 1B0 1F8 1RECV_B1 1B1"])
    text = " ".join(map(str, post_ahead(lane, (0, 1, 2))))
    assert text == "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F9 1RECV_B0 1F1 1RECV_B1 1B0 1F8 1B1"
    text = " ".join(map(str, post_ahead(lane, (0, 1, 0))))
    assert text == "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F9 1RECV_B0 1F1 1RECV_B1 1B0 1F8 1B1"


def adamw(parameter: torch.Tensor, master_dtype: torch.dtype, config: OptimizerConfig, decays: bool) -> OptimizerState:
    kind = find_optimizer("adamw")
    piece = FlatPiece(parameter=parameter, master_dtype=master_dtype, decays=decays, shapes={})
    return kind.state(kind, piece, optimizer_options(config, kind))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adamw_equals_pytorchs(dtype):
    """Over six steps with a changing learning rate and clipping-sized gradients, cut in uneven pieces."""
    config = OptimizerConfig(lr=3e-3, weight_decay=0.07, options={"beta1": 0.87, "beta2": 0.93}, warmup=3, steps=6)
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(1000, generator=generator, dtype=dtype)
    theirs = start.clone().requires_grad_()
    other = torch.optim.AdamW([theirs], lr=1.0, betas=(0.87, 0.93), eps=1e-8, weight_decay=0.07)
    mine = start.clone()
    pieces = [adamw(mine[a:b], dtype, config, decays=True) for a, b in ((0, 1), (1, 640), (640, 1000))]
    for step in range(6):
        gradient = torch.randn(1000, generator=generator, dtype=dtype)
        lr = learning_rate(config, 3e-3, step)
        theirs.grad = gradient.clone()
        other.param_groups[0]["lr"] = lr
        other.step()
        for piece, (a, b) in zip(pieces, ((0, 1), (1, 640), (640, 1000)), strict=True):
            piece.step(gradient[a:b].clone(), lr, step + 1)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-6
    assert (mine - theirs.detach()).abs().max() <= tolerance * theirs.abs().max()


def test_bfloat16_parameters_follow_float32_masters():
    """A hundred steps, each far below bfloat16's resolution, must add up; without masters they would vanish."""
    config = OptimizerConfig(lr=1e-4, weight_decay=0.0, decay="constant")
    parameter = torch.full((4,), 1.0, dtype=torch.bfloat16)
    optimizer = adamw(parameter, torch.float32, config, decays=False)
    for step in range(100):
        optimizer.step(torch.ones(4), 1e-4, step + 1)
    assert torch.allclose(optimizer.master, torch.full((4,), 0.99), atol=1e-4)
    assert torch.equal(parameter, optimizer.master.to(torch.bfloat16)) and parameter[0] != 1.0


def test_learning_rate_warms_up_and_decays():
    config = OptimizerConfig(warmup=4, steps=14, min_lr_ratio=0.1)
    assert [learning_rate(config, 1.0, step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(config, 1.0, 4) == 1.0 and learning_rate(config, 1.0, 14) == pytest.approx(0.1)
    assert learning_rate(config, 1.0, 9) == pytest.approx(0.55)
    linear = dataclasses.replace(config, decay="linear")
    assert learning_rate(linear, 1.0, 6) == pytest.approx(0.1 + 0.9 * 0.8)
    assert learning_rate(dataclasses.replace(config, decay="constant"), 1.0, 13) == 1.0


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("lr", 0.0, "--lr"),
        ("options", {"beta2": 1.0}, "--optimizer-option beta2"),
        ("decay", "step", "--decay"),
        ("min_lr_ratio", 2.0, "--min-lr-ratio"),
    ],
)
def test_an_impossible_optimizer_is_refused_by_name(field, value, option):
    with pytest.raises(RunError, match=option) as error:
        config = check_config(dataclasses.replace(OptimizerConfig(), **{field: value}))
        optimizer_options(config, find_optimizer("adamw"))
    shown = value["beta2"] if isinstance(value, dict) else value
    assert "allowed:" in error.value.full_text() and str(shown) in error.value.full_text()


def entry(name: str, shape: tuple[int, ...], layer: int, **fields) -> BucketEntry:
    tensor = torch.nn.Parameter(torch.randn(shape))
    box = tuple((0, length) for length in shape)
    defaults = {"sum_over": ("replica",), "decays": len(shape) > 1, "stage": 0}
    return BucketEntry(name=name, shape=shape, box=box, tensor=tensor, layer=layer, **(defaults | fields))


def test_buckets_keep_values_come_last_layer_first_and_respect_their_size():
    entries = [
        entry(f"{layer}.{kind}", shape, layer) for layer in range(4) for kind, shape in (("w", (8, 8)), ("n", (8,)))
    ]
    values = {e.name: e.tensor.detach().clone() for e in entries}
    buckets = make_buckets(entries, torch.float32, 2 * 64 * 4, {})
    assert [[e.name for e in b.entries] for b in buckets] == [
        ["3.w", "2.w"],
        ["3.n", "2.n", "1.n", "0.n"],
        ["1.w", "0.w"],
    ]
    assert [b.first_layer for b in buckets] == [2, 0, 0]
    for bucket in buckets:
        for e in bucket.entries:
            assert torch.equal(e.tensor, values[e.name])
            assert e.tensor.untyped_storage().data_ptr() == bucket.parameters.untyped_storage().data_ptr()
            bucket.views[e.name].fill_(1.0)
        assert bucket.gradients.sum() == sum(e.tensor.numel() for e in bucket.entries)


@pytest.mark.parametrize("ways", [1, 2, 3, 5])
def test_zero_gives_every_element_to_exactly_one_rank(ways):
    owned: dict[str, list[tuple[int, int]]] = {}
    for place in range(ways):
        entries = [entry(f"{i}", (5 + i, 7), i, state_axes=("replica",)) for i in range(4)]
        for bucket in make_buckets(entries, torch.float32, 1 << 20, {(0, ("replica",)): (place, ways)}):
            assert len(bucket.parameters) % ways == 0
            for e, local, piece in bucket.owned_runs():
                owned.setdefault(e.name, []).append(local)
                assert piece[1] - piece[0] == local[1] - local[0]
                offset = bucket.offsets[bucket.entries.index(e)]
                assert bucket.owned[0] + piece[0] == offset + local[0]
    for i in range(4):
        runs = sorted(owned[f"{i}"])
        assert [a for a, _ in runs] == [0] + [b for _, b in runs[:-1]] and runs[-1][1] == (5 + i) * 7


def test_the_norm_counts_replicated_gradients_once_and_split_ones_everywhere():
    group = grid((1, 1), (1, 1))
    whole = make_buckets([entry("a", (4, 4), 0, sum_over=("replica", "shard"))], torch.float32, 1 << 20, {})[0]
    split = make_buckets([entry("b", (4, 4), 0, sum_over=("replica",))], torch.float32, 1 << 20, {})[0]
    zero = make_buckets([entry("c", (4, 4), 0, state_axes=("replica",))], torch.float32, 1 << 20, {})[0]
    other = make_buckets([entry("d", (4, 4), 0, counted=False)], torch.float32, 1 << 20, {})[0]
    assert [counts_in_norm(whole, group, d) for d in group.devices] == [True, False, False, False]
    assert [counts_in_norm(split, group, d) for d in group.devices] == [True, True, False, False]
    assert [counts_in_norm(zero, group, d) for d in group.devices] == [True, True, True, True]
    assert not any(counts_in_norm(other, group, d) for d in group.devices)


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_clipping_is_pytorchs(scale):
    pieces = [torch.randn(50, dtype=torch.float64) * scale, torch.randn(7, dtype=torch.float64) * scale]
    norm = sum_of_squares(pieces, torch.device("cpu")).sqrt()
    parameters = [torch.nn.Parameter(torch.zeros_like(piece)) for piece in pieces]
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.clone()
    theirs = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    assert norm == pytest.approx(float(theirs), rel=1e-13)
    assert torch.allclose(pieces[0] * clip_factor(norm, 1.0), parameters[0].grad, rtol=1e-12, atol=0)


NORMAL = InitialValue("normal", 0.02)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_first_values_do_not_depend_on_the_box(data):
    """Any box of a tensor of several blocks is that box of the whole."""
    shape = (3000, 700)
    whole = _WHOLE
    box = tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape)
    part = initial_value("name", shape, NORMAL, 7, box)
    assert torch.equal(part, whole[box[0][0] : box[0][1], box[1][0] : box[1][1]])


_WHOLE = initial_value("name", (3000, 700), NORMAL, 7, ((0, 3000), (0, 700)))


def test_first_values_differ_by_name_and_seed_and_have_their_deviation():
    box = ((0, 300), (0, 70))
    other = initial_value("other", (300, 70), NORMAL, 7, box)
    assert not torch.equal(initial_value("name", (300, 70), NORMAL, 7, box), other)
    assert not torch.equal(initial_value("other", (300, 70), NORMAL, 8, box), other)
    assert float(_WHOLE.std()) == pytest.approx(0.02, rel=0.01) and abs(float(_WHOLE.mean())) < 1e-4
    assert torch.equal(initial_value("n", (5,), InitialValue("ones"), 7, ((1, 4),)), torch.ones(3))
    scale = InitialValue("constant", number=0.5)
    assert torch.equal(initial_value("n", (5,), scale, 7, ((1, 4),)), torch.full((3,), 0.5))


def test_metrics_say_what_torchtitan_says(tmp_path):
    measured = MeasuredStep(step=3, loss=2.5, grad_norm=1.25, lr=1e-3, step_s=0.5, memory=(1 << 30, 1 << 32))
    work = StepWork(tokens=4000, flops=2e12, devices=2, peak=PeakFlops(flops_per_s=8e12, source="a test"))
    metrics = step_metrics(measured, work)
    assert (metrics.tps, metrics.tflops, metrics.mfu) == (4000.0, 2.0, 0.25)
    line = format_step(metrics)
    for word in (
        "step:    3",
        "loss:   2.5000",
        "grad_norm:   1.2500",
        "1.00GiB(25.0%)",
        "tps: 4,000",
        "tflops: 2",
        "mfu: 25.00%",
    ):
        assert word in line, line
    out = io.StringIO()
    log = RunLog(tmp_path, tensorboard=True, out=out)
    log.log_step(metrics)
    log.log_evaluation(3, 2.0, 0.1)
    log.close()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["loss"] == 2.5 and first["mfu"] == 0.25 and second["eval_loss"] == 2.0
    assert out.getvalue().count("\n") == 2 and list((tmp_path / "tensorboard").iterdir())


def test_the_peak_says_where_it_comes_from():
    peak = find_peak(torch.device("cpu"), "float32", 2)
    assert peak.flops_per_s > 0 and peak.source.startswith("assumed")
