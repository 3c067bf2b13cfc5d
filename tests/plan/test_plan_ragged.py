"""Rows that differ in a plan's work: who has how many tokens, what crosses edges, and which layers have no backward."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from golden_plans import two_modules
from hypothesis import given
from hypothesis import strategies as st
from plan_toys import toy_model

from pipefit.layout import Axis, Group, split
from pipefit.model.graph import Model
from pipefit.plan.predict import simulate_plan
from pipefit.plan.ragged import conditions, edge_sizes, frozen_layers, packed_sizes
from pipefit.plan.sharded import Programs
from pipefit.plan.types import Space, Wire
from pipefit.plan.work import parts_of, pipeline_work

COUNTS = (4, 0, 9, 1, 3, 3, 0, 12)
SPACE = Space(name="patches", rows=8, tokens=0, counts=COUNTS, squares=tuple(count * 2 for count in COUNTS))


def test_tokens_of_every_microbatch_and_replica() -> None:
    """By hand: eight positions, two microbatches of four, cut 3 to 1."""
    assert packed_sizes(SPACE, 2, (3, 1)) == (((13, 26), (1, 2)), ((6, 12), (12, 24)))
    assert packed_sizes(replace(SPACE, counts=(), tokens=4), 2, (3, 1)) == ()
    assert conditions([SPACE], 2, 0.5) == (("I", 8),)


def test_several_microbatches_together_have_what_all_of_them_have() -> None:
    """By hand: four microbatches of two positions, two of them taken together by two replicas."""
    found = packed_sizes(SPACE, 4, (1, 1), 2)
    assert found == (((4, 8), (10, 20)),) * 2 + (((6, 12), (12, 24)),) * 2


@given(
    st.lists(st.integers(0, 5), min_size=12, max_size=12),
    st.sampled_from([(1, 1), (2, 1), (3, 2), (1, 6), (6, 3)]),
    st.sampled_from([(1,), (1, 1), (3, 1)]),
    st.sampled_from([(1,), (1, 1), (1, 2)]),
)
def test_who_holds_which_tokens_of_a_microbatch_goes_by_what_stages_take_together(
    counts: list[int], multiples: tuple[int, int], one: tuple[int, ...], two: tuple[int, ...]
) -> None:
    """Token by token: the position that it belongs to tells its microbatch, and which replica has it."""
    microbatches, each = 6, 2
    space = Space(name="patches", rows=12, tokens=0, counts=tuple(counts))
    groups = [Group(axes=(Axis(name="replica", shares=own),), devices=tuple(range(len(own)))) for own in (one, two)]
    places = [place for place, count in enumerate(counts) for _ in range(count)]
    for number, (total, ends) in enumerate(edge_sizes(space, microbatches, *groups, multiples)):
        own = [place for place in places if place // each == number]
        assert total == len(own)
        for runs, shares, multiple in zip(ends, (one, two), multiples, strict=True):
            unit = number // multiple * multiple * each
            held = [[start <= place - unit < stop for place in own] for start, stop in split(each * multiple, shares)]
            sizes = [sum(row) for row in held]
            stops = [*accumulate(sizes)]
            assert runs == list(zip([0, *stops[:-1]], stops, strict=True))


def test_layers_without_a_backward_are_those_before_the_first_trained_one() -> None:
    model = toy_model(2)
    assert frozen_layers(model) == {"language": 0}
    assert frozen_layers(frozen(model, "embed")) == {"language": 1}
    assert frozen_layers(frozen(model, "embed", "block", "head")) == {"language": 0}, "nothing is trained at all"
    assert frozen_layers(frozen(model, "block")) == {"language": 0}, "the embedding before them is trained"


def frozen(model: Model, *names: str) -> Model:
    graphs = {
        key: replace(graph, parameters=tuple(replace(one, trainable=key not in names) for one in graph.parameters))
        for key, graph in model.graphs.items()
    }
    return replace(model, graphs=graphs)


def test_a_golden_plan_with_counts_is_simulated_with_them() -> None:
    golden = two_modules()
    counts = (8, 0, 0, 1, 40, 3, 2, 2)
    space = Space(name="pictures", rows=8, tokens=0, counts=counts, squares=tuple(count * count for count in counts))
    wire = Wire(sent=("G1",), wire=("G1",), received=("G1",))
    seam = replace(golden.plan.edges[0], forward=wire, gradient=wire)
    plan = replace(golden.plan, spaces=(golden.plan.spaces[0], space), edges=(seam, golden.plan.edges[1]))
    work = pipeline_work(parts_of(plan), Programs(golden.model))
    assert work.stages[0].packed[2] == ((40, 1600), (3, 9), (0, 0)), "two rows on three replicas: one has none"
    assert len(work.edges[0].ragged) == 4 and not work.edges[1].ragged
    moved = [sum(size for _, _, size in ahead) for ahead, _ in work.edges[0].ragged]
    assert moved == [4 * 8 * tokens for tokens in (8, 1, 43, 4)], "float32 vectors of 8"
    timeline = simulate_plan(plan, golden.model, golden.cluster).timeline
    times = {str(span.action): span.stop_s - span.start_s for span in timeline.spans()}
    assert (
        len({round(times[f"1F{m}"], 12) for m in range(4)}) == 1 < len({round(times[f"0F{m}"], 12) for m in range(4)})
    )
