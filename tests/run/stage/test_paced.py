"""Sharded stages at the pace of an emulated device: it knows beforehand how many collectives each action does."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.support.lab_toys import lab_path, toy_lab
from tests.support.processes import run_processes
from tests.support.stage_toys import fill, toy_feed, toy_layers

from pipefit.lab import pace
from pipefit.lab.tables import DeviceTable
from pipefit.run.sharded.collectives import ShardContext
from pipefit.run.stage.program import StageLayer, StageProgram
from pipefit.shard.megatron import shard_program

pytestmark = pytest.mark.gloo

FAST = DeviceTable(flops_per_s=1e12, memory_bytes_per_s=1e12, layer_s=0.0, action_s=1e-3, jitter=0.0)


def arrivals(group, rank, path, cases):
    """Of every case: action -> when the device came to each collective of its second round, after it began."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LAB", path), ("DEVICE_KIND", "slow"), ("LAB_DEVICE", str(rank))):
            patch.setenv(f"PIPEFIT_{name}", value)
        return [_arrivals(group, rank, *case) for case in cases]


def _arrivals(group, rank, sequence_parallel, recompute):
    layers = toy_layers()
    programs = [shard_program(layer.graph, (1, 1), sequence_parallel) for layer in layers]
    local = [
        StageLayer(layer.name, program.graphs[rank], layer.parameters, program.shares)
        for layer, program in zip(layers, programs, strict=True)
    ]
    shard = ShardContext(group=group, shares=(1, 1), position=rank)
    stage = pace.pace_program(StageProgram(local, recompute=recompute, dtype=torch.float64, shard=shard))
    fill(stage)
    stage.bind_gradients({name: torch.zeros_like(p.data) for name, p in stage.parameters.items()})
    for step, parted in itertools.product(range(2), (False, True)):
        stage.begin_step(step, 31)
        stage.forward(0, 0, {}, toy_feed(seed=1))
        if parted:
            stage.backward_input(0, 0, {})
            stage.backward_weight(0, 0)
        else:
            stage.backward(0, 0, {})
    return {key[0]: found for key, found in stage._arrivals.items()}


def test_an_emulated_device_knows_its_collectives_beforehand(tmp_path):
    """Where it did not, it would wait for none of them from then on (`PacedStage._collective_times`)."""
    cases = list(itertools.product((False, True), ("none", "selective", "full")))
    path = str(lab_path(tmp_path, toy_lab(devices={"slow": FAST})))
    for everyone in run_processes(arrivals, 2, path, cases):
        for (sequence_parallel, recompute), found in zip(cases, everyone, strict=True):
            assert all(found[kind] for kind in "FBI"), (sequence_parallel, recompute)
            assert not found["W"], "Megatron's have none there"
            assert len(found["B"]) == len(found["I"])
            again = recompute == "full"
            assert (len(found["I"]) > len(found["F"])) >= again, (sequence_parallel, recompute)
