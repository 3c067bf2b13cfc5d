"""Searched programs over 2 and 3 gloo processes with uneven shares, against the same model on one device.

Prices are drawn at random, so that the search takes one way after another that the rules allow: rows, tokens, heads,
columns and features split, partial sums that pass through sums, conversions over a third form and from one split to
another, every lowering of uneven parts. Loss and every gradient in float64, 1e-10.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from tests.run.sharded.test_megatron import programs_step
from tests.support.processes import run_processes
from tests.support.random_clusters import model_of, random_setting
from tests.support.stage_toys import (
    HIDDEN,
    WIDTH,
    GraphBuilder,
    assert_close,
    fill,
    plain_gradients,
    toy_feed,
    toy_layers,
)

from pipefit.cost.comm.lowerings import LOWERINGS, LoweredCollective, PortLoads
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.shard.chain import ChainSearch
from pipefit.shard.recipe import parse_recipe, write_program

pytestmark = pytest.mark.gloo

EXACT = 1e-10


class RandomPrices(ChainSearch):
    """A search where every way and every conversion costs what is drawn for it."""

    def layer_template(self, graph, takes, pinned):
        layer = super().layer_template(graph, takes, pinned)
        draw = random.Random(f"{self.seed} {graph.hash} {takes}")

        def drawn(one):
            if one is None:
                return None
            ahead, back = ((draw.choice(each),) if each else () for each in (one.ahead, one.back))
            return replace(one, line=(draw.random() * self.conversion_s, 0.0), ahead=ahead, back=back)

        steps = tuple(
            replace(
                step,
                ways=tuple(
                    replace(
                        way,
                        passes=(),
                        once_s=draw.random() * (0.1 if 1 in way.needs else 1.0) + (way.cut < 0 and 1 not in way.needs),
                        reduction=drawn(way.reduction),
                    )
                    for way in step.ways
                ),
            )
            for step in layer.template.steps
        )
        conversions = tuple(
            {move: drawn(conversion) for move, conversion in each.items()} for each in layer.template.conversion_costs
        )
        return replace(layer, template=replace(layer.template, steps=steps, conversion_costs=conversions))


def random_recipes(layers, shares, seed, rows, tokens, conversion_s):
    """The text of a recipe for every layer."""
    kind = random_setting(0).kinds[0]
    free = tuple(LoweredCollective(name, 0.0, 0.0, PortLoads()) for name in LOWERINGS)
    setting = replace(
        random_setting(0), kinds=(kind,) * len(shares), rows=rows, tokens=tokens, lowered=lambda kind, size: free
    )
    model = model_of(layers)
    search = RandomPrices(model, setting)
    search.seed, search.conversion_s = seed, conversion_s
    return [link.layer_recipe.recipe_text for link in search.search_programs(model.layers, shares)]


def layers_of(options):
    """The toy model, or one with a mixture of so many experts in the place of its MLPs."""
    if "experts" not in options:
        return toy_layers(**options)
    builder = GraphBuilder(HIDDEN)
    n = builder.add("rms_norm", "x", builder.parameter("norm.weight", WIDTH), eps=1e-5)
    experts = options["experts"]
    if "form" in options:
        y = add_selected_experts(builder, n, experts, options["form"])
        return replace_blocks(builder.finish(builder.add("add", "x", y)))
    weights = [builder.parameter(f"{name}.weight", *shape) for name, shape in (
        ("router", (experts, WIDTH)), ("gate_up", (experts, 2 * 16, WIDTH)), ("down", (experts, WIDTH, 16)),
    )]  # fmt: skip
    y = builder.add("moe", n, *weights, experts=experts, top_k=2, normalize=True, activation="silu")
    return replace_blocks(builder.finish(builder.add("add", "x", y)))


def replace_blocks(graph):
    """The toy model with this graph in the place of its blocks."""
    first, *_, head, loss = toy_layers(0)
    middle = [
        StageLayer(f"layers.{i}", graph, {p.name: f"layers.{i}.{p.name}" for p in graph.parameters}) for i in (0, 1)
    ]
    return [first, *middle, head, loss]


def add_selected_experts(builder, x, experts, form):
    """Experts of a router of the model's own: rows of matrices as in DBRX, or with scaled inputs as in Llama 4."""
    logits = builder.add("linear", x, builder.parameter("router.weight", experts, WIDTH), "")
    scores, top = builder.add("softmax", logits, dim=2), []
    for result, dtype in enumerate(("compute", "int64")):
        fixed = {"target": "aten.topk.default", "arguments": [{"input": 0}, 2], "keywords": {}}
        top.append(builder.add("aten", scores, **fixed, result=result, shape=["B", "T", 2], dtype=dtype))
    common = {"experts": experts, "gated": True, "activation": "silu"}
    if form == "inputs":
        up, down = (builder.parameter(f"{name}.weight", experts, *shape) for name, shape in (
            ("up", (WIDTH, 32)), ("down", (16, WIDTH)),
        ))  # fmt: skip
        common |= {"scaled": "inputs", "transposed": ["up", "down"]}
        return builder.add("experts", x, *reversed(top), up, down, **common)
    up, down, factor = (builder.parameter(f"{name}.weight", experts * 16, WIDTH) for name in ("up", "down", "factor"))
    common |= {"more": ["factor_weight"], "rows": 16, "transposed": ["down"]}
    return builder.add("experts", x, *reversed(top), up, down, factor, **common)


def check_recipes(group, rank, cases):
    """Every case on this rank."""
    for shares, recompute, mode, options, recipes in cases:
        layers = layers_of(options)
        single = StageProgram(layers, StageSetup(dtype=torch.float64))
        wanted = fill(single)
        feeds = [toy_feed(6, 10, seed=1), toy_feed(6, 7, seed=2)]
        whole = {name: p.data for name, p in single.parameters.items()}
        if options.keys() & {"dropout", "experts"}:
            single.begin_step(0, 31)
            wanted_loss = sum(single.forward(m, 0, {}, feed)["loss"] for m, feed in enumerate(feeds))
            for m in range(len(feeds)):
                single.backward(m, 0, {})
        else:
            wanted_loss, wanted = plain_gradients(single, feeds, 31, tied=options.get("tied", False))
        programs = [
            write_program(layer.graph, shares, parse_recipe(text)) for layer, text in zip(layers, recipes, strict=True)
        ]
        loss, found = programs_step(group, rank, whole, layers, programs, recompute, mode, feeds, 31)
        assert abs(loss - wanted_loss) <= EXACT * abs(wanted_loss), recipes
        assert_close(found, wanted, EXACT)
    return len(cases)


WAYS = [("none", "B", {}), ("selective", "IW", {}), ("full", "B", {}), ("none", "IW", {"tied": True}),
        ("selective", "B", {"dropout": 0.4})]  # fmt: skip


def drawn_cases(all_shares, count, ways=WAYS):
    found = []
    for seed in range(count):
        shares = all_shares[seed % len(all_shares)]
        recompute, mode, options = ways[seed % len(ways)]
        recipes = random_recipes(layers_of(options), shares, seed, 6, 7, (0.05, 1.0)[seed % 2])
        found.append((shares, recompute, mode, options, recipes))
    return found


def test_two_devices():
    todo = drawn_cases([(2, 1), (1, 1)], 20)
    words = {word for case in todo for text in case[-1] for word in text.split()}
    turns = {word.rpartition(":")[2].partition("/")[0] for word in words if ">" in word}
    forms = {form for turn in turns for form in turn.split(">")}
    assert {"G0>G1", "G1>G0", "G1>G2"} <= turns
    assert {"grouped", "alltoallv", "padded+grouped", "alltoallv+padded"} <= {word.partition("/")[2] for word in words}
    assert {"I", "P", "G0", "G1", "G2"} <= forms
    assert {"d0", "d1", "heads", "in", "out", "features", "vocabulary", "+1"} <= words
    assert any("features" in case[-1][1].split() for case in todo), "a norm by features"
    stored = {word.split(":")[0] for word in words if ".weight:G" in word or ".bias:G" in word or "weight:G" in word}
    assert {"weight", "q.weight", "q.bias", "down.weight", "lm.weight"} <= stored, "stored split, gathered for use"
    assert any("vocabulary" in case[-1][-1] for case in todo), "the loss by vocabulary"
    assert run_processes(check_recipes, 2, todo) == [20, 20]


def test_three_devices():
    todo = drawn_cases([(3, 2, 2), (2, 1, 1)], 8)
    assert run_processes(check_recipes, 3, todo) == [8] * 3


def test_experts_of_two_and_four_devices():
    """Experts everywhere; split, with tokens sent to them, or with all tokens everywhere; or gathered for use."""
    ways = [("none", "B", {"experts": 5}), ("selective", "IW", {"experts": 5}), ("full", "B", {"experts": 4})]
    two, four = drawn_cases([(2, 1), (1, 2)], 10, ways), drawn_cases([(3, 1, 2, 1)], 4, ways[2:])
    words = {word for case in (*two, *four) for text in case[-1] for word in text.split()}
    assert {"experts", "experts0", "experts1", "d0", "d1"} <= words
    assert any(word.startswith("down.weight:G0>I") for word in words)
    assert run_processes(check_recipes, 2, two) == [10] * 2
    assert run_processes(check_recipes, 4, four) == [4] * 4


def test_selected_experts_of_two_devices():
    """Experts in the forms of Llama 4 and DBRX: split, by tokens, or gathered for use."""
    ways = [
        (recompute, mode, {"experts": 5, "form": form})
        for recompute, mode in (("none", "B"), ("full", "IW"))
        for form in ("inputs", "rows")
    ]
    cases = drawn_cases([(2, 1), (1, 2), (1, 1)], 16, ways)
    words = {word for case in cases for text in case[-1] for word in text.split()}
    assert {"experts", "d0", "d1"} <= words
    assert {"down.weight:G0>I", "factor.weight:G0>I"} <= {word.partition("/")[0] for word in words}
    assert run_processes(check_recipes, 2, cases) == [16] * 2


def resharded(recipes, shares):
    """The same recipes with shares of their own for every layer: the second of two that differ reshares, but the head
    and the embedding do it for the blocks, which are equal."""
    found = []
    for place, text in enumerate(recipes):
        own = shares[place]
        taken = shares[max(0, place - 1)] if place >= len(recipes) - 2 else own
        given = shares[1] if place == 0 else own
        found.append(replace(parse_recipe(text), shares=(taken, own, given)).recipe_text)
    return found


def test_layers_with_shares_of_their_own():
    """Every layer with random forms, embedding, blocks, head and loss with other shares: the hidden state is moved from
    one cut to the next, rows, tokens, features and words alike, forward and backward."""
    for count, mixes in (
        (2, [((1, 3), (3, 1), (2, 1), (1, 1)), ((3, 1), (1, 2), (1, 2), (2, 1))]),
        (3, [((1, 3, 2), (2, 1, 1), (2, 1, 3), (1, 1, 1))]),
        (4, [((1, 1, 3, 2), (3, 1, 2, 1), (1, 2, 1, 3), (2, 1, 1, 1))]),
    ):
        ways = [(*way[:2], {"experts": 5} if count == 4 else way[2]) for way in WAYS if "tied" not in way[2]]
        cases = drawn_cases([(1,) * count], 8 if count == 2 else 4, ways)
        todo = []
        for number, (_, recompute, mode, options, recipes) in enumerate(cases):
            embed, block, head, loss = mixes[number % len(mixes)]
            own = resharded(recipes, (embed, *(block,) * (len(recipes) - 3), head, loss))
            todo.append((block, recompute, mode, options, own))
        written = [
            write_program(layer.graph, case[0], parse_recipe(text)).program_text()
            for case in todo
            for layer, text in zip(layers_of(case[3]), case[4], strict=True)
        ]
        moved = [line for text in written for line in text.splitlines() if "= reshare/" in line]
        assert len(moved) >= 5 and len({line.partition(" = ")[0] for line in moved}) >= 2
        assert run_processes(check_recipes, count, todo) == [len(todo)] * count


SPLIT_QUERIES = (
    "G1>G1 d1 d1 g1 positions:I>G1 d1 d1 g1 d1 d1 g1 t3:G1>I t6:G1>I t8:G1>I d1 g1 d1 d1 d1 d1 d1 d1 d1 d1 d1"
)
"""The toy block by tokens: everyone's queries, and all keys and values."""


def check_split_queries(group, rank, cases):
    """Loss and gradients of the toy model with queries split, uncut or in slices, against one device."""
    for shares, recompute, mode, window, lengths in cases:
        layers = toy_layers(1, window=window)
        single = StageProgram(layers, StageSetup(dtype=torch.float64))
        fill(single)
        feeds = [toy_feed(2, 13, seed=1), toy_feed(1, 13, seed=2)]
        wanted_loss, wanted = plain_gradients(single, feeds, 31, blocks=1, window=window)
        recipes = ["I>G1 tokens:I>G1 d1", SPLIT_QUERIES, "G1>G1 d1 d1", "G1>I labels:I>G1 d1"]
        programs = [
            write_program(layer.graph, shares, parse_recipe(text)) for layer, text in zip(layers, recipes, strict=True)
        ]
        whole = {name: p.data for name, p in single.parameters.items()}
        loss, found = programs_step(group, rank, whole, layers, programs, recompute, mode, feeds, 31, lengths)
        assert abs(loss - wanted_loss) <= EXACT * abs(wanted_loss)
        assert_close(found, wanted, EXACT)
    return len(cases)


def test_queries_split_over_devices_see_the_right_keys():
    """In slices and windows, with an order of keys that is not the devices'."""
    how = ("none", "B"), ("selective", "IW"), ("full", "B")
    ways = list(itertools.product((None, 4), (None, [13], [4, 6, 3]), how))
    for count, shares in ((2, (2, 1)), (3, (1, 3, 1))):
        todo = [(shares, *way, window, lengths) for window, lengths, way in ways]
        assert run_processes(check_split_queries, count, todo) == [len(todo)] * count


def layers_with_norms():
    """The toy model with two layer norms and a softmax in the place of its blocks."""
    b = GraphBuilder(HIDDEN)
    n = b.add("layer_norm", "x", b.parameter("norm.weight", WIDTH), b.parameter("norm.bias", WIDTH), eps=1e-3)
    t = b.add("softmax", b.add("add", "x", n), dim=2)
    n = b.add("layer_norm", b.add("mul", t, "x"), "", "", eps=1e-3)
    graph = b.finish(b.add("add", "x", n))
    first, *_, head, loss = toy_layers(0)
    return [first, StageLayer("mid", graph, {p.name: f"mid.{p.name}" for p in graph.parameters}), head, loss]


BY_FEATURES = ("I>G2 features", "G2>G2 features d2 d2 d2 features d2", "G2>G2 features t0:G2>I out", "G2>I vocabulary")


def check_norms(group, rank, cases):
    """Loss and gradients with everything split by features or words, norms and softmax too, against one device."""
    layers = layers_with_norms()
    single = StageProgram(layers, StageSetup(dtype=torch.float64))
    for shares, recompute, mode in cases:
        wanted = fill(single)
        single.begin_step(0, 31)
        feeds = [toy_feed(6, 10, seed=1), toy_feed(6, 7, seed=2)]
        wanted_loss = sum(single.forward(m, 0, {}, feed)["loss"] for m, feed in enumerate(feeds))
        for m in range(len(feeds)):
            single.backward(m, 0, {})
        programs = [
            write_program(one.graph, shares, parse_recipe(text)) for one, text in zip(layers, BY_FEATURES, strict=True)
        ]
        assert [each.kind for each in programs[1].graphs[rank].operators] == [
            "layer_norm_shard", "add", "softmax_shard", "mul", "layer_norm_shard", "add"
        ]  # fmt: skip
        whole = {name: p.data for name, p in single.parameters.items()}
        loss, found = programs_step(group, rank, whole, layers, programs, recompute, mode, feeds, 31)
        assert abs(loss - wanted_loss) <= EXACT * abs(wanted_loss)
        assert_close(found, wanted, EXACT)
    return len(cases)


@pytest.mark.parametrize("shares", [(2, 1), (3, 1, 2), (1, 3, 2, 1)])
def test_norms_and_softmax_along_what_they_normalise(shares):
    ways = ("none", "B"), ("selective", "IW"), ("full", "B")
    assert run_processes(check_norms, len(shares), [(shares, *way) for way in ways]) == [3] * len(shares)
