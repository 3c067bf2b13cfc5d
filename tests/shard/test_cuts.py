"""Which dimensions of a layer's values are split, and in how many units."""

from __future__ import annotations

import pytest

from pipefit.model.graph import Graph, Operator, ParameterSpec, TensorSpec
from pipefit.shard.cuts import DIMENSIONS, cut_units
from pipefit.shard.frontier import EVERYWHERE, form_number_along
from pipefit.shard.recipe import parse_recipe, write_program


def reshaped(before, after):
    return Graph(
        inputs=(TensorSpec(name="x", shape=before),),
        outputs=("z",),
        operators=(
            Operator(kind="reshape", inputs=("x",), outputs=("y",), attributes={"shape": list(after)}),
            Operator(kind="silu", inputs=("y",), outputs=("z",)),
        ),
        parameters=(),
        tensors=(TensorSpec(name="y", shape=after), TensorSpec(name="z", shape=after)),
    )


def test_dimensions_that_the_search_has_no_form_for_stay_whole():
    units = cut_units(reshaped(("B", 4096), ("B", 4, 4, 4, 2, 2, 4, 4)))
    assert {dim for name, dim in units if name == "z"} == set(range(DIMENSIONS))
    assert form_number_along(DIMENSIONS - 1) == EVERYWHERE


def test_units_divide_every_dimension_that_is_tied():
    assert cut_units(reshaped(("B", 6, 4), ("B", 4, 6)))["x", 1] == 2


@pytest.mark.parametrize("stored", ["", "bias:G0>I/grouped "])
def test_a_convolutions_bias_is_added_along_the_channels_however_it_is_stored(stored):
    graph = Graph(
        inputs=(TensorSpec(name="x", shape=("B", 4, 6, 6)),),
        outputs=("y",),
        operators=(
            Operator(
                kind="conv",
                inputs=("x", "weight", "bias"),
                outputs=("y",),
                attributes={"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1},
            ),
        ),
        parameters=(ParameterSpec(name="weight", shape=(6, 4, 3, 3)), ParameterSpec(name="bias", shape=(6,))),
        tensors=(TensorSpec(name="y", shape=("B", 6, 6, 6)),),
    )
    program = write_program(graph, (2, 1), parse_recipe(f"I>I {stored}in>I"))
    for local in program.graphs:
        add = next(operator for operator in local.operators if operator.kind == "add")
        assert local.find_tensor(add.inputs[1]).shape == (1, 6, 1, 1)


def test_many_equal_devices_are_one_column():
    graph = reshaped(("B", 64), ("B", 8, 8))
    recipe = parse_recipe("I>I - y:I>G1 d1 z:G1>I")
    text = write_program(graph, (1,) * 8, recipe).program_text()
    assert "y.G1x8 = shard_slice(y): 8 x (B, 1, 8)\n" in text, text
    assert "(B, 3, 8) | 5 x (B, 1, 8)\n" in write_program(graph, (3, 1, 1, 1, 1, 1), recipe).program_text()
    few = write_program(graph, (4, 1, 1, 1, 1), recipe).program_text()
    assert f"shard_slice(y): (B, 4, 8) | {' | '.join(['(B, 1, 8)'] * 4)}\n" in few, few
