"""Megatron programs over 2 and 3 gloo processes, even and uneven, against the same model on one device.

Loss and every gradient, after the sum over the shard axis that parameters in form I are owed; float64, 1e-10.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from tests.support.processes import run_processes
from tests.support.stage_toys import assert_close, cut_feed, fill, plain_gradients, toy_feed, toy_layers
from tests.support.variants import VARIANTS

from pipefit.layout import TensorForm
from pipefit.model.capture.layers import capture_family
from pipefit.model.ops.linear_factors import reduced_nowhere
from pipefit.model.registry import describe_config
from pipefit.run.sharded.collectives import ShardContext
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.shard.megatron import shard_program
from pipefit.shard.vocabulary import LayerUse, vocabulary_graphs

pytestmark = pytest.mark.gloo

EXACT = 1e-10


def sharded_step(group, rank, whole, layers, shares, sequence_parallel, recompute, mode, feeds, divisor, **options):
    """`programs_step` of Megatron's programs."""
    uses = [LayerUse(layer.graph.hash, layer.graph, layer.parameters) for layer in layers]
    split = vocabulary_graphs([uses])
    assert {uses[0].key, uses[-2].key, uses[-1].key} <= split, "embedding, head and loss"
    programs = [shard_program(layer.graph, shares, sequence_parallel, layer.graph.hash in split) for layer in layers]
    return programs_step(group, rank, whole, layers, programs, recompute, mode, feeds, divisor, **options)


def programs_step(group, rank, whole, layers, programs, recompute, mode, feeds, divisor, lengths=None, backend=None):
    """(loss, whole gradients by name) of one step on the shard axis, as this rank sees it."""
    shares = programs[0].shares
    local = [
        StageLayer(layer.name, p.graphs[rank], layer.parameters, p.shares)
        for layer, p in zip(layers, programs, strict=True)
    ]
    shard = ShardContext(group=group, shares=shares, position=rank)
    slices = len(lengths) if lengths else 1
    program = StageProgram(
        local, StageSetup(recompute=recompute, dtype=torch.float64, shard=shard, slices=slices, backend=backend)
    )
    places = {}
    for layer, sharded in zip(layers, programs, strict=True):
        for name, form in sharded.parameter_forms.items():
            sizes = [g.find_parameter(name).shape[form.dim] for g in sharded.graphs] if form.kind == "G" else []
            places[layer.parameters[name]] = (form, [0, *itertools.accumulate(sizes)])
    buffers = {name: torch.zeros_like(p.data) for name, p in program.parameters.items()}
    for name, parameter in program.parameters.items():
        parameter.data.copy_(part(whole[name], *places[name], rank))
    program.bind_gradients(buffers)
    program.begin_step(0, divisor)
    loss = 0
    for m, feed in enumerate(feeds):
        stops = [0, *itertools.accumulate(lengths or [feed.tokens.shape[1]])]
        for piece, (start, stop) in enumerate(itertools.pairwise(stops)):
            loss = loss + program.forward(m, piece, {}, cut_feed(feed, start, stop))["loss"]
    for m, piece in itertools.product(range(len(feeds)), reversed(range(slices))):
        if mode == "B":
            program.backward(m, piece, {})
        else:
            program.backward_input(m, piece, {})
            program.backward_weight(m, piece)
    stops = [0, *itertools.accumulate(lengths or [feeds[0].tokens.shape[1]])]
    for piece, (start, stop) in enumerate(itertools.pairwise(stops)):  # the same collectives on every device
        program.evaluate_slice(0, piece, {}, cut_feed(feeds[0], start, stop))
    assert not program._records and not program._past
    alike = {layer.parameters[name] for layer, p in zip(layers, programs, strict=True)
             for name in reduced_nowhere(p.graphs[rank])}  # fmt: skip
    return loss, {
        name: buffer if name in alike else assemble(buffer, *places[name], whole[name], group, rank)
        for name, buffer in buffers.items()
    }


def part(value, form: TensorForm, stops, rank):
    return value if form.kind == "I" else value.narrow(form.dim, stops[rank], stops[rank + 1] - stops[rank])


def assemble(buffer, form: TensorForm, stops, whole, group, rank):
    """The whole gradient: partial ones summed, parts put in their places."""
    full = torch.zeros_like(whole)
    part(full, form, stops, rank).copy_(buffer)
    dist.all_reduce(full, group=group)
    return full


def check_cases(group, rank, cases):
    """Every case on this rank; returns how many were checked."""
    for shares, sequence_parallel, recompute, mode, options in cases:
        layers = toy_layers(**options)
        single = StageProgram(layers, StageSetup(dtype=torch.float64))
        fill(single)
        feeds = [toy_feed(seed=1), toy_feed(rows=1, tokens=7, seed=2)]
        wanted_loss, wanted = plain_gradients(single, feeds, 31, tied=options.get("tied", False))
        whole = {name: p.data for name, p in single.parameters.items()}
        loss, found = sharded_step(group, rank, whole, layers, shares, sequence_parallel, recompute, mode, feeds, 31)
        assert abs(loss - wanted_loss) <= EXACT * abs(wanted_loss), (shares, sequence_parallel, recompute, mode)
        assert_close(found, wanted, EXACT)
    return len(cases)


def cases(all_shares, recomputes=("none", "selective", "full"), modes=("B", "IW")):
    ways = list(itertools.product(all_shares, (False, True), recomputes, modes))
    return [(*way, {}) for way in ways] + [(all_shares[-1], sp, "none", "B", {"tied": True}) for sp in (False, True)]


def test_two_devices_even_and_uneven():
    todo = cases([(2, 1)]) + cases([(1, 1)], ("none",), ("IW",))
    assert run_processes(check_cases, 2, todo) == [len(todo)] * 2


def test_three_devices_uneven():
    todo = cases([(3, 2, 2)], ("selective",), ("IW",))
    assert run_processes(check_cases, 3, todo) == [len(todo)] * 3


def check_slices(group, rank, shares):
    """Slices on a shard axis, one of them shorter than the axis."""
    layers = toy_layers(window=5)
    single = StageProgram(layers, StageSetup(dtype=torch.float64))
    fill(single)
    feeds = [toy_feed(2, 10, seed=3)]
    _, wanted = plain_gradients(single, feeds, 13, window=5)
    whole = {name: p.data for name, p in single.parameters.items()}
    for sequence_parallel, recompute in ((False, "selective"), (True, "full")):
        lengths = (5, 4, 1)
        _, found = sharded_step(
            group, rank, whole, layers, shares, sequence_parallel, recompute, "IW", feeds, 13, lengths=lengths
        )
        assert_close(found, wanted, EXACT)


def test_slices_on_uneven_shards():
    run_processes(check_slices, 2, (2, 1))


def check_compiled(group, rank, shares):
    """Pointwise regions are compiled, gathers between them are not."""
    layers, feeds = toy_layers(), [toy_feed(seed=1)]
    single = StageProgram(layers, StageSetup(dtype=torch.float64))
    fill(single)
    _, wanted = plain_gradients(single, feeds, 13)
    whole = {name: p.data for name, p in single.parameters.items()}
    step = (group, rank, whole, layers, shares, True, "selective", "IW", feeds, 13)
    assert_close(sharded_step(*step, backend="aot_eager")[1], wanted, EXACT)


def test_compiled_regions_beside_gathers():
    run_processes(check_compiled, 2, (2, 1))


def check_dropout(group, rank, shares):
    """Heads and tokens split or not, a dropped element is the same element."""
    layers = toy_layers(dropout=0.4)
    single = StageProgram(layers, StageSetup(dtype=torch.float64))
    wanted = fill(single)
    feeds = [toy_feed(2, 10, seed=3)]
    single.begin_step(0, 13)
    single.forward(0, 0, {}, feeds[0])
    single.backward(0, 0, {})
    whole = {name: p.data for name, p in single.parameters.items()}
    for sequence_parallel in (False, True):
        _, found = sharded_step(group, rank, whole, layers, shares, sequence_parallel, "selective", "B", feeds, 13)
        assert_close(found, wanted, EXACT)


def test_dropout_on_uneven_shards():
    run_processes(check_dropout, 2, (2, 1))


def check_families(group, rank, captured):
    """Every captured family on the shard axis against its own unsharded stage."""
    for name, model in captured.items():
        layers = [StageLayer(layer.name, model.layer_graph(layer), layer.parameters) for layer in model.layers]
        feeds = [toy_feed(2, 9, seed=4)]
        single = StageProgram(layers, StageSetup(dtype=torch.float64))
        wanted = fill(single)
        single.begin_step(0, 13)
        wanted_loss = single.forward(0, 0, {}, feeds[0])["loss"]
        single.backward(0, 0, {})
        whole = {name: p.data for name, p in single.parameters.items()}
        ways = [((1, 1), False, "IW"), ((1, 1), True, "B")]
        if name == "gpt2":
            ways.append(((3, 1), True, "IW"))
        for shares, sequence_parallel, mode in ways:
            loss, found = sharded_step(
                group, rank, whole, layers, shares, sequence_parallel, "selective", mode, feeds, 13
            )
            assert abs(loss - wanted_loss) <= EXACT * abs(wanted_loss), name
            assert_close(found, wanted, EXACT)


@pytest.mark.parametrize(
    "names",
    [
        ("llama-biases", "qwen3", "gpt2", "mixtral"),
        pytest.param(("llama3", "llama-tied", "mistral-window", "qwen2", "qwen3-moe-dense"), marks=pytest.mark.slow),
    ],
)
def test_every_family_is_split(names):
    described = {name: describe_config(VARIANTS[name], name, name) for name in names}
    run_processes(check_families, 2, {name: capture_family(d.family, d.config) for name, d in described.items()})
