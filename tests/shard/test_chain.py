"""Programs for chains of layers: the form of the hidden state chosen jointly, classical programs found by themselves,
speed."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace

import pytest
from tests.support.random_clusters import model_of, random_setting
from tests.support.stage_toys import block_graph, toy_layers

from pipefit.cluster.types import DeviceKind
from pipefit.cost.static_memory import WORKSPACE_BYTES, optimizer_traffic_bytes, static_parts
from pipefit.errors import PlanError
from pipefit.layout import TensorForm
from pipefit.optimizers import find_optimizer
from pipefit.shard import pricing
from pipefit.shard import setting as setting_module
from pipefit.shard.chain import ChainSearch
from pipefit.shard.pricing import ShardSetting
from pipefit.shard.recipe import parse_recipe, write_program
from pipefit.shard.shares import cost_s, count_segments, overlapped_reduction_s
from pipefit.shard.synthesize import synthesize_program
from pipefit.shard.template import held_fractions

KIND = DeviceKind(
    name="fast",
    memory_bytes=2**40,
    memory_bandwidth_bytes_per_s=1e15,
    peak_flops_per_s={"float32": 1e9},
    efficiency=1.0,
    overhead_s=0.0,
)
"""Products count, moving does not."""


def setting(shards=2, latency_s=1e-9, bytes_per_s=1e12, rows=8, tokens=16, microbatches=1, **kind):
    def collective(name, size, how="padded", units=()):
        once = (shards - 1) * (latency_s + size / shards / bytes_per_s)
        return 2 * once if name == "all_reduce" else once

    return ShardSetting(
        kinds=(replace(KIND, **kind),) * shards,
        collective=collective,
        rows=rows,
        tokens=tokens,
        precision="float32",
        microbatches=microbatches,
    )


def searched(where, shares=None, **options):
    model = model_of(toy_layers(**options))
    links = ChainSearch(model, where).search_programs(model.layers, shares or (1,) * len(where.kinds))
    return model, links


def block_forms(model, links):
    """Forms of the parameters of the blocks, and the forms they take and give."""
    graph, link = model.layer_graph(model.layers[1]), links[1]
    program = write_program(graph, (1,) * len(link.layer.template.members.kind), link.layer_recipe)
    return program.parameter_forms, (link.takes, link.gives)


def test_many_microbatches_make_data_parallelism():
    """Reducing gradients costs next to nothing then, and every other program talks in every layer."""
    model, links = searched(setting(bytes_per_s=1e7, microbatches=1000))
    parameters, stream = block_forms(model, links)
    assert {str(form) for form in parameters.values()} == {"I"}
    assert stream == (TensorForm("G", 0), TensorForm("G", 0))


def test_one_row_and_dear_gradients_make_tensor_parallelism():
    """One row cannot be split, and weights far larger than what they work on: columns and heads, then rows."""
    model, links = searched(setting(rows=1, tokens=2, bytes_per_s=3e7, latency_s=0.0))
    parameters, _ = block_forms(model, links)
    for name in ("q", "k", "v", "gate", "up"):
        assert str(parameters[f"{name}.weight"]) == "G0", name
    for name in ("o", "down"):
        assert str(parameters[f"{name}.weight"]) == "G1", name


def test_norms_that_count_make_sequence_parallelism():
    """As before, on three devices for three groups of keys, with norms and sums that take their time: they are split by
    tokens, as Korthikanti et al. do, where sending costs a little however small it is."""
    where = setting(3, rows=1, tokens=12, bytes_per_s=1e8, latency_s=1e-5, memory_bandwidth_bytes_per_s=6e7)
    parameters, stream = block_forms(*searched(where))
    assert stream == (TensorForm("G", 1), TensorForm("G", 1))
    assert {str(parameters[f"{name}.weight"]) for name in ("q", "k", "v", "gate", "up")} == {"G0"}
    assert {str(parameters[f"{name}.weight"]) for name in ("o", "down")} == {"G1"}


def test_few_tokens_make_norms_split_by_features():
    """As before, with two tokens, which three devices cannot share: the residual stream, its sums and its norms are
    split by features, every norm reduces one number a token, and its scale is never reduced."""
    where = setting(3, rows=1, tokens=2, bytes_per_s=1e8, latency_s=0.0, memory_bandwidth_bytes_per_s=1e7)
    model, links = searched(where)
    parameters, stream = block_forms(model, links)
    assert stream == (TensorForm("G", 2), TensorForm("G", 2))
    assert {str(parameters[f"norm{number}.weight"]) for number in (1, 2)} == {"G0"}
    program = write_program(model.layer_graph(model.layers[1]), (2, 1, 1), links[1].layer_recipe)
    norms = [[each for each in graph.operators if "norm" in each.kind] for graph in program.graphs]
    assert {(each.kind, each.attributes["whole"]) for one in norms for each in one} == {("rms_norm_shard", 24)}
    assert [graph.find_parameter("norm1.weight").shape for graph in program.graphs] == [(12,), (6,), (6,)]
    talked = replace(where, collective=lambda *given: where.collective(*given) + (1.0 if given[1] <= 8 else 0.0))
    model, links = searched(talked)
    program = write_program(model.layer_graph(model.layers[1]), (2, 1, 1), links[1].layer_recipe)
    assert "rms_norm_shard" not in {each.kind for each in program.graphs[0].operators}


def test_slow_links_leave_everything_whole():
    model, links = searched(setting(latency_s=10.0))
    parameters, stream = block_forms(model, links)
    assert {str(form) for form in parameters.values()} == {"I"}
    assert stream == (TensorForm("I"), TensorForm("I"))


def test_the_chain_is_the_best_of_all_forms():
    """Against trying every form between layers, one for each kind of layer, with the layers' own costs."""
    for seed in range(6):
        where = replace(random_setting(seed), rows=8, tokens=16)
        shares = tuple(range(1, len(where.kinds) + 1))
        model, links = searched(where, shares, blocks=2)
        chains = ChainSearch(model, where)
        forms = (TensorForm("I"), TensorForm("G", 0), TensorForm("G", 1), TensorForm("G", 2))
        best = float("inf")
        embed, block, _, head, loss = (layer.graph for layer in model.layers)
        for stream, logits in itertools.product(forms, forms):
            each = [
                chains._layer_programs(name, (), takes, shares).get(gives)
                for name, takes, gives in (
                    (embed, TensorForm("I"), stream),
                    (block, stream, stream),
                    (block, stream, stream),
                    (head, stream, logits),
                    (loss, logits, TensorForm("I")),
                )
            ]
            if None not in each:
                best = min(best, sum(link.cost_s for link in each))
        assert sum(link.cost_s for link in links) == pytest.approx(best)


def test_tied_parameters_get_one_form():
    model, links = searched(setting(bytes_per_s=1e6), tied=True)
    stored = {}
    for layer, link in zip(model.layers, links, strict=True):
        program = write_program(model.layer_graph(layer), (1, 1), link.layer_recipe)
        for local, name in layer.parameters.items():
            stored.setdefault(name, set()).add(program.parameter_forms[local])
    assert all(len(forms) == 1 for forms in stored.values())


def test_what_tied_parameters_cost_once_is_counted_once():
    """In the first layer that has them: their reduction, their update, their copy in memory."""
    where = setting(bytes_per_s=1e9, latency_s=0.0, memory_bandwidth_bytes_per_s=1e9, microbatches=4)
    model, links = searched(where, tied=True)
    ways = []
    for link, name in ((links[0], "weight"), (links[3], "lm.weight")):
        template = link.choice.template
        place = next(n for n, step in enumerate(template.steps) if link.layer.values[step.output] == name)
        ways.append(template.steps[place].ways[link.choice.ways[place]])
    elements, fractions = 31 * 24, held_fractions(links[0].choice.template.cuts, (1, 1), where.axis_members)
    assert (
        sum(ways[0].held)
        == sum(static_parts(elements, 0, 1.0, "float32", find_optimizer("adamw")).values()) - WORKSPACE_BYTES
    )
    assert ways[0].cost_s(fractions, 1) > 0
    assert ways[1].held == (0.0, 0.0) and ways[1].cost_s(fractions, 1) == 0
    chains = ChainSearch(model, where)
    here, there = (
        chains._layer_programs(
            model.layers[3].graph, (("lm.weight", TensorForm("I"), counted),), TensorForm("G", 0), (1, 1)
        )
        for counted in (True, False)
    )
    once_s = (4 * elements / 1e9 + optimizer_traffic_bytes(elements, 1.0, "float32", find_optimizer("adamw")) / 1e9) / 4
    for gives, link in here.items():
        assert link.cost_s - there[gives].cost_s == pytest.approx(once_s, rel=1e-6)


def test_48_layers_within_a_second_of_processor_time():
    model = model_of(toy_layers(blocks=48))
    where = replace(random_setting(3), rows=8, tokens=128)
    began = time.process_time()
    links = ChainSearch(model, where).search_programs(model.layers, (1,) * len(where.kinds))
    assert time.process_time() - began < 1.0
    assert len(links) == 51
    assert len({link.layer_recipe.recipe_text for link in links[1:49]}) == 1


def test_memory_makes_parameters_split():
    """Where whole parameters do not fit, a dearer program is taken that splits them."""
    model = model_of(toy_layers())
    plenty = setting(bytes_per_s=1e6, microbatches=1000, rows=2, tokens=4)
    free = synthesize_program(ChainSearch(model, plenty), model.layers)
    need = max(free.held_bytes)
    scarce = setting(bytes_per_s=1e6, microbatches=1000, rows=2, tokens=4, memory_bytes=int(2**26 + 0.75 * need))
    tight = synthesize_program(ChainSearch(model, scarce), model.layers)
    assert max(tight.held_bytes) <= 0.75 * need
    assert tight.cost_s >= free.cost_s
    with pytest.raises(PlanError, match=r"No program of these layers fits(.|\n)*2 devices(.|\n)*more devices"):
        less = setting(memory_bytes=2**26 + int(0.05 * need), rows=2, tokens=4)
        synthesize_program(ChainSearch(model, less), model.layers)


def test_scarce_memory_makes_fsdp():
    """Rows split, as with plenty of memory, and every matrix of the blocks stored split and gathered for use."""
    model = model_of(toy_layers())
    sizes = {"bytes_per_s": 1e8, "latency_s": 0.0, "microbatches": 4, "rows": 8, "tokens": 8}
    free = synthesize_program(ChainSearch(model, setting(**sizes)), model.layers)
    scarce = setting(**sizes, memory_bytes=int(2**26 + 0.7 * max(free.held_bytes)))
    tight = synthesize_program(ChainSearch(model, scarce), model.layers)
    assert max(tight.held_bytes) <= 0.7 * max(free.held_bytes)
    names = [f"{name}.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    for links, gathered in ((free.links, []), (tight.links, names)):
        program = write_program(model.layer_graph(model.layers[1]), (1, 1), links[1].layer_recipe)
        read = [operator.inputs[0] for operator in program.graphs[0].operators if operator.kind == "unshard"]
        assert [name for name in read if name in names] == gathered
        assert str(program.input_form) == str(program.output_form) == "G0"
        assert {str(program.parameter_forms[name]) for name in names} <= ({"G0", "G1"} if gathered else {"I"})
        assert {str(program.forms[operator.outputs[0]]) for operator in program.graphs[0].operators
                if operator.kind in ("linear", "attention")} == {"G0"}  # fmt: skip


def test_reductions_that_hide_under_the_backward_are_not_paid(monkeypatch):
    """The same links: what a reduction takes beside the backward is free, so nothing is gathered to save it, and what
    is left is what the last bucket takes; all of it counts where nothing runs beside the backward."""
    for module in (pricing, setting_module):
        monkeypatch.setattr(module, "BUCKET_BYTES", 2048)
    model = model_of(toy_layers())
    sizes = {"bytes_per_s": 2e7, "latency_s": 0.0}
    alone, beside = (
        synthesize_program(ChainSearch(model, setting(**sizes, overlap=o)), model.layers) for o in (0.0, 1.0)
    )
    gathered = [link.links[1].layer_recipe.recipe_text.count(".weight:G") for link in (alone, beside)]
    assert gathered[0] > gathered[1] == 0
    chain = [link.choice for link in beside.links]
    hidden = overlapped_reduction_s(chain, [beside.shares] * len(chain), setting(**sizes).bucket_s, 1)
    counted = cost_s(count_segments(chain), beside.links[0].choice.template.members, beside.shares)
    assert 0 < hidden < counted
    assert beside.cost_s == pytest.approx(counted - hidden)
    assert beside.cost_s < alone.cost_s < counted


def test_recipes_reload_equal_and_mistakes_are_told():
    _, links = searched(setting(rows=1, tokens=2, bytes_per_s=3e7, latency_s=0.0))
    for link in links:
        assert parse_recipe(link.layer_recipe.recipe_text) == link.layer_recipe
    block = links[1].layer_recipe.recipe_text
    turn = re.search(r"\S+:G\d(?=>I)", block)[0]
    for text, words in (
        ("", "begins with the forms"),
        ("I>I t0:I", "This is not a conversion"),
        ("I>I - -", "for another layer(.|\n)*2 choices(.|\n)*make the plan again"),
        (block.replace("heads", "hands"), "no such label(.|\n)*hands"),
        (block.replace(" heads ", " +9 "), r"Partial sums do not pass(.|\n)*attention(.|\n)*\+9"),
        (
            block.replace(f"{turn}>", f"{turn.partition(':')[0]}:P>"),
            r"conversion of the value is not possible(.|\n)*P>I",
        ),
        (
            block.replace(f"{turn}>I", f"{turn}>{turn[-2:]}"),
            rf"conversion of the value is not possible(.|\n)*>{turn[-2:]}",
        ),
        (
            block.replace(f"{turn}>I", f"{turn}>I/piped"),
            r"not a lowering(.|\n)*piped(.|\n)*padded, grouped",
        ),
        (block.replace(f"{turn}>I", f"{turn}>I/padded+grouped+padded"), "not a lowering of a collective"),
    ):
        with pytest.raises(PlanError, match=words):
            write_program(block_graph(), (1, 1), parse_recipe(text))
