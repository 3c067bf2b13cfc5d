"""Shares: the linear program against trying shares out, and alternation against the joint mixed-integer program."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from tests.support.exact_programs import Milp, forms_program
from tests.support.random_clusters import loose_template, model_of, random_setting
from tests.support.stage_toys import toy_layers

from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.errors import PlanError
from pipefit.shard.chain import ChainSearch
from pipefit.shard.frontier import solve_program
from pipefit.shard.shares import MemoryRoom, best_weights, cost_s, count_segments, round_weights
from pipefit.shard.synthesize import alternate_searches, start_weights, synthesize_program
from pipefit.shard.template import (
    AxisMembers,
    ComputeSegment,
    ConversionCost,
    OpenOption,
    PricedTemplate,
    choose_program,
    held_fractions,
)


def searched(template, weights):
    problem, numbers = PricedTemplate(template, held_fractions(template.cuts, weights, template.members)).problem_at()
    solution = solve_program(problem)
    return None if solution is None else choose_program(template, numbers, solution)


def every_operator(choice):
    """Stretches of one operator each: what the search counts."""
    found = []
    for step, number, moves in zip(choice.template.steps, choice.ways, choice.before, strict=True):
        way = step.ways[number]
        conversions = [choice.template.conversion_costs[value][source, target] for value, source, target in moves]
        found.append(
            (
                ComputeSegment(
                    (*conversions, *(conversion for conversion in (way.talk, way.reduction) if conversion)), (way,)
                ),
                1,
            )
        )
    conversions = [choice.template.conversion_costs[value][source, target] for value, source, target in choice.after]
    return [*found, (ComputeSegment(tuple(conversions), ()), 1)]


def alternated(setting, template):
    """(cost, shares) as `synthesize_program` finds them, without rounding."""

    def improve(choice):
        weights = best_weights(every_operator(choice), template.members, 1e-3)
        return [] if weights is None else [weights]

    def cost(choice, weights):
        return cost_s(every_operator(choice), template.members, weights)

    record = alternate_searches(start_weights(*setting.device_speeds), lambda w: searched(template, w), improve, cost)
    assert record is not None
    return record


def joint_cost(template):
    """A lower bound, at most 0.3 % below the optimum over programs and shares together: products linearised with big
    numbers."""
    members = template.members
    count, kinds = len(members.kind), members.kind_count
    problem, _ = PricedTemplate(template, held_fractions((0,), [1] * count, members)).problem_at()
    program = Milp()
    fractions = [program.variable() for _ in range(kinds)]
    program.row(dict(zip(fractions, map(float, members.device_counts), strict=True)), 1, 1)
    widest = program.variable(upper=float(count))
    for fraction in fractions:
        program.row({fraction: 1.0}, low=1e-3)
        program.row({fraction: float(count), widest: -1.0}, high=0)

    def pays(conversion, pick):
        """Seconds of a conversion or reduction, if `pick` is 1."""
        constant, slope = conversion.line
        if conversion.cut < 0:
            constant, slope = constant + slope, 0.0
        program.costs[pick] += constant * SCALE
        if slope:
            product = program.variable(slope * SCALE, upper=float(count))
            program.row({product: 1.0, widest: -1.0, pick: -float(count)}, low=-float(count))

    picks = forms_program(
        problem,
        program,
        way_cost=lambda step, way: 0.0,
        charge_conversion=lambda value, edge, pick: pays(template.conversion_costs[value][edge], pick),
    )
    for step, each in zip(template.steps, picks, strict=True):
        for passes in ((0,), (1, 2)):
            taken = program.variable(1.0, upper=np.inf)
            for way, pick in zip(step.ways, each, strict=True):
                for kind in range(kinds) if way.passes else ():
                    for lines in itertools.product(*(way.passes[p][kind] or ((0.0, 0.0),) for p in passes)):
                        first, second = (SCALE * sum(column) for column in zip(*lines, strict=True))
                        if way.cut < 0:
                            first, second = first + second, 0.0
                        big = max(first + second, 0.0)
                        program.row({taken: 1.0, fractions[kind]: -second, pick: -big}, low=first - big)
        for way, pick in zip(step.ways, each, strict=True):
            program.costs[pick] += way.once_s * SCALE
            for conversion in (way.talk, way.reduction):
                if conversion:
                    pays(conversion, pick)
    found = program.solve(gap=3e-3)
    assert found is not None
    return found / SCALE


SCALE = 1e3
"""Seconds are small against the solver's tolerances."""


@pytest.mark.parametrize(
    "seeds", [range(12), *(pytest.param(range(k, k + 20), marks=pytest.mark.slow) for k in range(12, 112, 20))]
)
def test_alternation_is_near_the_joint_optimum(seeds):
    """At most 1 % above it, on more than 100 random clusters."""
    for seed in seeds:
        setting, template = loose_template(seed)
        ours, exact = alternated(setting, template).cost_s, joint_cost(template)
        assert exact * (1 - 1e-4) <= ours <= exact * 1.01, (seed, ours, exact)


def grid(kinds, steps=60):
    """Fractions of devices, one of each kind, that add up to 1."""
    for counts in itertools.product(range(1, steps), repeat=kinds - 1):
        if sum(counts) < steps:
            yield (*(count / steps for count in counts), 1 - sum(counts) / steps)


@pytest.mark.parametrize("seed", range(12))
def test_no_shares_on_a_grid_are_better(seed):
    """A fixed program with devices in step at collectives only: the linear program against trying shares out."""
    setting, template = loose_template(seed)
    choice = searched(template, setting.device_speeds[0])
    stretches = count_segments([choice, choice])
    weights = best_weights(stretches, template.members, 1e-3)
    ours = cost_s(stretches, template.members, weights)
    tried = [cost_s(stretches, template.members, each) for each in grid(len(setting.kinds), 24)]
    assert ours <= min(tried) * (1 + 1e-6)
    assert sum(weights) == pytest.approx(1)


def stretch(*lines, whole=(0.0, 0.0)):
    """Two devices that split one operator and compute another whole; `lines` of each device, seconds of the other."""
    split_ = OpenOption((), 0, 0, (tuple((line,) for line in lines), ((), ()), ((), ())))
    other = OpenOption((), 0, -1, (tuple(((seconds, 0.0),) for seconds in whole), ((), ()), ((), ())))
    return ComputeSegment((), (split_, other))


def test_what_is_computed_whole_counts_in_the_shares():
    """The slow device spends 3 of its seconds on what is whole: the fast one takes more of the rest for that."""
    two = AxisMembers((0, 1))
    assert best_weights([(stretch((0, 1), (0, 3)), 1)], two, 0.0) == pytest.approx((0.75, 0.25))
    burdened = best_weights([(stretch((0, 4), (0, 12), whole=(1, 3)), 1)], two, 0.0)
    assert burdened == pytest.approx((0.875, 0.125))  # 1 + 4 x 7/8 = 3 + 12 / 8
    assert best_weights([(stretch((0, 1), (1, 3)), 1), (stretch((0, 1), (0, 1)), 1)], two, 0.0)[0] > 0.5


def test_a_padded_collective_pulls_shares_together():
    two = AxisMembers((0, 1))
    plain = stretch((0, 1), (0, 3))
    for slope, wanted in ((0.0, 0.75), (10.0, 0.5)):
        converted = ComputeSegment((ConversionCost((0.0, slope), 0),), plain.ways)
        assert best_weights([(converted, 1)], two, 0.0)[0] == pytest.approx(wanted)


def test_memory_bounds_the_shares():
    two = AxisMembers((0, 1))
    rows = [(stretch((0, 1), (0, 3)), 1)]
    small = (MemoryRoom(100, 1000, 700), MemoryRoom(100, 1000, 10**6))
    assert best_weights(rows, two, 0.0, small) == pytest.approx((0.6, 0.4))
    none = (MemoryRoom(800, 1000, 700), MemoryRoom(100, 1000, 10**6))
    assert best_weights(rows, two, 0.0, none) is None


def test_alike_devices_get_equal_shares():
    choice = AxisMembers((0, 1, 1, 0))
    one = stretch((0, 1), (0, 2))
    weights = best_weights([(one, 3)], choice, 0.0)
    assert weights == pytest.approx((1 / 3, 1 / 6, 1 / 6, 1 / 3))


def test_rounding_gives_everyone_a_unit_and_keeps_the_order():
    for seed in range(50):
        draw = random.Random(seed)
        weights = sorted((draw.random() for _ in range(draw.randrange(2, 6))), reverse=True)
        weights = tuple(weight / sum(weights) for weight in weights)
        for shares in round_weights(weights, [8, 32]):
            assert min(shares) >= 1
            assert list(shares) == sorted(shares, reverse=True)
    assert (3, 1) in round_weights((0.74, 0.26), [8])
    assert (37, 13) in round_weights((0.74, 0.26), [100])


def test_a_record_keeps_the_shares_of_its_own_program():
    """The second program is worse: its shares must not stay with the first (the released HAP mixed them up)."""
    programs = {0: "good", 1: "worse"}
    costs = {("good", 0): 5.0, ("good", 1): 4.0, ("worse", 1): 6.0, ("worse", 2): 5.5}
    record = alternate_searches(
        [0],
        search=programs.get,
        improve=lambda program: [1] if program == "good" else [2],
        cost=lambda program, shares: costs.get((program, shares)),
    )
    assert (record.program, record.shares, record.cost_s) == ("good", 1, 4.0)


@pytest.mark.parametrize("memory_bytes", [WORKSPACE_BYTES // 2, WORKSPACE_BYTES])
def test_devices_without_room_for_anything_are_refused(memory_bytes):
    setting = random_setting(0)
    kinds = tuple(replace(kind, memory_bytes=int(memory_bytes)) for kind in setting.kinds)
    model = model_of(toy_layers(1))
    with pytest.raises(PlanError, match="No program of these layers fits"):
        synthesize_program(ChainSearch(model, replace(setting, kinds=kinds)), model.layers)
