"""The simulator's price of a collective over uneven shares: everyone sends as much as the longest part."""

from __future__ import annotations

import pytest

from pipefit.cluster import parse_spec
from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.roofline import RooflineCosts
from pipefit.cost.pipeline.table import stage_cost
from pipefit.cost.work import ParameterCounts, PipelineWork, StageWork
from pipefit.layout import Mesh, MeshAxis
from pipefit.model.graph import Graph, Operator, TensorSpec


def gathering(shares) -> StageWork:
    """A stage that gathers one tensor of 8 x 40 x 64 numbers, split along its tokens, and does nothing else."""
    graph = Graph(
        inputs=(TensorSpec(name="x", shape=("B", "S", 64)),),
        outputs=("y",),
        operators=(Operator(kind="all_gather", inputs=("x",), outputs=("y",), attributes={"dim": 1, "size": "T"}),),
        parameters=(),
        tensors=(TensorSpec(name="y", shape=("B", "T", 64)),),
    )
    nothing = ParameterCounts(trainable=(0,) * len(shares), frozen=(0,) * len(shares), whole=(0,) * len(shares))
    return StageWork(
        lane=0,
        group=Mesh(axes=(MeshAxis(name="shard", shares=shares),), devices=tuple(range(len(shares)))),
        layers=((graph,) * len(shares),),
        rows=(8,),
        slices=(40,),
        recompute="none",
        parameters=nothing,
        sharded_state="none",
    )


@pytest.mark.parametrize(("shares", "padding"), [((1, 1), 1.0), ((3, 1), 1.5), ((3, 1, 1), 1.8)])
def test_uneven_parts_are_padded_to_the_longest(shares, padding):
    network = Network(parse_spec("4xA100-80"))
    stage = gathering(shares)
    work = PipelineWork(stages=(stage,), edges=(), precision="float32")
    found = stage_cost(stage, 40, 0, work, network, RooflineCosts())
    rings, size = [range(len(shares))], 8 * 40 * 64 * 4 * padding
    assert found.forward_s == pytest.approx(all_gather_s(network, rings, size))
    assert found.input_s == pytest.approx(reduce_scatter_s(network, rings, size))
    assert all_reduce_s(network, rings, size) > found.forward_s
