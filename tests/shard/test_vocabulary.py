"""The layers whose vocabulary Megatron's programs split: a loss needs its head, and a table all of its uses."""

from __future__ import annotations

from dataclasses import replace

from tests.support.plan_toys import toy_model
from tests.support.stage_toys import (
    HIDDEN,
    LABELS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    GraphBuilder,
    block_graph,
    embed_graph,
    head_graph,
    loss_graph,
)

from pipefit.model.graph import Graph
from pipefit.model.registry import open_model
from pipefit.plan.assemble.shard_programs import ProgramCache
from pipefit.shard.vocabulary import (
    LayerUse,
    gives_logits,
    layer_vocabularies,
    split_tables,
    takes_logits,
    token_tables,
    vocabulary_graphs,
)


def chain(tied: bool = False, **graphs: Graph) -> list[LayerUse]:
    """embed, block, head and loss, with the graphs of some of them replaced."""
    chosen = {"embed": embed_graph(), "block": block_graph(), "head": head_graph(), "loss": loss_graph()} | graphs
    uses = [
        LayerUse(key, graph, {spec.name: f"{key}.{spec.name}" for spec in graph.parameters})
        for key, graph in chosen.items()
        if graph.operators
    ]
    return [
        use._replace(parameters={**use.parameters, "lm.weight": "embed.weight"}) if tied and use.key == "head" else use
        for use in uses
    ]


def test_embedding_head_and_loss_are_split():
    assert vocabulary_graphs([chain()]) == {"embed", "head", "loss"}
    assert vocabulary_graphs([chain(tied=True)]) == {"embed", "head", "loss"}
    assert not vocabulary_graphs([chain()[1:2]])


def normed_logits() -> Graph:
    """A head whose logits are normalised: split logits would need a collective."""
    builder = GraphBuilder(HIDDEN)
    logits = builder.add("linear", "x", builder.parameter("lm.weight", VOCABULARY, WIDTH), "")
    norm = builder.parameter("norm.weight", VOCABULARY)
    return builder.finish(builder.add("rms_norm", logits, norm, eps=1e-5))


def test_a_head_and_its_loss_are_split_together():
    assert vocabulary_graphs([chain(head=normed_logits())]) == {"embed"}
    assert vocabulary_graphs([chain()[:-1]]) == {"embed"}
    assert vocabulary_graphs([chain(), chain()[-1:]]) == {"embed"}, "the same loss runs elsewhere without a head"


def test_a_table_is_split_in_all_of_its_uses_or_in_none():
    assert not vocabulary_graphs([chain(tied=True, head=normed_logits())])
    assert not vocabulary_graphs([chain(tied=True)[:-1]])


def test_an_embedding_with_a_projection_is_no_head():
    builder = GraphBuilder(TOKENS)
    rows = builder.add("embedding", "tokens", builder.parameter("weight", VOCABULARY, WIDTH))
    graph = builder.finish(builder.add("linear", rows, builder.parameter("up.weight", 2 * WIDTH, WIDTH), ""))
    assert token_tables(graph) == {"weight"} and not gives_logits(graph)


def test_only_lookups_of_tokens_are_split():
    graph = embed_graph()
    positions = replace(graph.inputs[0], role="positions")
    assert not token_tables(replace(graph, inputs=(positions,)))


def test_a_loss_with_parameters_is_whole():
    """Its input may be features, not logits."""
    builder = GraphBuilder(HIDDEN, LABELS)
    logits = builder.add("linear", "x", builder.parameter("lm.weight", VOCABULARY, WIDTH), "")
    graph = builder.finish(builder.add("cross_entropy", logits, "labels", ignore_index=-100, dtype="float32"))
    assert takes_logits(loss_graph()) and not takes_logits(graph)


def test_a_device_stores_its_part_of_both_tables():
    model = open_model("llama-3-8b")
    programs, words, width, devices = ProgramCache(model), 128_256, 4096, 8
    for sharding in ("megatron", "megatron-sp"):
        counts = programs.parameter_counts(model.layers, sharding, (1,) * devices)
        norms = 65 * width
        assert counts.whole == (norms,) * devices
        assert counts.trainable == ((8_030_261_248 - norms) // devices + norms,) * devices
        tables = programs.named_parameters((model.layers[0], model.layers[-2]), sharding, (1,) * devices)
        sizes = [part.elements for part in tables.values() if part.shape == (words, width)]
        assert sizes == [(words * width // devices,) * devices] * 2


def test_a_device_stores_its_heads_of_a_fused_projection():
    """GPT-2: queries, keys and values of its heads, with their biases; a quarter of every matrix but the positions."""
    model = open_model("gpt2")
    programs, width, devices = ProgramCache(model), 768, 4
    named = programs.named_parameters((model.layers[1],), "megatron-sp", (1,) * devices)
    fused = {name: part.elements for name, part in named.items() if ".c_attn." in name}
    assert sorted(fused.values()) == [(3 * width // devices,) * devices, (3 * width * width // devices,) * devices]
    matrices = [part for part in named.values() if len(part.shape) == 2]
    assert all(part.elements[0] * devices == part.shape[0] * part.shape[1] for part in matrices)


def test_a_computed_weight_is_no_table():
    """The head multiplies its weight by a number first: what reaches the linear layer is no parameter."""
    builder = GraphBuilder(HIDDEN)
    half = builder.add("mul", builder.parameter("lm.weight", VOCABULARY, WIDTH), builder.parameter("scale", 1))
    graph = builder.finish(builder.add("linear", "x", half, ""))
    assert "lm.weight" not in split_tables(graph, split_vocabulary=True)
    assert not vocabulary_graphs([chain(tied=True, head=graph)]) - {"head", "loss"}


def test_a_vocabulary_with_too_few_words_stays_whole():
    assert layer_vocabularies(head_graph()) == layer_vocabularies(embed_graph()) == {VOCABULARY}
    assert not vocabulary_graphs([chain()], [VOCABULARY])
    model = toy_model()
    programs = ProgramCache(model)
    assert programs.vocabulary_graphs((1,) * 8) == {"embed", "head", "loss"}
    assert not programs.vocabulary_graphs((1,) * (model.graphs["embed"].parameters[0].shape[0] + 1))


def test_another_loss_than_cross_entropy_is_whole():
    """Its hidden state has features, which no operator reduces over the devices."""
    builder = GraphBuilder(HIDDEN, replace(HIDDEN, name="target", role="data"))
    loss = builder.add("squared_error", "x", "target")
    assert not takes_logits(builder.finish(loss))
