"""More classical programs that come out of the search by themselves: each test names the devices and the model."""

from __future__ import annotations

from tests.run.stage_toys import HIDDEN, LABELS, TOKENS, WIDTH, GraphBuilder, block_graph
from tests.shard.random_clusters import model_of
from tests.shard.test_chain import setting

from pipefit.model.graph import Tensor
from pipefit.run.stage import StageLayer
from pipefit.shard.chain import Chains
from pipefit.shard.recipe import write

WORDS = 4096


def with_vocabulary(words):
    """A block between an embedding, a head and a loss over so many words."""
    embed = GraphBuilder(TOKENS)
    embed = embed.finish(embed.add("embedding", "tokens", embed.parameter("weight", words, WIDTH)))
    head = GraphBuilder(HIDDEN)
    head = head.finish(head.linear(head.add("rms_norm", "x", head.parameter("norm", WIDTH), eps=1e-5), "lm", words))
    loss = GraphBuilder(Tensor(name="x", shape=("B", "T", words)), LABELS)
    loss = loss.finish(loss.add("cross_entropy", "x", "labels", ignore_index=-100))
    graphs = {"embed": embed, "layers.0": block_graph(), "head": head, "loss": loss}
    return [StageLayer(name, g, {p.name: f"{name}.{p.name}" for p in g.parameters}) for name, g in graphs.items()]


def programs_of(layers, where, shares=None):
    """The program of every layer."""
    model, shares = model_of(layers), shares or (1,) * len(where.kinds)
    links = Chains(model, where).search(model.layers, shares)
    return {
        layer.name: write(model.layer_graph(layer), shares, link.recipe)
        for layer, link in zip(model.layers, links, strict=True)
    }


def test_a_large_vocabulary_makes_the_loss_vocabulary_parallel():
    """Two devices, one row of few tokens, a vocabulary 170 times as large as the hidden state: the head's weight is
    split by words, logits stay where they are, and the loss reduces two numbers a token."""
    where = setting(rows=1, tokens=8, bytes_per_s=1e7, latency_s=0.0)
    programs = programs_of(with_vocabulary(WORDS), where, (2, 1))
    head, loss = programs["head"], programs["loss"]
    assert str(head.parameter_forms["lm.weight"]) == "G0"
    assert (str(head.output_form), str(loss.input_form)) == ("G2", "G2")
    assert [operator.kind for operator in loss.graphs[0].operators] == ["cross_entropy_shard", "all_reduce"]
    assert [graph.operators[0].attributes["first"] for graph in loss.graphs] == [0, 2731]
    where = setting(rows=8, tokens=64, bytes_per_s=1e7, latency_s=1e-4, microbatches=99)
    small = programs_of(with_vocabulary(6), where)
    assert "cross_entropy" in [operator.kind for operator in small["loss"].graphs[0].operators]
