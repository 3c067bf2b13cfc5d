"""Sufficient factors: where gathering x and dy in every microbatch beats reducing the weight gradient, where not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.random_clusters import random_setting
from tests.support.stage_toys import HIDDEN, GraphBuilder

from pipefit.cost.comm.lowerings import LoweredCollective, PortLoads
from pipefit.layout import TensorForm
from pipefit.model.ops.linear_factors import reduced_nowhere
from pipefit.shard.frontier import form_number_along, solve_program
from pipefit.shard.pricing import price_layer
from pipefit.shard.recipe import parse_recipe, recipe_of, write_program
from pipefit.shard.template import PricedTemplate, choose_program, held_fractions

WIDE = 256


def wide_layer(rows_are_few: bool, microbatches: int):
    """(what the search chooses for a wide linear layer on two devices with slow links, its text) with rows split
    before and behind it."""
    rows = 4 if rows_are_few else 4096
    b = GraphBuilder(replace(HIDDEN, shape=("B", "T", WIDE)))
    graph = b.finish(b.linear("x", "wide", WIDE))
    toy = random_setting(0)
    bandwidth = 1e7

    def collective(kind, size):
        return size / 2 / bandwidth * (2 if kind == "all_reduce" else 1)

    def lowered(kind, size):
        once = collective(kind, size)
        return (LoweredCollective("padded", 0.0, once, PortLoads(2 * np.eye(2))),)

    setting = replace(
        toy, kinds=(toy.kinds[0],) * 2, rows=rows, tokens=1, microbatches=microbatches, collective=collective,
        lowered=lowered, precision="float32",
    )  # fmt: skip
    layer = price_layer(graph, setting, TensorForm("G", 0))
    template = replace(layer.template, wanted={layer.values.index(graph.outputs[0]): form_number_along(0)})
    problem, numbers = PricedTemplate(template, held_fractions(template.cuts, (1, 1), template.members)).problem_at()
    choice = choose_program(template, numbers, solve_program(problem))
    return graph, recipe_of(replace(layer, template=template), choice, TensorForm("G", 0), TensorForm("G", 0), (1, 1))


@pytest.mark.parametrize(
    ("few", "microbatches", "gathered"),
    [(True, 1, True), (False, 1, False), (True, 1000, False)],
    ids=["few rows", "many rows", "few rows, a thousand microbatches"],
)
def test_factors_are_gathered_where_that_is_less_than_a_reduction(few, microbatches, gathered):
    """4 rows of 2 x 256 numbers against 256 x 256 of a gradient once an iteration; 4096 rows are more; and a gradient
    that is reduced once in a thousand microbatches is less."""
    graph, recipe = wide_layer(few, microbatches)
    assert ("d0*" in recipe.recipe_text.split()) == gathered, recipe.recipe_text
    assert parse_recipe(recipe.recipe_text) == recipe
    local = write_program(graph, (1, 1), recipe).graphs[0]
    assert bool(reduced_nowhere(local)) == gathered
