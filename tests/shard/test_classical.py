"""More classical programs that come out of the search by themselves: each test names the devices and the model."""

from __future__ import annotations

from dataclasses import replace

from tests.shard.test_chain import setting
from tests.support.random_clusters import model_of
from tests.support.stage_toys import HIDDEN, LABELS, TOKENS, WIDTH, GraphBuilder, block_graph

from pipefit.model.graph import TensorSpec
from pipefit.run.stage.program import StageLayer
from pipefit.shard.chain import ChainSearch
from pipefit.shard.recipe import write_program

WORDS = 4096


def with_vocabulary(words):
    """A block between an embedding, a head and a loss over so many words."""
    embed = GraphBuilder(TOKENS)
    embed = embed.finish(embed.add("embedding", "tokens", embed.parameter("weight", words, WIDTH)))
    head = GraphBuilder(HIDDEN)
    head = head.finish(head.linear(head.add("rms_norm", "x", head.parameter("norm", WIDTH), eps=1e-5), "lm", words))
    loss = GraphBuilder(TensorSpec(name="x", shape=("B", "T", words)), LABELS)
    loss = loss.finish(loss.add("cross_entropy", "x", "labels", ignore_index=-100))
    graphs = {"embed": embed, "layers.0": block_graph(), "head": head, "loss": loss}
    return [StageLayer(name, g, {p.name: f"{name}.{p.name}" for p in g.parameters}) for name, g in graphs.items()]


def programs_of(layers, where, shares=None):
    """The program of every layer."""
    model, shares = model_of(layers), shares or (1,) * len(where.kinds)
    links = ChainSearch(model, where).search_programs(model.layers, shares)
    return {
        layer.name: write_program(model.layer_graph(layer), shares, link.layer_recipe)
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


def test_one_row_and_many_microbatches_make_context_parallelism():
    """Two devices, one row, gradients reduced once in a thousand microbatches: everything is split by tokens, and only
    keys and values are gathered (half as many as queries here). In longer rows attention is split by heads: by tokens,
    the last device sees most keys."""
    programs = [
        programs_of(with_vocabulary(64), setting(rows=1, tokens=tokens, bytes_per_s=1e8, microbatches=1000))["layers.0"]
        for tokens in (64, 256)
    ]
    assert [program.graphs[0].find_tensor("t9").shape for program in programs] == [("B", "S", 6, 4), ("B", "T", 4, 4)]
    program = programs[0]
    assert {str(form) for form in program.parameter_forms.values()} == {"I"}
    assert str(program.input_form) == str(program.output_form) == "G1"
    operators = program.graphs[1].operators
    place, attention = next((i, each) for i, each in enumerate(operators) if each.kind == "attention")
    gathered = [each.outputs[0] for each in operators[:place] if each.kind == "all_gather"]
    assert [name.partition(".")[0] for name in attention.inputs[1:]] == [name.partition(".")[0] for name in gathered]
    assert set(gathered) == set(attention.inputs[1:])
    assert not [each.kind for each in operators[place:] if each.kind in ("all_gather", "reduce_scatter", "all_reduce")]


EXPERTS, INNER = 12, 64


def with_experts():
    """Two equal layers: a norm, twelve experts of which a token uses two, and the residual sum."""
    b = GraphBuilder(HIDDEN)
    n = b.add("rms_norm", "x", b.parameter("norm", WIDTH), eps=1e-5)
    weights = (
        b.parameter("router", EXPERTS, WIDTH),
        b.parameter("gate_up", EXPERTS, 2 * INNER, WIDTH),
        b.parameter("down", EXPERTS, WIDTH, INNER),
    )
    y = b.add("moe", n, *weights, experts=EXPERTS, top_k=2, normalize=True, activation="silu")
    graph = b.finish(b.add("add", "x", y))
    first, _, *last = with_vocabulary(64)
    return [first, *(StageLayer(f"layers.{i}", graph, {p.name: f"layers.{i}.{p.name}" for p in graph.parameters})
                     for i in range(2)), *last]  # fmt: skip


def exchanging(where):
    """The same devices, whose all-to-all sends every part straight: (n - 1) / n^2 of all bytes leave a device."""
    count, plain = len(where.kinds), where.collective
    return replace(where, collective=lambda kind, size, *_: plain(kind, size / count if kind == "all_to_all" else size))


def test_many_experts_make_expert_parallelism():
    """Four devices, twelve experts, two microbatches: rows split, as in data parallelism, each device with three
    experts, and tokens sent to their experts and back. With many microbatches reducing the experts' gradients is
    cheaper."""
    where = exchanging(setting(shards=4, rows=8, tokens=8, bytes_per_s=1e8, latency_s=0.0, microbatches=2))
    for shares in ((1, 1, 1, 1), (2, 1, 1, 2)):
        program = programs_of(with_experts(), where, shares)["layers.0"]
        assert [str(program.parameter_forms[name]) for name in ("router", "gate_up", "down")] == ["I", "G0", "G0"]
        assert "moe_shard" in [operator.kind for operator in program.graphs[0].operators]
        assert str(program.input_form) == str(program.output_form) == "G0"
        assert [graph.find_parameter("down").shape[0] for graph in program.graphs] == [
            12 * s // sum(shares) for s in shares
        ]
    program = programs_of(with_experts(), replace(where, microbatches=1000))["layers.0"]
    assert [str(program.parameter_forms[name]) for name in ("router", "gate_up", "down")] == ["I", "I", "I"]


def test_few_devices_gather_tokens_for_their_experts():
    """Two devices and two experts a token: gathering all tokens and scattering the sums moves as little as sending them
    to their experts, and takes half as many steps where latency counts."""
    where = exchanging(setting(shards=2, rows=1, tokens=8, bytes_per_s=1e7, latency_s=1e-3, microbatches=1))
    program = programs_of(with_experts(), where)["layers.0"]
    assert [str(program.parameter_forms[name]) for name in ("gate_up", "down")] == ["G0", "G0"]
    kinds = [operator.kind for operator in program.graphs[0].operators]
    assert "moe" in kinds and "moe_shard" not in kinds
    assert [graph.operators[kinds.index("moe")].attributes["first"] for graph in program.graphs] == [0, 6]
