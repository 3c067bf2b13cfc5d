"""The search over forms against brute force and against the mixed-integer program, on random programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.exact_programs import brute_force, exact_cost, random_problem

from pipefit.shard import joining
from pipefit.shard.frontier import FormProblem, PricedOption, PricedStep, solve_between, solve_program


def replayed_s(problem, solution):
    """The cost of a solution, by carrying it out: every form that is read must be held, and is paid for here."""
    held = {value: {form} for value, form in problem.given.items()}
    total = 0.0

    def convert(moves):
        nonlocal total
        for value, source, target in moves:
            assert source in held[value], "converted from a form that nobody has"
            total += problem.conversions[value][source, target]
            held[value].add(target)

    for step, number, moves in zip(problem.steps, solution.ways, solution.before, strict=True):
        convert(moves)
        way = step.ways[number]
        assert all(form in held[value] for value, form in zip(step.inputs, way.needs, strict=True))
        held[step.output] = {way.gives}
        total += way.cost_s
    convert(solution.after)
    assert all(form in held[value] for value, form in problem.wanted.items())
    return total


@pytest.mark.parametrize("operators", range(1, 7))
def test_equal_to_brute_force(operators):
    solved = 0
    for seed in range(40):
        problem = random_problem(1000 * operators + seed, operators)
        found, wanted = solve_program(problem), brute_force(problem)
        assert (found is None) == (wanted is None)
        if found is not None:
            assert found.cost_s == pytest.approx(wanted, abs=1e-9)
            assert replayed_s(problem, found) == pytest.approx(found.cost_s, abs=1e-9)
            solved += 1
    assert solved >= 20


def test_equal_to_the_mixed_integer_program():
    solved = 0
    for seed in range(300):
        problem = random_problem(seed, 3 + seed % 8, values=1 + seed % 3)
        found, wanted = solve_program(problem), exact_cost(problem)
        assert (found is None) == (wanted is None), seed
        if found is not None:
            assert found.cost_s == pytest.approx(wanted, rel=1e-6), seed
            solved += 1
    assert solved >= 200


def test_several_starts_and_ends_in_one_pass():
    solved = 0
    for seed in range(12):
        problem = random_problem(seed, 8)
        ends = [dict.fromkeys(problem.wanted, form) for form in range(4)]
        starts = [dict.fromkeys(problem.given, 0) | {0: form} for form in range(4)]
        together = {pair: found.build_solution() for pair, found in solve_between(problem, starts, ends).items()}
        for first, start in enumerate(starts):
            for second, end in enumerate(ends):
                alone = replace(problem, given=start, wanted=end)
                found = together.get((first, second))
                wanted = exact_cost(alone)
                assert (wanted is None) == (found is None)
                if found is not None:
                    assert found.cost_s == pytest.approx(wanted)
                    assert replayed_s(alone, found) == pytest.approx(found.cost_s)
                    solved += 1
    assert solved >= 40


def test_two_steps_with_too_many_ways_are_not_joined(monkeypatch):
    """The search over states alone gives the same."""
    costs = [solve_program(random_problem(seed, 9, values=2)) for seed in range(40)]
    monkeypatch.setattr(joining, "MAX_OPTION_PAIRS", 0)
    assert any(found is not None for found in costs)
    for seed, found in enumerate(costs):
        alone = solve_program(random_problem(seed, 9, values=2))
        assert (alone is None) == (found is None)
        assert alone is None or alone.cost_s == pytest.approx(found.cost_s, abs=1e-9)


def test_a_conversion_is_paid_once_for_all_that_read_it():
    """Two readers of the whole value: one gather, although it costs more than either saves."""
    reader = PricedOption((0,), 0, 1.0)
    split = PricedOption((2,), 0, 3.5)
    steps = (PricedStep((0,), 1, (reader, split)), PricedStep((0,), 2, (reader, split)))
    problem = FormProblem(steps=steps, conversions=({(2, 0): 4.0}, {}, {}), given={0: 2}, wanted={1: 0, 2: 0})
    found = solve_program(problem)
    assert found is not None
    assert (found.cost_s, found.ways, found.before) == (6.0, (0, 0), (((0, 2, 0),), ()))


def test_a_form_on_the_way_is_used_again():
    """P to G1 to I costs more than P to I, and is right where G1 is wanted as well."""
    steps = (PricedStep((0,), 1, (PricedOption((0,), 0, 0.0),)), PricedStep((0,), 2, (PricedOption((3,), 0, 0.0),)))
    conversions = {(1, 0): 2.0, (1, 3): 1.5, (3, 0): 1.0}
    found = solve_program(
        FormProblem(steps=steps, conversions=(conversions, {}, {}), given={0: 1}, wanted={1: 0, 2: 0})
    )
    assert found is not None
    assert found.cost_s == 2.5
    assert found.before == (((0, 1, 3), (0, 3, 0)), ())
