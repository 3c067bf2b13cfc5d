"""The compact form: a decoder written apart from the page's own gives back what was encoded."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.support.show_toys import toy_model, toy_plan, write_toy_run

from pipefit.plan.assemble.predict import simulate_plan
from pipefit.schedule.actions import Action
from pipefit.show import encode
from pipefit.show.trace import from_timeline, read_trace


def numbers(text):
    """The values of a text, bit by bit."""
    bits = []
    values = []
    for letter in text:
        digit = encode.ALPHABET.index(letter)
        bits += [digit >> k & 1 for k in range(5)]
        if not digit & 32:
            magnitude = sum(bit << k for k, bit in enumerate(bits[1:]))
            values.append(-magnitude if bits[0] else magnitude)
            bits = []
    assert not bits
    return values


def actions(packed, slices):
    """The actions of a packed sequence."""
    places = []
    for index, place in enumerate(packed["places"]):
        count = numbers(packed["order"]).count(index)
        if isinstance(place, str):
            flat = numbers(place)
            places.append(list(zip(flat[::2], flat[1::2], strict=True)))
        else:
            rows = [(k // slices, k % slices) for k in range(count)]
            places.append([(m, slices - 1 - s) for m, s in rows] if place else rows)
    queues = [iter(place) for place in places]
    result = []
    for index in numbers(packed["order"]):
        kind, stage, peer, what = packed["words"][index]
        microbatch, slice_ = next(queues[index])
        result.append(Action(kind, stage, microbatch, slice_, peer, what))
    return result


@given(st.lists(st.integers(-(2**40), 2**40)))
def test_numbers_come_back(values):
    assert numbers(encode.encode_numbers(values)) == values


@given(
    st.lists(
        st.builds(
            Action,
            st.sampled_from(["F", "B", "SEND_F", "NORM"]),
            st.integers(-1, 3),
            st.integers(-1, 5),
            st.integers(0, 2),
            st.integers(-1, 3),
            st.sampled_from(["", "context"]),
        ),
        max_size=30,
    ),
    st.integers(1, 3),
)
def test_any_sequence_of_actions_comes_back(sequence, slices):
    assert actions(encode.encode_actions(sequence, slices), slices) == sequence


def test_regular_schedules_need_no_list_of_places():
    plan, _ = toy_plan(slices=(32, 32), schedule="gpipe")
    packed = encode.encode_actions(plan.order.to_schedule().lanes[1], 2)
    kinds = {word[0]: place for word, place in zip(packed["words"], packed["places"], strict=True)}
    assert {kind for kind, place in kinds.items() if isinstance(place, str)} <= {"NORM", "STEP"}


def test_traces_come_back_to_a_millionth_of_the_step(tmp_path):
    plan, cluster = toy_plan(stages=2, replicas=(1, 1))
    directory = write_toy_run(tmp_path / "run", plan, cluster)
    timeline = simulate_plan(plan, toy_model(9), cluster).timeline
    traces = [from_timeline(timeline), read_trace(directory / "trace.json", plan)]
    data = encode.encode_traces(traces, 1)
    rows = [row for trace in traces for row in trace.rows]
    assert len(data["rows"]) == len(rows) == 2 + 4 and data["left_out"] == 0
    assert len(data["sequences"]) == 4  # two lanes, with and without receives: devices of a lane share theirs
    for packed, row in zip(data["rows"], rows, strict=True):
        assert actions(data["sequences"][packed["sequence"]], 1) == list(row.actions)
        flat = np.array(numbers(packed["times"])).reshape(-1, 2)
        stop = np.cumsum(flat.sum(axis=1))
        np.testing.assert_allclose(stop * data["tick_s"], row.stop_s, atol=data["horizon_s"] * 1e-6)
        np.testing.assert_allclose((stop - flat[:, 1]) * data["tick_s"], row.start_s, atol=data["horizon_s"] * 1e-6)
        if row.wait_s is not None:
            waits = np.array(numbers(packed["waits"])) * data["tick_s"]
            np.testing.assert_allclose(waits, row.wait_s, atol=data["horizon_s"] * 1e-6)


def test_of_too_many_rows_the_first_and_the_slowest_of_each_lane_are_kept(tmp_path, monkeypatch):
    plan, cluster = toy_plan(stages=1, microbatches=2, replicas=(1, 1, 1, 1))
    directory = write_toy_run(tmp_path / "run", plan, cluster)
    trace = read_trace(directory / "trace.json", plan)
    slow = trace.rows[2]
    slow.stop_s[-1] += 1.0
    monkeypatch.setattr(encode, "MOST_SPANS", 10)
    data = encode.encode_traces([trace], 1)
    assert [row["device"] for row in data["rows"]] == [0, 2] and data["left_out"] == 2


def test_memory_curves_keep_their_peak_and_never_lie_below_the_truth():
    plan, cluster = toy_plan(microbatches=16)
    timeline = simulate_plan(plan, toy_model(9), cluster).timeline
    for curve in timeline.lane_memory:
        packed = encode.encode_curve(curve, timeline.makespan_s)
        assert len(packed["bytes"]) == encode.CURVE_POINTS and packed["static"] == curve.static_bytes
        assert max(packed["bytes"]) == round(curve.peak_bytes)
        for moment in np.linspace(0, timeline.makespan_s, 997)[1:-1]:
            at = np.searchsorted(curve.time_s, moment, side="right") - 1
            true = curve.bytes[at] if at >= 0 else curve.static_bytes
            assert packed["bytes"][int(moment / timeline.makespan_s * encode.CURVE_POINTS)] >= round(true)
