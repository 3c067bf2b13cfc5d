"""Which dimensions of a layer's values are split, and in how many units."""

from __future__ import annotations

from pipefit.model.graph import Graph, Operator, Tensor
from pipefit.shard.cuts import DIMENSIONS, cut_units
from pipefit.shard.frontier import ALIKE, split_along


def reshaped(before, after):
    return Graph(
        inputs=(Tensor(name="x", shape=before),),
        outputs=("z",),
        operators=(
            Operator(kind="reshape", inputs=("x",), outputs=("y",), attributes={"shape": list(after)}),
            Operator(kind="silu", inputs=("y",), outputs=("z",)),
        ),
        parameters=(),
        tensors=(Tensor(name="y", shape=after), Tensor(name="z", shape=after)),
    )


def test_dimensions_that_the_search_has_no_form_for_stay_whole():
    units = cut_units(reshaped(("B", 4096), ("B", 4, 4, 4, 2, 2, 4, 4)))
    assert {dim for name, dim in units if name == "z"} == set(range(DIMENSIONS))
    assert split_along(DIMENSIONS - 1) == ALIKE


def test_units_divide_every_dimension_that_is_tied():
    assert cut_units(reshaped(("B", 6, 4), ("B", 4, 6)))["x", 1] == 2
