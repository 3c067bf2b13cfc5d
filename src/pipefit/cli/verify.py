"""`pipefit verify`: test on one device that a plan fits, before the cluster is used."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.cli._options import takes_options

if TYPE_CHECKING:
    from pipefit.cluster import Cluster
    from pipefit.model.graph import Model
    from pipefit.plan.explain.text import TextTable
    from pipefit.plan.types import Plan
    from pipefit.run.verify.verify import RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of `pipefit verify`."""

    path: Path
    "A plan file."
    rank: tuple[int, ...] = ()
    "A rank to run; repeatable. Default: the ranks with the highest memory use."
    device: str = "auto"
    "auto, cpu or cuda."
    steps: int = 2
    "Training steps of every rank."
    record: Path | None = None
    "Add the measurements to this memory file, and refit its correction."
    cluster: str | None = None
    "The cluster, if it is not found under its name in the plan."
    local: int | None = None
    "The cluster: this many processes on this machine's CPU."
    as_json: bool = False
    "Print the figures as JSON."


@takes_options(VerifyOptions, arguments=("path",), metavars={"path": "PLAN"})
def command(options: VerifyOptions) -> None:
    """Run the ranks of PLAN with the highest memory use, one at a time, on one device. Exit code 1 if the plan does not
    fit."""
    from pipefit.cli._plans import print_tables
    from pipefit.errors import RunError
    from pipefit.plan.check.rules import load_plan
    from pipefit.plan.explain.text import plan_headline
    from pipefit.run.session.rendezvous import choose_device
    from pipefit.run.session.staleness import planned_model
    from pipefit.run.verify.verify import check_ranks, critical_ranks, verify_rank

    device, record = options.device, options.record
    if options.steps < 1:
        raise RunError("The number of steps is too small.", where="--steps", seen=options.steps, allowed="1 or more")
    if device not in ("auto", "cpu", "cuda"):
        raise RunError("A rank cannot run there.", where="--device", seen=device, allowed="auto, cpu or cuda")
    plan = _with_prediction(load_plan(options.path), options.cluster, options.local)
    check_ranks(plan, options.rank)
    target = choose_device(device, 0)
    ranks = options.rank or critical_ranks(plan)
    subject = None if record is None else _open_recordable(options, record, plan, ranks, target.type)
    model = planned_model(plan)
    measurements = [verify_rank(plan, model, rank, target, options.steps) for rank in ranks]
    fits = all(measurement.fits_limit for measurement in measurements)
    learned = (
        [] if record is None or subject is None else _record_memory(record, plan, subject, measurements, target.type)
    )
    if options.as_json:
        facts = {
            "device": str(target),
            "fits": fits,
            "ranks": [_rank_facts(measurement) for measurement in measurements],
        }
        sys.stdout.write(json.dumps(facts, indent=1) + "\n")
    else:
        print(plan_headline(plan))
        print(f"each rank alone on {_device_words(target.type)}: real steps, with synthetic data from other ranks")
        print_tables([_memory_table(measurements)])
        for line in [*_verdict_lines(plan, measurements), *learned]:
            print(line)
    if not fits:
        sys.exit(1)


def _with_prediction(plan: Plan, cluster: str | None, local: int | None) -> Plan:
    """Return the plan with a prediction; the simulator adds a missing one if the cluster is known. A cluster that the
    user names must be the plan's."""
    from pipefit.cli._plans import open_subject
    from pipefit.plan.assemble.predict import add_prediction, simulate_plan

    named = cluster is not None or local is not None
    if not named and (plan.prediction is not None or not plan.cluster):
        return plan
    opened_model, opened_cluster = open_subject(plan, None, cluster, local)
    return (
        plan
        if plan.prediction is not None
        else add_prediction(plan, opened_model, simulate_plan(plan, opened_model, opened_cluster))
    )


def _open_recordable(
    options: VerifyOptions, path: Path, plan: Plan, ranks: Sequence[int], device: str
) -> tuple[Model, Cluster]:
    """Return the plan's model and cluster. Raises, before a rank runs, if the measurements could not be recorded."""
    from pipefit.cli._plans import open_subject
    from pipefit.codec import make_folder
    from pipefit.cost.memory.correction_file import load_memory
    from pipefit.errors import ClusterError
    from pipefit.profile.environment import machine_fingerprint
    from pipefit.run.verify.record import check_recordable

    make_folder(path, "memory file", ClusterError)
    if path.exists():
        load_memory(path)
    model, opened_cluster = open_subject(plan, None, options.cluster, options.local)
    check_recordable(plan, opened_cluster, ranks, device, machine_fingerprint().get("device", ""))
    return model, opened_cluster


def _record_memory(
    path: Path, plan: Plan, subject: tuple[Model, Cluster], found: Sequence[RankMemory], device: str
) -> list[str]:
    """Record the measurements, and return lines on the state of the memory file."""
    from pipefit.cost.memory.correction import LEAST_CONFIGURATIONS
    from pipefit.cost.memory.correction_file import record_runs
    from pipefit.profile.environment import machine_fingerprint
    from pipefit.run.verify.record import memory_runs

    runs = memory_runs(plan, *subject, found, device, machine_fingerprint())
    facts = record_runs(path, runs)
    lines = []
    for kind in sorted({run.kind for run in runs}):
        plans = len({run.configuration for run in facts.runs if run.kind == kind})
        known = facts.corrections.get(kind)
        if known is None:
            words = f"{LEAST_CONFIGURATIONS} are needed for a correction"
        else:
            words = f"errors of plans left out of the fit have a spread of {known.spread:.2%}"
        lines.append(f"{path}: {plans} plan{'s' if plans > 1 else ''} measured on {kind}; {words}")
    return lines


def _device_words(kind: str) -> str:
    return {"cuda": "one GPU, counted by CUDA's allocator"}.get(kind, "this CPU, counted by the allocator's record")


def _rank_facts(measurement: RankMemory) -> dict[str, object]:
    from pipefit.codec import to_data

    return {**to_data(measurement), "fits": measurement.fits_limit}


def _memory_table(found: Sequence[RankMemory]) -> TextTable:
    from pipefit.plan.explain.text import TextTable
    from pipefit.units import format_bytes

    rows = []
    for measurement in found:
        if measurement.measured is None:
            figures = ("ran out", "", "")
        else:
            peak = measurement.measured.largest_bytes
            figures = (
                format_bytes(peak),
                f"{measurement.predicted_bytes / peak - 1:+.1%}",
                f"{peak / measurement.limit_bytes:.1%}",
            )
        measured, off, share = figures
        rows.append(
            (
                str(measurement.rank),
                str(measurement.lane),
                format_bytes(measurement.predicted_bytes),
                measured,
                off,
                format_bytes(measurement.limit_bytes),
                share,
                "yes" if measurement.fits_limit else "NO",
            )
        )
    columns = ("rank", "lane", "predicted", "measured", "prediction off", "limit", "of limit", "fits")
    return TextTable("peak memory", columns, tuple(rows))


def _verdict_lines(plan: Plan, found: Sequence[RankMemory]) -> list[str]:
    from pipefit.run.verify.verify import is_fullest, lane_predictions
    from pipefit.units import format_bytes

    lines = []
    lanes = lane_predictions(plan)
    seen = {measurement.lane for measurement in found if is_fullest(plan, measurement.device)}
    alike = {(lanes[lane].peak_bytes, lanes[lane].limit_bytes) for lane in seen}
    unmeasured_lanes = [i for i, lane in enumerate(lanes) if (lane.peak_bytes, lane.limit_bytes) not in alike]
    if unmeasured_lanes:
        fullest = max((lanes[i] for i in unmeasured_lanes), key=lambda lane: lane.peak_bytes / lane.limit_bytes)
        names = ", ".join(map(str, unmeasured_lanes))
        lines.append(
            f"not run: the fullest device of lane{'s' if len(unmeasured_lanes) > 1 else ''} {names}; predicted at most "
            f"{format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.limit_bytes)}"
        )
    if all(measurement.fits_limit for measurement in found):
        return [*lines, "the plan fits" if not unmeasured_lanes else "the ranks that were run fit"]
    bad = next(measurement for measurement in found if not measurement.fits_limit)
    if bad.measured is None:
        words = f"rank {bad.rank} ran out of memory"
    else:
        words = (
            f"rank {bad.rank} needs {format_bytes(bad.measured.largest_bytes - bad.limit_bytes)} more than its limit"
        )
    return [*lines, f"the plan does not fit: {words}"]
