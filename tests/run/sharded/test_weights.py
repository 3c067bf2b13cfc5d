"""Parameters that several operators of a layer read, stored split and gathered by each that multiplies by them, once
for all others: loss and gradients of one device, over 2 and 3 gloo processes, and the prices of what is gathered."""

from __future__ import annotations

import pytest
import torch
from tests.run.sharded.test_megatron import programs_step
from tests.shard.test_chain import setting
from tests.support.processes import run_processes
from tests.support.random_clusters import model_of
from tests.support.stage_toys import HIDDEN, WIDTH, GraphBuilder, assert_close, fill, toy_feed, toy_layers

from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.shard.chain import ChainSearch
from pipefit.shard.recipe import parse_recipe, write_program

EXACT = 1e-10


def layers():
    """A layer that multiplies by one matrix three times and scales by one vector twice."""
    b = GraphBuilder(HIDDEN)
    scale, weight = b.parameter("scale", WIDTH), b.parameter("w.weight", WIDTH, WIDTH)
    t = b.add("linear", b.add("rms_norm", "x", scale, eps=1e-5), weight, "")
    t = b.add("linear", b.add("silu", t), weight, "")
    t = b.add("linear", b.add("rms_norm", t, scale, eps=1e-5), weight, "")
    graph = b.finish(b.add("add", "x", t))
    first, *_, head, loss = toy_layers(0)
    return [first, StageLayer("mid", graph, {p.name: f"mid.{p.name}" for p in graph.parameters}), head, loss]


GATHERED = (
    "I>G0 tokens:I>G0 d0",
    "G0>G0 scale:G0>I d0 w.weight:G0>I d0 d0 w.weight:G0>I d0 d0 w.weight:G0>I d0 d0",
    "G0>G0 d0 d0",
    "G0>I labels:I>G0 d0",
)
MIXED = (
    "I>G0 tokens:I>G0 d0",
    "G0>G0 scale:G0>I d0 w.weight:G0>I d0 d0 t2:G0>I out t3:G2>G0 d0 w.weight:G0>I d0 d0",
    "G0>G0 d0 d0",
    "G0>I labels:I>G0 d0",
)
"""The second product is split by columns, which are stored so."""


def check(group, rank, cases):
    """Every case on this rank."""
    chain = layers()
    single = StageProgram(chain, StageSetup(dtype=torch.float64))
    for shares, recompute, mode, recipes in cases:
        wanted = fill(single)
        single.begin_step(0, 31)
        feeds = [toy_feed(6, 10, seed=1), toy_feed(6, 7, seed=2)]
        wanted_loss = sum(single.forward(m, 0, {}, feed)["loss"] for m, feed in enumerate(feeds))
        for m in range(len(feeds)):
            single.backward(m, 0, {})
        programs = [
            write_program(one.graph, shares, parse_recipe(text)) for one, text in zip(chain, recipes, strict=True)
        ]
        whole = {name: p.data for name, p in single.parameters.items()}
        loss, found = programs_step(group, rank, whole, chain, programs, recompute, mode, feeds, 31)
        assert abs(loss - wanted_loss) <= EXACT * abs(wanted_loss)
        assert_close(found, wanted, EXACT)
    return len(cases)


@pytest.mark.gloo
@pytest.mark.parametrize("shares", [(2, 1), (3, 1, 2)])
def test_gathered_by_each_reader(shares):
    ways = ("none", "B"), ("selective", "IW"), ("full", "B")
    todo = [(shares, *way, recipes) for recipes in (GATHERED, MIXED) for way in ways]
    assert run_processes(check, len(shares), todo) == [len(todo)] * len(shares)


def test_every_gather_is_paid_once():
    """Memory is scarce: the matrix is stored split. Its price is that of three times two gathers and three reductions,
    the vector's one of each."""
    where = setting(bytes_per_s=1e8, latency_s=0.0, microbatches=4, rows=8, tokens=8)
    model = model_of(layers())
    chains = ChainSearch(model, where, byte_price_s=1e-3)
    links = chains.search_programs(model.layers, (1, 1))
    link = links[1]
    words = [word for word in link.layer_recipe.recipe_text.split() if word.startswith(("w.weight:", "scale:"))]
    matrix = [word for word in words if word.startswith("w.weight:")]
    assert matrix == ["w.weight:G0>I"] * 3 or matrix == ["w.weight:G1>I"] * 3
    moves = [(v, s, t) for each in link.choice.before for v, s, t in each if link.layer.values[v] == "w.weight"]
    conversions = [link.layer.template.conversion_costs[v][s, t] for v, s, t in moves]
    size = WIDTH * WIDTH * 4.0
    once = 2 * where.collective("all_gather", size) + where.collective("reduce_scatter", size)
    assert [sum(conversion.line) for conversion in conversions] == pytest.approx([once] * 3)
    program = write_program(model.layer_graph(model.layers[1]), (1, 1), link.layer_recipe)
    kinds = [each.inputs[0] for each in program.graphs[0].operators if each.kind == "unshard"]
    assert kinds.count("w.weight") == 3 and kinds.count("scale") <= 1
