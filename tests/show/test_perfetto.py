"""Perfetto traces: the Chrome event format, checked against the timeline they come from."""

import itertools
import json

import pytest
from tests.support.show_toys import toy_model, toy_plan, write_toy_run

from pipefit.plan.assemble.predict import simulate_plan
from pipefit.show.perfetto import perfetto_document, write_timeline
from pipefit.show.trace import from_timeline, read_trace


@pytest.fixture
def timeline():
    plan, cluster = toy_plan()
    return simulate_plan(plan, toy_model(9), cluster).timeline


def test_every_action_is_one_complete_event_in_microseconds(timeline, tmp_path):
    file = tmp_path / "trace.json"
    write_timeline(file, timeline)
    document = json.loads(file.read_text())
    assert document["displayTimeUnit"] == "ms"
    events = document["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    spans = timeline.all_spans()
    assert len(complete) == len(spans)
    found = {(event["name"], (event["tid"] - 1) // 2): event for event in complete}
    for span in spans:
        event = found[str(span.action), span.lane]
        assert event["ts"] == pytest.approx(span.start_s * 1e6)
        assert event["dur"] == pytest.approx((span.stop_s - span.start_s) * 1e6)
        assert event["cat"] == span.action.kind
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"lane 0", "lane 3, links"} <= names


def test_events_of_a_thread_that_computes_never_overlap(timeline):
    threads = {}
    for event in perfetto_document([from_timeline(timeline)], timeline)["traceEvents"]:
        if event["ph"] == "X" and event["tid"] % 2:
            threads.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 4
    for runs in threads.values():
        runs.sort()
        assert all(stop <= start + 1e-6 for (_, stop), (start, _) in itertools.pairwise(runs))


def test_arrows_go_from_a_send_to_what_uses_it(timeline):
    events = perfetto_document([from_timeline(timeline)], timeline)["traceEvents"]
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    sends = [span for span in timeline.all_spans() if span.action.kind.startswith("SEND")]
    assert begins.keys() == ends.keys() and len(begins) == len(sends)
    assert all(begins[key]["ts"] <= ends[key]["ts"] and begins[key]["tid"] != ends[key]["tid"] for key in begins)


def test_memory_is_a_counter_that_reaches_the_peak(timeline):
    counters = [
        event for event in perfetto_document([from_timeline(timeline)], timeline)["traceEvents"] if event["ph"] == "C"
    ]
    for lane, peak in enumerate(timeline.peak_bytes):
        own = [event["args"]["bytes"] for event in counters if event["name"] == f"memory of lane {lane}"]
        assert max(own) == pytest.approx(peak)


def test_a_measured_trace_is_a_process_beside_the_prediction(timeline, tmp_path):
    plan, cluster = toy_plan()
    directory = write_toy_run(tmp_path / "run", plan, cluster)
    measured = read_trace(directory / "trace.json", plan)
    events = perfetto_document([from_timeline(timeline), measured], timeline)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["predicted", "measured, step 20"]
    own = [event for event in events if event["pid"] == 2 and event["ph"] == "X"]
    assert len(own) == sum(len(row.actions) for row in measured.rows)
