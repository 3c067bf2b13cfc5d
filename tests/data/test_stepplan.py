"""The step plan: every row once, the same rows under every layout, the divisor, the slices; and feed_arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.data_toys import ArrayCorpus, toy_plan

from pipefit.data.feed_arrays import IGNORE, feed_arrays
from pipefit.data.rows import cut_rows
from pipefit.data.stepplan import batch_shape, evaluation_batches, evaluation_plan, step_plan
from pipefit.errors import DataError, PlanError
from pipefit.plan.types import Plan


@st.composite
def plans(draw: st.DrawFn, batch: int | None = None) -> Plan:
    """Plans of random microbatches, uneven replica shares, multiples and slices."""
    microbatches = draw(st.sampled_from([1, 2, 4, 6]))
    batch = batch or microbatches * draw(st.integers(1, 5))
    microbatches = microbatches if batch % microbatches == 0 else 1
    share = st.integers(0, 5)
    shares = draw(
        st.lists(st.lists(share, min_size=1, max_size=4).filter(any).map(tuple), min_size=1, max_size=3).map(tuple)
    )
    divisors = [m for m in range(1, microbatches + 1) if microbatches % m == 0]
    multiples = tuple(draw(st.sampled_from(divisors)) for _ in shares)
    cuts = sorted(draw(st.sets(st.integers(1, 7), max_size=3)))
    slices = tuple(b - a for a, b in zip([0, *cuts], [*cuts, 8], strict=True))
    return toy_plan(
        batch=batch, sequence=8, microbatches=microbatches, shares=shares, multiples=multiples, slices=slices
    )


@given(plan=plans())
def test_every_row_of_the_batch_belongs_to_one_microbatch_and_replica_of_a_stage(plan: Plan) -> None:
    shape = batch_shape(plan)
    for stage, shares in enumerate(shape.shares):
        seen: list[int] = []
        for microbatch in range(shape.stage_microbatches(stage)):
            for replica in range(len(shares)):
                seen += range(*shape.batch_run(stage, microbatch, replica))
        assert seen == list(range(plan.job.batch))


@given(plan=plans(), data=st.data())
def test_a_row_is_in_the_microbatch_that_the_architecture_says(plan: Plan, data: st.DataObject) -> None:
    """Row r belongs to microbatch r // rows_per_microbatch, whatever the replicas."""
    shape = batch_shape(plan)
    stage = data.draw(st.integers(0, len(plan.stages) - 1))
    per_microbatch = plan.job.batch // shape.stage_microbatches(stage)
    for microbatch in range(shape.stage_microbatches(stage)):
        for replica in range(len(shape.shares[stage])):
            rows = range(*shape.batch_run(stage, microbatch, replica))
            assert all(row // per_microbatch == microbatch for row in rows)


@given(data=st.data(), batch=st.sampled_from([4, 12]), step=st.integers(0, 40))
def test_the_rows_of_a_step_do_not_depend_on_the_layout(data: st.DataObject, batch: int, step: int) -> None:
    rows = cut_rows(9 * 30, 8, 0.1)
    one, two = (step_plan(data.draw(plans(batch)), rows, step) for _ in range(2))
    assert one.rows.tolist() == two.rows.tolist()
    assert one.divisor == two.divisor


@given(plan=plans(), resumed_at=st.integers(0, 20))
def test_resuming_at_a_step_continues_the_same_order(plan: Plan, resumed_at: int) -> None:
    rows = cut_rows(9 * 40, 8, 0)
    batch = plan.job.batch
    through = np.concatenate([step_plan(plan, rows, step).rows for step in range(resumed_at + 3)])
    again = np.concatenate([step_plan(plan, rows, step).rows for step in range(resumed_at, resumed_at + 3)])
    assert through[resumed_at * batch :].tolist() == again.tolist()
    epochs = len(through) // rows.training_count
    for epoch in range(epochs):
        assert sorted(through[epoch * rows.training_count : (epoch + 1) * rows.training_count]) == list(
            range(rows.count)
        )


@given(plan=plans(), tokens=st.integers(9 * 40 - 8, 9 * 40), step=st.integers(0, 3))
def test_feeds_of_a_stage_add_up_to_the_packed_rows_and_the_divisor(plan: Plan, tokens: int, step: int) -> None:
    """Put back together from every (microbatch, replica, slice), the feeds are the rows; the last row is short."""
    corpus = ArrayCorpus(np.random.default_rng(0).integers(1, 99, tokens), 8)
    of_step = step_plan(plan, corpus.rows, step)
    for stage, shares in enumerate(of_step.shape.shares):
        tokens_RT = np.full((plan.job.batch, 8), -1)
        labels_RT, positions_RT = tokens_RT.copy(), tokens_RT.copy()
        for microbatch in range(of_step.shape.stage_microbatches(stage)):
            for replica in range(len(shares)):
                for index, (first, last) in enumerate(of_step.slice_runs):
                    feed = feed_arrays(corpus, of_step, stage, microbatch, replica, index)
                    tokens_RT[feed.rows_B, first:last] = feed.tokens_BT
                    labels_RT[feed.rows_B, first:last] = feed.labels_BT
                    positions_RT[feed.rows_B, first:last] = feed.positions_BT
        for place, row in enumerate(of_step.rows):
            whole = corpus.row(int(row))
            assert tokens_RT[place].tolist() == [0 if t == IGNORE else t for t in whole[:-1]]
            assert labels_RT[place].tolist() == whole[1:].tolist()
            assert positions_RT[place].tolist() == list(range(8))
        assert (labels_RT != IGNORE).sum() == of_step.divisor


def test_labels_are_shifted_before_the_row_is_sliced() -> None:
    corpus = ArrayCorpus(np.arange(9), 8)
    plan = toy_plan(batch=1, sequence=8, microbatches=1, shares=((1,),), slices=(3, 5))
    of_step = step_plan(plan, corpus.rows, 0)
    first, second = (feed_arrays(corpus, of_step, 0, 0, 0, index) for index in range(2))
    assert first.tokens_BT.tolist() == [[0, 1, 2]] and first.labels_BT.tolist() == [[1, 2, 3]]
    assert second.tokens_BT.tolist() == [[3, 4, 5, 6, 7]] and second.labels_BT.tolist() == [[4, 5, 6, 7, 8]]
    assert second.positions_BT.tolist() == [[3, 4, 5, 6, 7]]
    assert {a.dtype for a in (first.tokens_BT, first.labels_BT, first.positions_BT, first.rows_B)} == {
        np.dtype("int64")
    }


def test_uneven_replicas_take_their_share_of_each_microbatch() -> None:
    shape = batch_shape(toy_plan(batch=12, sequence=8, microbatches=2, shares=((2, 1), (1, 1, 0))))
    assert [shape.batch_run(0, m, r) for m in range(2) for r in range(2)] == [(0, 4), (4, 6), (6, 10), (10, 12)]
    assert [shape.batch_run(1, 1, r) for r in range(3)] == [(6, 9), (9, 12), (12, 12)]
    corpus = ArrayCorpus(np.arange(9 * 20), 8)
    empty = feed_arrays(corpus, step_plan(shape, corpus.rows, 0), 1, 1, 2)
    assert empty.tokens_BT.shape == empty.labels_BT.shape == empty.positions_BT.shape == (0, 8)


@given(batch=st.sampled_from([1, 3, 4, 7]), held_out=st.integers(0, 9))
def test_an_evaluation_has_every_held_out_row_once(batch: int, held_out: int) -> None:
    corpus = ArrayCorpus(np.arange(9 * 12 - 4), 8, held_out)
    plan = toy_plan(batch=batch, sequence=8, microbatches=1, shares=((1,),))
    batches = [evaluation_plan(plan, corpus.rows, i) for i in range(evaluation_batches(plan, corpus.rows))]
    seen = [int(row) for each in batches for row in each.rows if row >= 0]
    assert sorted(seen) == sorted(corpus.rows.held_out_rows(0, held_out).tolist()) and len(seen) == held_out
    labels = sum(int((feed_arrays(corpus, each, 0, 0, 0).labels_BT != IGNORE).sum()) for each in batches)
    assert (
        labels
        == sum(each.divisor for each in batches)
        == int(corpus.rows.count_labels(np.array(seen, dtype=int)).sum())
    )


def test_a_corpus_too_small_for_the_batch_is_refused() -> None:
    plan = toy_plan(batch=16, sequence=8, microbatches=4, shares=((1,),))
    with pytest.raises(DataError, match="too small for one batch"):
        step_plan(plan, cut_rows(9 * 15, 8, 0), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"microbatches": 5}, "cannot be cut into equal microbatches"),
        ({"slices": (3, 4)}, "do not add up to the sequence"),
        ({"slices": (8, 0)}, "do not add up to the sequence"),
        ({"multiples": (3,)}, "not a multiple of the stage's microbatches per call"),
    ],
)
def test_a_plan_that_does_not_divide_is_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"batch": 8, "sequence": 8, "microbatches": 4, "shares": ((1,),), **changes}
    with pytest.raises(PlanError, match=message):
        batch_shape(toy_plan(**arguments))  # type: ignore[arg-type]
