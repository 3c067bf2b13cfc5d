"""The local search over slicings: against all slicings of short ones, on the simulator, under a limit, in bounds."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from pipefit.cost.types import ActionTable, Array, CostTable, Ints
from pipefit.plan.slicing.cuts import equal_cost, slice_times, uniform_slices
from pipefit.plan.slicing.refine import Slices, SlicingScore, refine_slices, stretch_slices
from pipefit.plan.slicing.terapipe import best_slicing
from pipefit.schedule.families import find_family
from pipefit.schedule.problem import ScheduleProblem, linear_placement, uniform_costs
from pipefit.simulate import simulate_schedule


def every_slicing(length: int) -> list[Slices]:
    return [
        tuple(np.diff([0, *inner, length]).tolist())
        for number in range(length)
        for inner in itertools.combinations(range(1, length), number)
    ]


def block(tokens: Ints, past: Ints) -> Array:
    """Seconds of a slice of a sequence of 2,048: linear work 1, attention 1, and 2 % anew for every slice."""
    return 0.02 + tokens / 2048 + 2 * tokens * (past + tokens / 2) / 2048**2


def costs_of(slices: Slices, stages: int, head: float = 0.0) -> CostTable:
    """A chain of equal stages; the last one also has a head, which takes `head` seconds of a whole sequence. A slice's
    forward holds its tokens' share of 1 byte, its backward frees it."""
    forward = np.tile(slice_times(slices, block), (stages, 1, 1))
    forward[-1] += head * np.asarray(slices) / sum(slices)
    share = np.asarray(slices)[None, None, :] / sum(slices)
    table = uniform_costs(linear_placement(stages))

    def action(time_s: Array, held: Array) -> ActionTable:
        return ActionTable(time_s=time_s, held_bytes=held, peak_bytes=np.zeros((1, 1, 1)))

    table.actions["F"], table.actions["B"] = action(forward, share), action(2 * forward, -share)  # type: ignore[index]
    return table


def simulated(
    slices: Slices, stages: int, sequences: int, limit: float = float("inf"), head: float = 0.0
) -> SlicingScore:
    """Of a step of slice-1F1B; `limit` is in sequences that a stage may hold."""
    problem = ScheduleProblem(placement=linear_placement(stages), microbatches=sequences, slices=len(slices))
    timeline = simulate_schedule(find_family("1f1b").build(problem), costs_of(slices, stages, head))
    return max(0.0, float(timeline.peak_bytes.max()) - limit), timeline.makespan_s


@pytest.mark.parametrize("seed", range(25))
def test_near_the_best_of_all_slicings(seed: int) -> None:
    """On TeraPipe's objective, from whole sequences, which has plateaus: of several longest slices one alone does not
    shorten the step."""
    draw = random.Random(seed)
    length, stages, overhead, ratio = (
        draw.randint(5, 10),
        draw.randint(2, 9),
        draw.choice([0.1, 0.5]),
        draw.choice([0.0, 0.1, 0.5]),
    )

    def value_of(slices: Slices) -> SlicingScore:
        times = [overhead + n * (1 + ratio * (past + n / 2)) for n, past in zip(slices, _past(slices), strict=True)]
        return 0.0, sum(times) + (stages - 1) * max(times)

    best_s = min(map(value_of, every_slicing(length)))[1]
    starts = [uniform_slices(length, number) for number in (1, 2, 4)]
    found = refine_slices(starts, value_of, evaluations=10_000)
    assert best_s <= found.value[1] <= 1.06 * best_s
    assert found.value == value_of(found.slices) and sum(found.slices) == length


def test_better_than_equal_cost_where_the_last_stage_has_more_to_do() -> None:
    """A head makes the later slices of the last stage as expensive as the first: what equal-cost cuts cannot know."""
    starts = [equal_cost(2048, number, block, 64) for number in (5, 6, 7)]
    found = refine_slices(starts, lambda slices: simulated(slices, 6, 3, head=0.6), multiple=64)
    assert found.value[1] < 0.99 * min(simulated(start, 6, 3, head=0.6)[1] for start in starts)
    assert sum(found.slices) == 2048 and all(size % 64 == 0 for size in found.slices)


def test_better_under_1f1b_than_the_program_for_all_forwards_first() -> None:
    program = best_slicing(2048, 8, block, multiple=32, sequences=4).slices
    found = refine_slices(
        [program, equal_cost(2048, len(program), block, 32)], lambda s: simulated(s, 8, 4), multiple=32
    )
    assert found.value < simulated(program, 8, 4)


def test_a_slicing_that_fits_is_found_from_one_that_does_not() -> None:
    """Long first slices fill the first stage: under the limit they must be shorter than equal cost would have them."""
    start = equal_cost(2048, 4, block, 64)
    limit = 0.9 * simulated(start, 4, 4, limit=0.0)[0]
    found = refine_slices([start], lambda slices: simulated(slices, 4, 4, limit), multiple=64, evaluations=60)
    assert simulated(start, 4, 4, limit)[0] > 0 == found.value[0]
    assert found.value == simulated(found.slices, 4, 4, limit)


def test_never_more_evaluations_than_allowed_and_the_same_every_time() -> None:
    calls: list[Slices] = []

    def value_of(slices: Slices) -> SlicingScore:
        calls.append(slices)
        return simulated(slices, 4, 2)

    starts = [uniform_slices(2048, 4, 8), equal_cost(2048, 5, block, 8)]
    first = refine_slices(starts, value_of, multiple=8, evaluations=30)
    assert len(calls) == first.evaluations <= 30 and len(set(calls)) == len(calls)
    assert refine_slices(starts, value_of, multiple=8, evaluations=30) == first
    assert refine_slices(starts, value_of, evaluations=0).slices == starts[0]


def test_what_is_left_over_stays_with_the_last_slice() -> None:
    found = refine_slices([uniform_slices(1037, 3, 64)], lambda slices: (0.0, float(max(slices))), multiple=64)
    assert sum(found.slices) == 1037 and all(size % 64 == 0 for size in found.slices[:-1]) and min(found.slices) >= 64
    assert max(found.slices) <= 77 + 64


def test_another_number_of_slices_keeps_the_proportions() -> None:
    assert stretch_slices((40, 24, 16, 16), 2) == (64, 32)
    assert stretch_slices((40, 24, 16, 16), 8) == (20, 20, 12, 12, 8, 8, 8, 8)
    assert stretch_slices((8, 1, 1), 10) == (1,) * 10
    assert stretch_slices((64, 64, 77), 2, 64) == (128, 77)


def _past(slices: Slices) -> list[int]:
    return [0, *itertools.accumulate(slices[:-1])]
