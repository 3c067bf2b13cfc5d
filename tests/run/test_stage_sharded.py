"""Megatron programs over 2 and 3 gloo processes, even and uneven, against the same model on one device.

Loss and every gradient, after the sum over the shard axis that parameters in form I are owed; float64, 1e-10.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from stage_toys import assert_close, fill, plain_gradients, toy_feed, toy_layers

from pipefit.layout import Form
from pipefit.run.shard_comm import ShardContext
from pipefit.run.stage import StageLayer, StageProgram
from pipefit.shard.megatron import shard_program

pytestmark = pytest.mark.gloo

EXACT = 1e-10


def sharded_step(rank, whole, layers, shares, sequence_parallel, recompute, mode, feeds, divisor):
    """(loss, whole gradients by name) of one step on the shard axis, as this rank sees it."""
    group = dist.group.WORLD
    programs = [shard_program(layer.graph, shares, sequence_parallel) for layer in layers]
    local = [
        StageLayer(layer.name, p.graphs[rank], layer.parameters) for layer, p in zip(layers, programs, strict=True)
    ]
    shard = ShardContext(group=group, shares=shares, position=rank)
    program = StageProgram(local, recompute=recompute, dtype=torch.float64, shard=shard)
    places = {}
    for layer, sharded in zip(layers, programs, strict=True):
        for name, form in sharded.parameter_forms.items():
            sizes = [g.parameter(name).shape[form.dim] for g in sharded.graphs] if form.kind == "G" else []
            places[layer.parameters[name]] = (form, [0, *itertools.accumulate(sizes)])
    buffers = {name: torch.zeros_like(p.data) for name, p in program.parameters.items()}
    for name, parameter in program.parameters.items():
        parameter.data.copy_(part(whole[name], *places[name], rank))
    program.bind_gradients(buffers)
    program.begin_step(0, divisor)
    loss = sum(program.forward(m, 0, {}, feed)["loss"] for m, feed in enumerate(feeds))
    for m in range(len(feeds)):
        if mode == "B":
            program.backward(m, 0, {})
        else:
            program.backward_input(m, 0, {})
            program.backward_weight(m, 0)
    return loss, {name: assemble(buffer, *places[name], whole[name], rank) for name, buffer in buffers.items()}


def part(value, form: Form, stops, rank):
    return value if form.kind == "I" else value.narrow(form.dim, stops[rank], stops[rank + 1] - stops[rank])


def assemble(buffer, form: Form, stops, whole, rank):
    """The whole gradient: partial ones summed, parts put in their places."""
    full = torch.zeros_like(whole)
    part(full, form, stops, rank).copy_(buffer)
    dist.all_reduce(full)
    return full


def check_cases(rank, count, cases):
    """Every case on this rank; returns how many were checked."""
    for shares, sequence_parallel, recompute, mode, options in cases:
        layers = toy_layers(**options)
        single = StageProgram(layers, dtype=torch.float64)
        fill(single)
        feeds = [toy_feed(seed=1), toy_feed(rows=1, tokens=7, seed=2)]
        wanted_loss, wanted = plain_gradients(single, feeds, 31, tied=options.get("tied", False))
        whole = {name: p.data for name, p in single.parameters.items()}
        loss, found = sharded_step(rank, whole, layers, shares, sequence_parallel, recompute, mode, feeds, 31)
        assert abs(loss - wanted_loss) <= EXACT * abs(wanted_loss), (shares, sequence_parallel, recompute, mode)
        assert_close(found, wanted, EXACT)
    return len(cases)


def cases(*all_shares):
    ways = itertools.product(all_shares, (False, True), ("none", "selective", "full"), ("B", "IW"))
    return [(*way, {}) for way in ways] + [(all_shares[-1], sp, "none", "B", {"tied": True}) for sp in (False, True)]


def test_two_devices_even_and_uneven():
    todo = cases((1, 1), (2, 1))
    assert run_processes(check_cases, 2, todo) == [len(todo)] * 2


def test_three_devices_uneven():
    todo = cases((3, 2, 2))
    assert run_processes(check_cases, 3, todo) == [len(todo)] * 3
