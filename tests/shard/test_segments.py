"""Layers with shares of their own: where the search takes them, what they cost, and that they never cost more."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from tests.shard.test_classical import with_vocabulary
from tests.support.random_clusters import model_of
from tests.support.stage_toys import toy_layers

from pipefit.cluster import Cluster, Host, Link, Provenance, Rail
from pipefit.cluster.types import DeviceKind
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.roofline import RooflineCosts
from pipefit.errors import PlanError
from pipefit.layout import overlap_lengths, split_by_shares
from pipefit.plan.assemble.shard_recipes import shard_setting
from pipefit.shard.chain import ChainSearch
from pipefit.shard.listing import list_program
from pipefit.shard.pricing import ShardSetting
from pipefit.shard.recipe import parse_recipe, write_program
from pipefit.shard.segments import _SegmentPrices, group_tied_layers, segment_shares
from pipefit.shard.synthesize import fits_in_memory, synthesize_program


def kind(name, flops, moves, memory=2**40):
    return DeviceKind(
        name=name,
        memory_bytes=memory,
        memory_bandwidth_bytes_per_s=moves,
        peak_flops_per_s={"float32": flops},
        efficiency=1.0,
        overhead_s=0.0,
    )


def setting(kinds, rows=24, tokens=16, bytes_per_s=1e9, latency_s=1e-7, microbatches=1000):
    """Devices that send each other straight, each through a port of its own."""
    count = len(kinds)

    def collective(name, size, how="padded", units=()):
        once = (count - 1) * (latency_s + size / count / bytes_per_s)
        return 2 * once if name == "all_reduce" else once

    def reshare_s(size, old, new):
        moved = overlap_lengths(split_by_shares(10**6, old), split_by_shares(10**6, new))
        out = max(sum(row) - row[place] for place, row in enumerate(moved))
        into = max(sum(column) - column[place] for place, column in enumerate(zip(*moved, strict=True)))
        return (count - 1) * latency_s + max(out, into) / 10**6 * size / bytes_per_s

    return ShardSetting(
        kinds=tuple(kinds),
        collective=collective,
        rows=rows,
        tokens=tokens,
        precision="float32",
        microbatches=microbatches,
        reshare_s=reshare_s,
    )


COMPUTES, MOVES = kind("computes", 1e9, 1e9), kind("moves", 1e8, 1e10)
"""One device that is ten times as fast at products, one ten times as fast at moving."""


def found_by(where, layers):
    model = model_of(layers)
    chains = ChainSearch(model, where)
    common = synthesize_program(chains, model.layers)
    return model, common, segment_shares(chains, model.layers, common)


def test_parts_that_compute_and_parts_that_move_get_shares_of_their_own():
    """Products of a block take the device that computes, a loss over many words the one that moves: the rows of the
    hidden state go from the one's cut to the other's, and that costs less than it saves."""
    where = setting((COMPUTES, MOVES), bytes_per_s=1e10)
    model, common, own = found_by(where, with_vocabulary(512))
    assert own.cost_s < 0.98 * common.cost_s
    shares = {layer.name: link.shares for layer, link in zip(model.layers, own.links, strict=True)}
    assert len({*shares.values()}) > 1
    first = {name: each[0] / sum(each) for name, each in shares.items()}
    assert first["layers.0"] > first["loss"]
    written = [write_program(model.layer_graph(layer), own.shares, parse_recipe(link.layer_recipe.recipe_text))
               for layer, link in zip(model.layers, own.links, strict=True)]  # fmt: skip
    for one, other in itertools.pairwise(written):
        if one.output_form.kind == "G":
            assert one.given_shares == other.taken_shares
    assert "reshare" in {each.kind for program in written for each in program.graphs[0].operators}
    text = list_program(model, model.layers, own, where).listing_text()
    assert " with shares " in text and "= reshare/" in text
    assert (
        sum(layer.cost_s * layer.times for layer in list_program(model, model.layers, own, where).layers) >= own.cost_s
    )


def test_links_too_slow_for_it_reshare_nothing():
    where = setting((COMPUTES, MOVES), latency_s=10.0)
    model, common, own = found_by(where, with_vocabulary(512))
    assert own.cost_s <= common.cost_s
    for link, layer in zip(own.links, model.layers, strict=True):
        program = write_program(model.layer_graph(layer), own.shares, link.layer_recipe)
        assert "reshare" not in {each.kind for each in program.graphs[0].operators}


@pytest.mark.parametrize("seed", range(8))
def test_they_are_never_dearer_than_common_shares(seed):
    """On random devices and links, and with equal blocks between others; memory holds what is chosen."""
    draw = random.Random(seed)
    kinds = [kind(f"k{i}", 10 ** draw.uniform(8, 10), 10 ** draw.uniform(8, 10)) for i in range(draw.choice((2, 3)))]
    where = setting(kinds, rows=draw.choice((6, 24)), bytes_per_s=10 ** draw.uniform(7, 11),
                    microbatches=draw.choice((1, 30)))  # fmt: skip
    layers = toy_layers(3, tied=bool(seed % 2))
    model, common, own = found_by(where, layers)
    assert own.cost_s <= common.cost_s * (1 + 1e-9)
    chains = ChainSearch(model, where)
    assert fits_in_memory(chains, own.held_bytes)
    for group in group_tied_layers(model.layers):
        assert len({own.links[place].shares for place in group}) == 1


@pytest.mark.parametrize(("seed", "rows", "microbatches", "count"), [(96, 4, 30, 3), (42, 24, 1, 2)])
def test_shares_of_one_layer_that_leave_no_unit_of_anothers_cut(seed, rows, microbatches, count):
    """Collectives of real links are lowered by the parts that they move: layers that change their shares together may
    have had different ones before, and those of the first leave a device without a row or a head of the second."""
    draw = random.Random(seed)
    draw.choice((2, 3))
    kinds = [kind(f"k{i}", 10 ** draw.uniform(8, 11), 10 ** draw.uniform(8, 10)) for i in range(count)]
    speed = 10 ** draw.uniform(6, 10)
    cluster = Cluster(
        name="unlike",
        kinds={each.name: each for each in kinds},
        links={"inside": Link(latency_s=1e-5, bandwidth_bytes_per_s=6e7)},
        hosts=tuple(Host(name=each.name, kind=each.name, devices=1, link="inside") for each in kinds),
        rails=(
            Rail(
                name="network",
                latency_s=((0.0,) * count,) * count,
                bandwidth_bytes_per_s=tuple(tuple(speed * (a != b) for b in range(count)) for a in range(count)),
            ),
        ),
        provenance=Provenance(source="assumed", where="a test"),
    )
    model = model_of(toy_layers(3))
    where = shard_setting(
        model, Network(cluster), RooflineCosts(), devices=tuple(range(count)), rows=rows, tokens=16,
        precision="float32", microbatches=microbatches,
    )  # fmt: skip
    chains = ChainSearch(model, where)
    common = synthesize_program(chains, model.layers)
    own = segment_shares(chains, model.layers, common)
    assert own.cost_s <= common.cost_s * (1 + 1e-9)
    for layer, link in zip(model.layers, own.links, strict=True):
        write_program(model.layer_graph(layer), own.shares, parse_recipe(link.layer_recipe.recipe_text))


def test_memory_that_holds_one_part_only():
    """The fast device has no room for its share of everything; with shares of its own for the vocabulary it keeps the
    work that it is fast at."""
    small = kind("fast", 4e9, 4e9)
    where = setting((small, kind("slow", 1e9, 1e9)), microbatches=1)
    layers = with_vocabulary(4096)
    model, common, _ = found_by(where, layers)
    tight = replace(where, kinds=(replace(small, memory_bytes=int(2**26 + 0.6 * common.held_bytes[0])), where.kinds[1]))
    model, common, own = found_by(tight, layers)
    assert fits_in_memory(ChainSearch(model, tight), own.held_bytes)
    assert own.cost_s <= common.cost_s


def test_the_best_of_all_shares_on_a_grid():
    """Against every pair of shares for the two halves of a model, with the forms that are best for each."""
    where = setting((COMPUTES, MOVES), bytes_per_s=1e10)
    layers = with_vocabulary(512)
    model = model_of(layers)
    chains = ChainSearch(model, where)
    own = segment_shares(chains, model.layers, synthesize_program(chains, model.layers))
    prices = _SegmentPrices(chains, model.layers)
    best = own.cost_s
    options = [(part, 12 - part) for part in range(1, 12)]
    for first, second, border in itertools.product(options, options, (1, 2, 3)):
        each = tuple(first if place < border else second for place in range(4))
        priced = prices.price_program(chains.search_programs(model.layers, first, each), each)
        if priced is not None:
            best = min(best, priced.cost_s)
    assert own.cost_s <= best * 1.02


def test_a_recipe_says_shares_and_mistakes_are_told():
    model, _, own = found_by(setting((COMPUTES, MOVES), bytes_per_s=1e10), with_vocabulary(512))
    link, layer = next((link, layer) for link, layer in zip(own.links, model.layers, strict=True) if link.around)
    recipe, graph = link.layer_recipe, model.layer_graph(layer)
    assert parse_recipe(recipe.recipe_text) == recipe
    word = recipe.recipe_text.split()[1]
    for wrong, words in (
        (recipe.recipe_text.replace(word, "@2:1"), r"not the shares of a layer(.|\n)*'@2:1'(.|\n)*@2:1>5:2>5:2"),
        (recipe.recipe_text.replace(word, "@2:0>1:1>1:1"), "not the shares of a layer"),
        (
            recipe.recipe_text.replace(word, "@2:1:1>2:1:1>2:1:1"),
            r"another number of devices(.|\n)*2:1:1(.|\n)*2 shares",
        ),
    ):
        with pytest.raises(PlanError, match=words):
            write_program(graph, own.shares, parse_recipe(wrong))


def test_what_hides_under_the_backward_counts_as_in_common_shares():
    """Devices that reduce gradients beside their backward: the same shares cost the same, and others never more."""
    kinds = (replace(COMPUTES, overlap=1.0), replace(MOVES, overlap=1.0))
    where = setting(kinds, bytes_per_s=1e8, microbatches=2)
    model = model_of(with_vocabulary(512))
    chains = ChainSearch(model, where)
    common = synthesize_program(chains, model.layers)
    same = _SegmentPrices(chains, model.layers).price_program(common.links, (common.shares,) * len(model.layers))
    assert same.cost_s == pytest.approx(common.cost_s)
    assert segment_shares(chains, model.layers, common).cost_s <= common.cost_s
