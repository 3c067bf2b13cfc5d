"""`pipefit verify`: whether a plan fits, found out on one device before the whole cluster is taken."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pipefit.cluster import Cluster
    from pipefit.model.graph import Model
    from pipefit.plan.explain.text import TextTable
    from pipefit.plan.types import Plan
    from pipefit.run.verify.verify import RankMemory


def command(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    rank: Annotated[
        list[int] | None, typer.Option(help="A rank to run; repeat for more. Default: those that need most.")
    ] = None,
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    steps: int = typer.Option(2, help="Training steps of every rank."),
    record: Annotated[
        Path | None, typer.Option(help="Add what was measured to this memory file, and learn its correction again.")
    ] = None,
    cluster: str | None = typer.Option(None, help="The cluster, where it is not to be found as the plan names it."),
    local: int | None = typer.Option(None, help="The cluster: this many processes on this machine's CPU."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Run the ranks of PLAN that need most memory, one at a time, on one device: does the plan fit? Exit code 1: no."""
    from pipefit.cli._plans import print_tables
    from pipefit.errors import RunError
    from pipefit.plan.check.rules import load_plan
    from pipefit.plan.explain.text import plan_headline
    from pipefit.run.session.rendezvous import choose_device
    from pipefit.run.session.staleness import captured_model
    from pipefit.run.verify.verify import check_ranks, critical_ranks, verify_rank

    if steps < 1:
        raise RunError("A rank cannot be verified with this.", where="--steps", seen=steps, allowed="1 or more")
    if device not in ("auto", "cpu", "cuda"):
        raise RunError("A rank cannot run there.", where="--device", seen=device, allowed="auto, cpu or cuda")
    plan = _with_prediction(load_plan(path), cluster, local)
    check_ranks(plan, rank or [])
    place = choose_device(device, 0)
    ranks = rank or critical_ranks(plan)
    subject = None if record is None else _open_recordable(record, plan, cluster, local, ranks, place.type)
    model = captured_model(plan)
    found = [verify_rank(plan, model, one, place, steps) for one in ranks]
    fits = all(one.fits_limit for one in found)
    learned = [] if record is None or subject is None else _record_memory(record, plan, subject, found, place.type)
    if as_json:
        facts = {"device": str(place), "fits": fits, "ranks": [_rank_facts(one) for one in found]}
        sys.stdout.write(json.dumps(facts, indent=1) + "\n")
    else:
        print(plan_headline(plan))
        print(f"each rank alone on {_device_words(place.type)}: real steps, what other ranks send is made up")
        print_tables([_memory_table(found)])
        for line in [*_verdict_lines(plan, found), *learned]:
            print(line)
    if not fits:
        sys.exit(1)


def _with_prediction(plan: Plan, cluster: str | None, local: int | None) -> Plan:
    """The plan itself, or with the simulator's prediction where it has none and the cluster is known. A cluster that
    the user names must be the plan's."""
    from pipefit.cli._plans import open_subject
    from pipefit.plan.assemble.predict import add_prediction, simulate_plan

    named = cluster is not None or local is not None
    if not named and (plan.prediction is not None or not plan.cluster):
        return plan
    opened, found = open_subject(plan, None, cluster, local)
    return plan if plan.prediction is not None else add_prediction(plan, opened, simulate_plan(plan, opened, found))


def _open_recordable(
    path: Path, plan: Plan, cluster: str | None, local: int | None, ranks: Sequence[int], device: str
) -> tuple[Model, Cluster]:
    """The plan's model and cluster. Raises before anything is run where what is measured could not be recorded."""
    from pipefit.cli._plans import open_subject
    from pipefit.codec import make_folder
    from pipefit.cost.memory.correction_file import load_memory
    from pipefit.errors import ClusterError
    from pipefit.profile.environment import machine_fingerprint
    from pipefit.run.verify.record import check_recordable

    make_folder(path, "memory file", ClusterError)
    if path.exists():
        load_memory(path)
    model, found = open_subject(plan, None, cluster, local)
    check_recordable(plan, found, ranks, device, machine_fingerprint().get("device", ""))
    return model, found


def _record_memory(
    path: Path, plan: Plan, subject: tuple[Model, Cluster], found: Sequence[RankMemory], device: str
) -> list[str]:
    """Keep what was measured, and say what the file knows now."""
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


def _rank_facts(one: RankMemory) -> dict[str, object]:
    from pipefit.codec import to_data

    return {**to_data(one), "fits": one.fits_limit}


def _memory_table(found: Sequence[RankMemory]) -> TextTable:
    from pipefit.plan.explain.text import TextTable
    from pipefit.units import format_bytes

    rows = []
    for one in found:
        if one.measured is None:
            figures = ("ran out", "", "")
        else:
            peak = one.measured.largest_bytes
            figures = (
                format_bytes(peak),
                f"{one.predicted_bytes / peak - 1:+.1%}",
                f"{peak / one.limit_bytes:.1%}",
            )
        measured, off, share = figures
        rows.append(
            (
                str(one.rank),
                str(one.lane),
                format_bytes(one.predicted_bytes),
                measured,
                off,
                format_bytes(one.limit_bytes),
                share,
                "yes" if one.fits_limit else "NO",
            )
        )
    columns = ("rank", "lane", "predicted", "measured", "prediction off", "limit", "of limit", "fits")
    return TextTable("peak memory", columns, tuple(rows))


def _verdict_lines(plan: Plan, found: Sequence[RankMemory]) -> list[str]:
    from pipefit.run.verify.verify import is_fullest, lane_predictions
    from pipefit.units import format_bytes

    lines = []
    lanes = lane_predictions(plan)
    seen = {one.lane for one in found if is_fullest(plan, one.device)}
    alike = {(lanes[lane].peak_bytes, lanes[lane].limit_bytes) for lane in seen}
    others = [i for i, lane in enumerate(lanes) if (lane.peak_bytes, lane.limit_bytes) not in alike]
    if others:
        fullest = max((lanes[i] for i in others), key=lambda lane: lane.peak_bytes / lane.limit_bytes)
        names = ", ".join(map(str, others))
        lines.append(
            f"not run: the fullest device of lane{'s' if len(others) > 1 else ''} {names}; predicted at most "
            f"{format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.limit_bytes)}"
        )
    if all(one.fits_limit for one in found):
        return [*lines, "the plan fits" if not others else "the ranks that were run fit"]
    bad = next(one for one in found if not one.fits_limit)
    if bad.measured is None:
        words = f"rank {bad.rank} ran out of memory"
    else:
        words = (
            f"rank {bad.rank} needs {format_bytes(bad.measured.largest_bytes - bad.limit_bytes)} more than its limit"
        )
    return [*lines, f"the plan does not fit: {words}"]
