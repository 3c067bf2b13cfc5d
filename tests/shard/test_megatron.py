"""The Megatron program as text (golden files to read), and the mistakes it reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.stage_toys import (
    GROUPS,
    HIDDEN,
    INNER,
    WIDTH,
    GraphBuilder,
    block_graph,
    embed_graph,
    head_graph,
    loss_graph,
)

from pipefit.errors import PlanError
from pipefit.layout import IDENTITY, shard_form
from pipefit.model.graph import Graph
from pipefit.shard.columns import column_linears
from pipefit.shard.megatron import shard_program

GOLDEN = Path(__file__).parent / "golden"


def fused_graph() -> Graph:
    """GPT-2's block: one linear layer makes q, k and v, every linear layer has a bias, the MLP has no gate."""
    b = GraphBuilder(HIDDEN)
    n = b.add("layer_norm", "x", b.parameter("n1.weight", WIDTH), b.parameter("n1.bias", WIDTH), eps=1e-5)
    qkv = b.linear(n, "qkv", 3 * WIDTH, bias=True)
    parts = [b.add("slice", qkv, dim=2, start=i * WIDTH, stop=(i + 1) * WIDTH) for i in range(3)]
    heads = [b.add("reshape", part, shape=["B", "T", 4, WIDTH // 4]) for part in parts]
    o = b.add("attention", *heads, causal=True, scale=0.4, window=None)
    o = b.linear(b.add("reshape", o, shape=["B", "T", WIDTH]), "o", WIDTH, bias=True)
    x = b.add("add", "x", o)
    n = b.add("layer_norm", x, b.parameter("n2.weight", WIDTH), b.parameter("n2.bias", WIDTH), eps=1e-5)
    h = b.add("gelu", b.linear(n, "up", INNER, bias=True), approximate="tanh")
    return b.finish(b.add("add", x, b.linear(h, "down", WIDTH, bias=True)))


CASES = {
    "block-1-1-tensor": (block_graph(), (1, 1), False),
    "block-2-1-sequence": (block_graph(dropout=0.1), (2, 1), True),
    "fused-3-1-sequence": (fused_graph(), (3, 1), True),
    "embed-2-1-sequence": (embed_graph(), (2, 1), True),
    "head-1-1-sequence": (head_graph(), (1, 1), True),
    "loss-1-1-sequence": (loss_graph(), (1, 1), True),
    "embed-2-1-vocabulary": (embed_graph(), (2, 1), True, True),
    "head-2-1-vocabulary": (head_graph(), (2, 1), True, True),
    "loss-2-1-vocabulary": (loss_graph(), (2, 1), True, True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_program_as_text(name):
    """To renew a file after a wanted change, write `program_text()` into it and read the difference."""
    assert shard_program(*CASES[name]).program_text() == (GOLDEN / f"{name}.txt").read_text()


def test_columns_are_found_by_where_their_features_go():
    block = block_graph()
    names = {block.operators[place].inputs[1]: units for place, units in column_linears(block).items()}
    groups, inner = GROUPS, INNER
    assert names == {
        "q.weight": groups, "k.weight": groups, "v.weight": groups, "gate.weight": inner, "up.weight": inner
    }  # fmt: skip
    fused = fused_graph()
    assert [fused.operators[place].inputs[1] for place in column_linears(fused)] == ["up.weight"]
    assert not column_linears(head_graph())


def test_forms_of_parameters_and_of_the_hidden_state():
    program = shard_program(block_graph(), (1, 1, 1), False)
    assert program.input_form == program.output_form == IDENTITY
    assert program.parameter_forms["q.bias"] == program.parameter_forms["gate.weight"] == shard_form(0)
    assert program.parameter_forms["down.weight"] == program.parameter_forms["o.weight"] == shard_form(1)
    assert program.parameter_forms["norm1.weight"] == IDENTITY
    program = shard_program(block_graph(), (1, 1, 1), True)
    assert program.input_form == program.output_form == shard_form(1)
    assert shard_program(fused_graph(), (3, 1), True).parameter_forms["o.bias"] == IDENTITY


@pytest.mark.parametrize("shares", [(1, 1), (2, 1), (3, 2, 2)])
def test_parts_of_every_parameter_add_up(shares):
    graph = block_graph()
    program = shard_program(graph, shares, True)
    for spec in graph.parameters:
        form = program.parameter_forms[spec.name]
        shapes = [local.find_parameter(spec.name).shape for local in program.graphs]
        if form.kind == "I":
            assert set(shapes) == {spec.shape}
        else:
            assert sum(shape[form.dim] for shape in shapes) == spec.shape[form.dim]
            if spec.name.startswith(("q.", "k.", "v.")):
                assert all(shape[0] % (spec.shape[0] // GROUPS) == 0 for shape in shapes), "a head was cut"


def test_all_positions_run_the_same_operators():
    program = shard_program(block_graph(), (2, 1), True)
    kinds = [[(operator.kind, operator.inputs, operator.outputs) for operator in g.operators] for g in program.graphs]
    assert kinds[0] == kinds[1]


def test_more_devices_than_heads_is_reported():
    with pytest.raises(PlanError, match=r"would get nothing(.|\n)*3 units for shares 1 1 1 1(.|\n)*--fix shards=3"):
        shard_program(block_graph(), (1, 1, 1, 1), False)


def test_shares_that_leave_a_device_without_a_head_are_reported():
    with pytest.raises(PlanError, match=r"would get nothing(.|\n)*at most 3 devices(.|\n)*more even"):
        shard_program(block_graph(), (9, 1), False)
