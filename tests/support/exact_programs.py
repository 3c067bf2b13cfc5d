"""Oracles for the search over forms: brute force, and the mixed-integer program of HAP's notes, section 5.3 (HiGHS).

The mixed-integer program here lets a value be converted through several forms, as the search does: the conversions of
a value are a flow from the form it is made in to every form that some consumer wants, each edge paid once.
"""

from __future__ import annotations

import itertools
import random

import numpy as np

from pipefit.shard.frontier import FormProblem, PricedOption, PricedStep

FORMS = 4
"""Of random programs: I, P, G0, G1."""

ALL_FORMS = 6
"""Of any program here: G2 and G3 as well."""


def random_problem(seed: int, operators: int, values: int = 2) -> FormProblem:
    """A program of so many operators on random earlier values, with random ways, costs and conversions."""
    draw = random.Random(seed)
    given = {value: draw.randrange(FORMS) for value in range(values)}
    steps = []
    for place in range(operators):
        known = range(values + place)
        inputs = tuple(draw.choice(known) for _ in range(draw.choice((0, 1, 1, 2, 2))))
        ways = tuple(
            PricedOption(
                tuple(draw.randrange(FORMS) for _ in inputs), draw.randrange(FORMS), draw.randrange(1, 60) / 10
            )
            for _ in range(draw.randrange(1, 5))
        )
        steps.append(PricedStep(inputs, values + place, ways))
    conversions = []
    for _ in range(values + operators):
        edges = [edge for edge in itertools.permutations(range(FORMS), 2) if draw.random() < 0.6]
        conversions.append({edge: draw.choice((0, *range(1, 40))) / 10 for edge in edges})
    made = range(values, values + operators)
    wanted = {value: draw.randrange(FORMS) for value in draw.sample(made, min(2, operators))}
    return FormProblem(steps=tuple(steps), conversions=tuple(conversions), given=given, wanted=wanted)


def brute_force(problem: FormProblem) -> float | None:
    """The cost of the cheapest program: every combination of ways, every set of conversions."""
    known: dict[tuple[int, int, frozenset[int]], float] = {}

    def conversions_s(value: int, made: int, needed: frozenset[int]) -> float:
        """The cheapest set of conversions, as a shortest path over sets of forms held."""
        key = value, made, needed
        if key not in known:
            costs = {frozenset([made]): 0.0}
            for _ in range(FORMS):
                for held, cost in list(costs.items()):
                    for (source, target), seconds in problem.conversions[value].items():
                        if source in held:
                            more = held | {target}
                            costs[more] = min(costs.get(more, np.inf), cost + seconds)
            known[key] = min((cost for held, cost in costs.items() if needed <= held), default=np.inf)
        return known[key]

    best = np.inf
    for ways in itertools.product(*(step.ways for step in problem.steps)):
        made = dict(problem.given)
        needed: dict[int, set[int]] = {value: {form} for value, form in problem.wanted.items()}
        for step, way in zip(problem.steps, ways, strict=True):
            made[step.output] = way.gives
            for value, form in zip(step.inputs, way.needs, strict=True):
                needed.setdefault(value, set()).add(form)
        cost = sum(way.cost_s for way in ways)
        cost += sum(conversions_s(value, made[value], frozenset(forms)) for value, forms in needed.items())
        best = min(best, cost)
    return None if best == np.inf else float(best)


class Milp:
    """A mixed-integer program, written row by row."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.integral: list[int] = []
        self.upper: list[float] = []
        self.rows: list[dict[int, float]] = []
        self.bounds: list[tuple[float, float]] = []

    def variable(self, cost: float = 0.0, integral: bool = False, upper: float = 1.0) -> int:
        self.costs.append(cost)
        self.integral.append(int(integral))
        self.upper.append(upper)
        return len(self.costs) - 1

    def row(self, terms: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        self.rows.append(terms)
        self.bounds.append((low, high))

    def solve(self, gap: float = 0.0) -> float | None:
        """The optimum, or with a relative `gap` a proven lower bound within that of it."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import lil_matrix

        matrix = lil_matrix((len(self.rows), len(self.costs)))
        for place, terms in enumerate(self.rows):
            for variable, factor in terms.items():
                matrix[place, variable] = factor
        low, high = zip(*self.bounds, strict=True)
        found = milp(
            np.array(self.costs),
            constraints=LinearConstraint(matrix.tocsr(), low, high),
            integrality=np.array(self.integral),
            bounds=Bounds(0, np.array(self.upper)),
            options={"mip_rel_gap": gap},
        )
        return None if found.x is None else float(found.mip_dual_bound)


def forms_program(problem, program, way_cost=lambda step, way: way.cost_s, charge_conversion=None):
    """Adds the choice of ways and conversions; returns the binaries of every step's ways.

    `charge_conversion(value, edge, y)` may price a conversion otherwise than by its constant."""
    picks = [[program.variable(way_cost(step, way), True) for way in step.ways] for step in problem.steps]
    for each in picks:
        program.row(dict.fromkeys(each, 1.0), 1, 1)
    producer = {step.output: place for place, step in enumerate(problem.steps)}
    readers: dict[int, list[tuple[int, int]]] = {}
    for place, step in enumerate(problem.steps):
        for slot, value in enumerate(step.inputs):
            readers.setdefault(value, []).append((place, slot))
    for value in {*readers, *problem.wanted}:
        edges = {}
        for edge, seconds in problem.conversions[value].items():
            edges[edge] = program.variable(0.0 if charge_conversion else seconds, True)
            if charge_conversion:
                charge_conversion(value, edge, edges[edge])
        for form in range(ALL_FORMS):
            _flow(problem, program, picks, producer, readers.get(value, []), value, form, edges)
    return picks


def _flow(problem, program, picks, producer, readers, value, form, edges):
    """One unit from the form a value is made in to `form`, for everyone that wants it."""
    flows = {edge: program.variable() for edge in edges}
    for edge, flow in flows.items():
        program.row({flow: 1.0, edges[edge]: -1.0}, high=0)
    made = {}
    for source in range(ALL_FORMS):
        made[source] = program.variable()
        if value in problem.given:
            program.row({made[source]: 1.0}, high=float(problem.given[value] == source))
        else:
            place = producer[value]
            able = [
                pick for pick, way in zip(picks[place], problem.steps[place].ways, strict=True) if way.gives == source
            ]
            program.row({made[source]: 1.0, **dict.fromkeys(able, -1.0)}, high=0)
    for node in range(ALL_FORMS):
        balance = {made[node]: 1.0}
        for (source, target), flow in flows.items():
            if target == node:
                balance[flow] = 1.0
            elif source == node:
                balance[flow] = -1.0
        if node != form:
            program.row(balance, low=0)
            continue
        if problem.wanted.get(value) == form:
            program.row(dict(balance), low=1)
        for place, slot in readers:
            step = problem.steps[place]
            terms = dict(balance)
            for pick, way in zip(picks[place], step.ways, strict=True):
                if way.needs[slot] == form:
                    terms[pick] = terms.get(pick, 0.0) - 1.0
            program.row(terms, low=0)


def exact_cost(problem: FormProblem) -> float | None:
    """The cost of the cheapest program, by HiGHS."""
    program = Milp()
    forms_program(problem, program)
    return program.solve()
