"""Plans, runs and traces for the tests of show/: small models simulated on data-sheet clusters, runs made up from them.

A made-up run follows its plan's own prediction with every time stretched by a known factor, so that what the report
must say of it is known.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.support.plan_toys import toy_cluster, toy_model

from pipefit import cluster as clusters
from pipefit.cluster.types import Cluster
from pipefit.codec import dump_text
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import AlternativePlan, Job, Plan
from pipefit.show.subject import ReportSubject, make_subject
from pipefit.show.trace import trace_document
from pipefit.simulate.timeline import TimelineSpan

ALTERNATIVES = (
    AlternativePlan(
        decisions={"stages": "2", "schedule": "gpipe"},
        step_s=0.5,
        peak_bytes=9e10,
        limit_bytes=8e10,
        reason="needs 9.3 GiB more than a device has",
    ),
    AlternativePlan(
        decisions={"stages": "1", "schedule": "1f1b"},
        step_s=0.4,
        peak_bytes=1e10,
        limit_bytes=8e10,
        reason="<b>slower</b> by 20 %: reductions",
    ),
)


def toy_plan(
    *, blocks: int = 9, hosts: int = 1, devices: int = 4, batch: int = 16, sequence: int = 64, **decisions: object
) -> tuple[Plan, Cluster]:
    """A predicted plan of `blocks` + 3 layers, and its cluster. Four stages and eight microbatches by default."""
    model, cluster = toy_model(blocks), toy_cluster(hosts, devices)
    settings = ParallelConfig(**{"stages": 4, "microbatches": 8, "schedule": "1f1b", **decisions})  # type: ignore[arg-type]
    plan = build_plan(model, cluster, Job(batch=batch, sequence=sequence), settings, name="toy")
    plan = add_prediction(plan, model, simulate_plan(plan, model, cluster), lower_bound_s=1e-4)
    return replace(plan, alternatives=ALTERNATIVES), cluster


def toy_subject(blocks: int = 9, **choices: object) -> ReportSubject:
    """The subject of `toy_plan` without a run."""
    plan, cluster = toy_plan(blocks=blocks, **choices)  # type: ignore[arg-type]
    return make_subject(plan, toy_model(blocks), cluster)


def write_toy_run(
    directory: Path, plan: Plan, cluster: Cluster, *, stretch: float = 1.1, steps: int = 20, blocks: int = 9,
    traced: bool = True, waits: bool = True,
) -> Path:  # fmt: skip
    """A run directory as `pipefit train` leaves it: all times are the predicted ones times `stretch`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").write_text(dump_text(plan), encoding="utf-8")
    clusters.save_cluster_file(cluster, directory / "cluster.json")
    timeline = simulate_plan(plan, toy_model(blocks), cluster).timeline
    step_s = timeline.makespan_s * stretch
    lines: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        lines.append({
            "step": step, "loss": 5.0 / step + 1.0, "grad_norm": 1.0, "lr": 1e-3,
            "step_s": step_s * (3 if step == 1 else 1), "tokens": plan.job.batch * plan.job.sequence,
            "memory_bytes": peak_bytes(plan, plan.used_devices[0]) * stretch, "memory_share": 0.1,
        })  # fmt: skip
        if step % 10 == 0:
            lines.append({"step": step, "eval_loss": 5.0 / step + 1.2, "eval_s": 0.1})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if traced:
        ranks = []
        for rank, device in enumerate(plan.used_devices):
            spans, wait_s = toy_spans(plan, timeline, device, stretch)
            listed = [[str(span.action), span.start_s, span.stop_s] for span in spans]
            if waits:
                listed = [[*span, wait] for span, wait in zip(listed, wait_s, strict=True)]
            ranks.append(
                {
                    "rank": rank,
                    "spans": listed,
                    "data_s": step_s * 0.02,
                    "memory_bytes": peak_bytes(plan, device) * stretch,
                }
            )
        document = trace_document(plan.content_hash, steps, ranks)
        (directory / "trace.json").write_text(json.dumps(document), encoding="utf-8")
    return directory


def toy_spans(plan: Plan, timeline, device: int, stretch: float) -> tuple[list[TimelineSpan], list[float]]:  # type: ignore[no-untyped-def]
    """What the worker of a device would have traced: actions one after the other, waiting at their beginning."""
    lane = next(
        lane
        for stage, lane in enumerate(plan.order.placement)
        if device in plan.groups[plan.stages[stage].group].devices
    )
    actions = timeline.schedule.lanes[lane]
    starts, stops = timeline.starts_s[lane], timeline.stops_s[lane]
    spans, wait_s, clock = [], [], 0.0
    for action, start, stop in zip(actions, starts.tolist(), stops.tolist(), strict=True):
        if action.kind.startswith(("SEND", "RECV")):
            begin = end = clock
        else:
            begin, end = clock, max(clock, stop * stretch)
        spans.append(TimelineSpan(lane, action, begin, end))
        wait_s.append(max(0.0, min(start * stretch, end) - begin) if action.kind in ("F", "I", "W", "B") else 0.0)
        clock = end
    return spans, wait_s


def peak_bytes(plan: Plan, device: int) -> float:
    """The peak that the plan predicts for a device."""
    assert plan.prediction is not None
    lanes = [lane for lane in range(len(plan.prediction.lanes)) if device in plan.lane_mesh(lane).devices]
    return plan.prediction.lanes[lanes[0]].peak_bytes
