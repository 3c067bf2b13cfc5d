"""Rows that differ in a plan's work: who has how many tokens, what crosses edges, and which layers have no backward."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, chain

from hypothesis import given
from hypothesis import strategies as st
from tests.support.golden_plans import two_modules
from tests.support.plan_toys import toy_model

from pipefit.layout import Mesh, MeshAxis, split_by_shares
from pipefit.model.graph import Model
from pipefit.plan.assemble.packed_rows import (
    MicrobatchGrouping,
    edge_sizes,
    frozen_layers,
    packed_sizes,
    packed_symbols,
)
from pipefit.plan.assemble.pipeline_work import pipeline_work, skeleton_from_plan
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.assemble.shard_programs import ProgramCache
from pipefit.plan.types import EdgeTransfer, SampleSpace

COUNTS = (4, 0, 9, 1, 3, 3, 0, 12)
SPACE = SampleSpace(name="patches", rows=8, tokens=0, counts=COUNTS, squares=tuple(count * 2 for count in COUNTS))


def test_tokens_of_every_microbatch_and_replica() -> None:
    """By hand: eight positions, two microbatches of four, cut 3 to 1."""
    assert packed_sizes(SPACE, 2, (3, 1)) == (((13, 26), (1, 2)), ((6, 12), (12, 24)))
    assert packed_sizes(replace(SPACE, counts=(), tokens=4), 2, (3, 1)) == ()
    assert packed_symbols([SPACE], 2, 0.5) == (("I", 8),)


def test_several_microbatches_together_have_what_all_of_them_have() -> None:
    """By hand: four microbatches of two positions, two of them taken together by two replicas."""
    found = packed_sizes(SPACE, 4, (1, 1), MicrobatchGrouping(2))
    assert found == (((4, 8), (10, 20)),) * 2 + (((6, 12), (12, 24)),) * 2


def test_images_are_divided_whatever_samples_they_are_of() -> None:
    """By hand: the second sample has none, the third of the first microbatch three; two replicas, then one by one."""
    images = ((4,), (), (2, 3, 4), (1,), (3,), (1, 2), (), (12,))
    space = replace(SPACE, counts=tuple(map(sum, images)), squares=(), images=images)
    how = MicrobatchGrouping(1, "images")
    assert packed_sizes(space, 2, (1, 1), how) == (((6, 20), (8, 26)), ((6, 14), (12, 144)))
    together = packed_sizes(space, 4, (1, 1), MicrobatchGrouping(2, "images"))
    assert together == (((6, 20), (8, 26)),) * 2 + (((6, 14), (12, 144)),) * 2


@given(
    st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=12, max_size=12),
    st.sampled_from([1, 2, 3, 6]),
    st.sampled_from([(1,), (1, 1), (2, 1, 1)]),
)
def test_runs_of_images_are_those_of_what_is_taken_together(
    images: list[list[int]], multiple: int, shares: tuple[int, ...]
) -> None:
    """Image by image: where its middle lies among the tokens of all that are taken together says whose it is."""
    microbatches, each = 6, 2
    counts = tuple(map(sum, images))
    space = SampleSpace(name="patches", rows=12, tokens=0, counts=counts, images=tuple(map(tuple, images)))
    group = Mesh(axes=(MeshAxis(name="replica", shares=shares),), devices=tuple(range(len(shares))))
    stops = [*accumulate(shares)]
    how = MicrobatchGrouping(multiple, "images")
    sizes = packed_sizes(space, microbatches, shares, how)
    for number, (total, (_, runs)) in enumerate(
        edge_sizes(space, microbatches, group, group, (MicrobatchGrouping(), how))
    ):
        first = number // multiple * multiple * each
        together = [*chain.from_iterable(images[first : first + multiple * each])]
        held, has, at = [0] * len(shares), [0] * len(shares), 0
        start = sum(counts[first : number * each])
        for size in together:
            owner = next(i for i, stop in enumerate(stops) if 2 * sum(together) * stop > (2 * at + size) * stops[-1])
            has[owner] += size
            held[owner] += max(0, min(at + size, start + total) - max(at, start))
            at += size
        assert [stop - begin for begin, stop in runs] == held and sum(held) == total
        assert [tokens for tokens, _ in sizes[number]] == has


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
    space = SampleSpace(name="patches", rows=12, tokens=0, counts=tuple(counts))
    groups = [Mesh(axes=(MeshAxis(name="replica", shares=own),), devices=tuple(range(len(own)))) for own in (one, two)]
    places = [place for place, count in enumerate(counts) for _ in range(count)]
    ways = (MicrobatchGrouping(multiples[0]), MicrobatchGrouping(multiples[1]))
    for number, (total, ends) in enumerate(edge_sizes(space, microbatches, *groups, ways)):
        own = [place for place in places if place // each == number]
        assert total == len(own)
        for runs, shares, multiple in zip(ends, (one, two), multiples, strict=True):
            unit = number // multiple * multiple * each
            held = [
                [start <= place - unit < stop for place in own]
                for start, stop in split_by_shares(each * multiple, shares)
            ]
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
    space = SampleSpace(
        name="pictures", rows=8, tokens=0, counts=counts, squares=tuple(count * count for count in counts)
    )
    wire = EdgeTransfer(sent=("G1",), wire=("G1",), received=("G1",))
    seam = replace(golden.plan.edges[0], forward=wire, gradient=wire)
    plan = replace(golden.plan, spaces=(golden.plan.spaces[0], space), edges=(seam, golden.plan.edges[1]))
    work = pipeline_work(skeleton_from_plan(plan), ProgramCache(golden.model))
    assert work.stages[0].packed[2] == ((40, 1600), (3, 9), (0, 0)), "two rows on three replicas: one has none"
    assert len(work.edges[0].ragged) == 4 and not work.edges[1].ragged
    moved = [sum(size for _, _, size in ahead) for ahead, _ in work.edges[0].ragged]
    assert moved == [4 * 8 * tokens for tokens in (8, 1, 43, 4)], "float32 vectors of 8"
    timeline = simulate_plan(plan, golden.model, golden.cluster).timeline
    times = {str(span.action): span.stop_s - span.start_s for span in timeline.all_spans()}
    assert (
        len({round(times[f"1F{m}"], 12) for m in range(4)}) == 1 < len({round(times[f"0F{m}"], 12) for m in range(4)})
    )
