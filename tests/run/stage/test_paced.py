"""Sharded stages at the pace of an emulated device: it knows beforehand how many collectives each action does."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from tests.support.lab_toys import lab_path, toy_lab
from tests.support.processes import run_processes
from tests.support.stage_toys import fill, toy_feed, toy_layers

from pipefit.lab import pace
from pipefit.lab.tables import DeviceTable
from pipefit.run.sharded.collectives import ShardContext
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.run.stage.sharded_layers import ShardedLayers
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
    stage = pace.pace_program(StageProgram(local, StageSetup(recompute=recompute, dtype=torch.float64, shard=shard)))
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


class CountedLayers(ShardedLayers):
    """Notes when each layer has ended, on the emulated device's time."""

    def __init__(self) -> None:
        super().__init__([])
        self.ends: list[tuple[int, float]] = []

    def leave_layer(self, index: int) -> None:
        super().leave_layer(index)
        self.ends.append((index, time.perf_counter()))


def test_sharded_layers_reach_the_stage_and_end_at_the_pace_of_the_device(tmp_path, monkeypatch):
    """Attributes of the wrapper are not seen inside; every layer communicates only once the device has done it."""
    slow = DeviceTable(flops_per_s=1e12, memory_bytes_per_s=1e12, layer_s=5e-3, action_s=1e-3, jitter=0.0)
    monkeypatch.setenv("PIPEFIT_LAB", str(lab_path(tmp_path, toy_lab(devices={"slow": slow}))))
    monkeypatch.setenv("PIPEFIT_DEVICE_KIND", "slow")
    layers = toy_layers()
    stage, sharded = pace.pace_program(StageProgram(layers, StageSetup(dtype=torch.float64))), CountedLayers()
    assert isinstance(stage, pace.PacedStage)
    fill(stage)
    stage.bind_sharded_layers(sharded)
    stage.bind_gradients({name: torch.zeros_like(p.data) for name, p in stage.parameters.items()})
    assert stage._program._sharded is sharded
    announced: list[int] = []
    for step, parted in itertools.product(range(2), (False, True)):
        stage.begin_step(step, 31)
        for kind in ("F", "I", "W") if parted else ("F", "B"):
            # The device subtracts its last late wake-up: an action begins that much earlier on it.
            sharded.ends, start = [], time.perf_counter() - stage._device._debt_s
            stage.on_layer_gradients = announced.append if kind in "BW" else None
            if kind == "F":
                stage.forward(0, 0, {}, toy_feed(seed=1))
            elif kind == "W":
                stage.backward_weight(0, 0)
            else:
                (stage.backward if kind == "B" else stage.backward_input)(0, 0, {})
            order = [index for index, _ in sharded.ends]
            assert order == sorted(range(len(layers)), reverse=kind != "F")
            if kind == "F":
                sizes = dict(stage._sizes[0, 0])
            times = stage._layer_times(kind, sizes)
            due = start
            for index, end in sharded.ends:
                due += times[index]
                assert end >= due, (kind, index)
            assert sharded.on_layer_end is None
    assert announced == list(reversed(range(len(layers)))) * 4
