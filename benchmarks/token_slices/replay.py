"""TeraPipe's ten settings again, in this project's simulator: its slicing, the best schedules without slices, ours.

Every setting keeps its published layout: replicas, stages, shards. All of them run on the same costs
(`v100.py`): an executor that waits for its messages, and the same sum of gradients once a step.

- without: the fastest of GPipe, 1F1B and interleaved 1F1B with one sequence a microbatch;
- TeraPipe: all forwards, then all backwards; slices by its dynamic program on an 8-token grid, and as many sequences a
  microbatch as make its objective least, as its knapsack does for parts that share one slicing;
- ours: what the planner finds with replicas, stages and shards pinned, in the memory of a V100, and with at most the
  share of TeraPipe's activations that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.token_slices.overhead import overhead_of
from benchmarks.token_slices.targets import at_least, at_most
from benchmarks.token_slices.v100 import (
    FITTED,
    Constants,
    Setting,
    StageTime,
    V100Costs,
    cluster_of,
    fit,
    longer,
    model_of,
    published,
    reduction_s,
    settings,
    unsliced_s,
)
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.slicing.cuts import slice_times, uniform_slices
from pipefit.plan.slicing.terapipe import SequenceSlicing, best_slicing
from pipefit.plan.types import Job
from pipefit.simulate import Timeline, simulate_schedule

GRID = 8
"""Tokens of which TeraPipe's slices are multiples."""

QUICK = (5,)
"""Settings of `--quick`: one for which the paper gives the slices."""

NUDGES: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(FITTED, (0.8, 1.25)),
    "floor_s": (0.5, 2.0),
    "backward_floors": (0.5, 2.0),
    "message_s": (0.2, 5.0),
    "score_bytes": (0.5, 2.0),
}
"""By how much constants are changed, one at a time, to see what the speed-ups hang on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A schedule in the simulator."""

    schedule: str
    rows: int
    "Sequences a microbatch."
    slices: tuple[int, ...]
    step_s: float
    "The gradient sum included."
    activations_bytes: float
    "Of the fullest lane, above what always stays."
    peak_bytes: float


def measure(quick: bool = False) -> dict[str, Any]:
    """The whole section."""
    rows = settings()
    constants = fit(rows)
    chosen = [row for row in rows if not quick or row.number in QUICK]
    found = [replayed(row, constants) for row in chosen]
    return {
        "constants": {name: getattr(constants, name) for name in Constants.__dataclass_fields__},
        "fitted": list(FITTED),
        "fit": [
            {"setting": row.number, "published_s": row.without_s, "fitted_s": unsliced_s(row, constants)}
            for row in rows
        ],
        "fit_mean_error": mean(abs(unsliced_s(row, constants) / row.without_s - 1) for row in rows),
        "rows": found,
        "speedup_mean_error": mean(abs(one["terapipe"]["speedup"] / one["published"] - 1) for one in found),
        "held_out": held_out(constants),
        "sensitivity": sensitivity(chosen, constants),
        "targets": [target for one in found for target in targets(one)],
    }


def replayed(row: Setting, constants: Constants) -> dict[str, Any]:
    """One setting."""
    from benchmarks.token_slices.joint import allowed_share, joint

    base = min(baselines(row, constants), key=lambda one: one.step_s)
    slicing, rows = terapipe(row, constants)
    theirs = run(row, constants, "gpipe", rows=rows, slices=slicing.slices)
    ours = joint(row, constants, theirs)
    count = max(2, len(slicing.slices))
    result = {
        "setting": row.number,
        "model": row.model,
        "layout": f"{row.replicas}/{row.stages}/{row.shards}",
        "sequences": row.sequences,
        "stages": row.stages,
        "published": row.published,
        "stage_s": StageTime(row, constants).whole_s,
        "slice_overhead_s": overhead_of(row.sequence, count, StageTime(row, constants), GRID),
        "reduction_s": reduction_s(row, constants),
        "without": line(base),
        "terapipe": line(theirs)
        | {"speedup": base.step_s / theirs.step_s, "objective_s": slicing.step_s + reduction_s(row, constants)},
        "ours": line(ours) | {"speedup": base.step_s / ours.step_s},
        "allowed_share": allowed_share(row, theirs),
    }
    if row.slices:
        again = run(row, constants, "gpipe", rows=1, slices=row.slices)
        result["published_slices"] = line(again) | {"speedup": base.step_s / again.step_s}
    return result


def targets(one: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is asked of a setting."""
    ours, theirs, number = one["ours"], one["terapipe"], one["setting"]
    found = [at_least(f"setting {number}: ours over TeraPipe's slicing", theirs["step_s"] / ours["step_s"], 1.0)]
    if len(theirs["slices"]) > 1:
        share = ours["activations_bytes"] / theirs["activations_bytes"]
        found.append(at_most(f"setting {number}: our activations to its own", share, one["allowed_share"]))
    return found


def baselines(row: Setting, constants: Constants) -> Iterator[Ran]:
    """The schedules without slices, one sequence a microbatch."""
    for name in ("gpipe", "1f1b"):
        yield run(row, constants, name)
    for turns in range(2, row.layers_per_stage + 1):
        if row.layers_per_stage % turns == 0:
            yield run(row, constants, "interleaved-1f1b", turns=turns)


def terapipe(row: Setting, constants: Constants) -> tuple[SequenceSlicing, int]:
    """(the slicing of its dynamic program, sequences a microbatch)."""
    found = []
    for rows in range(1, row.sequences + 1):
        if row.sequences % rows == 0:
            time_of = StageTime(row, constants, rows)
            each = best_slicing(row.sequence, row.stages, time_of, multiple=GRID, sequences=row.sequences // rows)
            found.append((each.step_s, rows, each))
    _, rows, best = min(found, key=lambda one: one[:2])
    return best, rows


def run(
    row: Setting, constants: Constants, schedule: str, *, rows: int = 1, slices: tuple[int, ...] = (), turns: int = 1
) -> Ran:
    """A schedule on the setting's layout."""
    context = planner_context(row, constants, turns)
    decisions = laid_out(row, turns, microbatches=row.sequences // rows, schedule=schedule, slices=slices)
    parts = context.make_skeleton(job_of(row), decisions)
    costs = context.build_cost_table(parts)
    timeline = simulate_schedule(context.build_schedule(parts, decisions, costs), costs)
    return ran(schedule, rows, slices, timeline, costs.static_bytes, reduction_s(row, constants))


def ran(
    schedule: str, rows: int, slices: tuple[int, ...], timeline: Timeline, static_bytes: Any, reduction: float
) -> Ran:
    """What a timeline says."""
    above = [float(peak) - float(static) for peak, static in zip(timeline.peak_bytes, static_bytes, strict=True)]
    return Ran(
        schedule=schedule,
        rows=rows,
        slices=tuple(slices),
        step_s=timeline.makespan_s + reduction,
        activations_bytes=max(above),
        peak_bytes=max(map(float, timeline.peak_bytes)),
    )


def planner_context(row: Setting, constants: Constants, turns: int = 1, memory_bytes: float = 16e9) -> PlannerContext:
    """The setting's model and machines, `turns` stages a lane."""
    model = model_of(row.hidden, row.layers, row.sequence)
    layers = V100Costs(row, constants, row.layers_per_stage // turns)
    return PlannerContext(model, cluster_of(row, memory_bytes), layers, name=row.model)


def laid_out(row: Setting, turns: int = 1, **choices: Any) -> ParallelConfig:
    """The published layout: replicas on hosts of their own, the layers cut evenly. The first and the last layers of the
    model here, embedding, norm and head, take no time."""
    stages = row.stages * turns
    each = row.layers // stages
    return ParallelConfig(
        stages=stages,
        cuts=tuple(1 + each * index for index in range(1, stages)),
        placement=tuple(range(row.stages)) * turns if turns > 1 else (),
        replicas=(1,) * row.replicas,
        shards=(1,) * row.shards,
        sharding="megatron" if row.shards > 1 else "none",
        inner="stage",
        **choices,
    )


def job_of(row: Setting) -> Job:
    return Job(batch=row.batch, sequence=row.sequence, precision="bfloat16")


def held_out(constants: Constants) -> dict[str, Any]:
    """Published steps that nothing was fitted to: with uniform slices, and of longer sequences."""
    known = {one.number: one for one in settings()}
    equal = [
        {"setting": int(number), "slices": int(count), "published_s": step_s}
        | {"predicted_s": objective_s(known[int(number)], constants, uniform_slices(2048, int(count), 1))}
        for number, steps in published()["uniform"]["steps_s"].items()
        for count, step_s in steps.items()
        if int(count) > 1
    ]
    long = []
    for row in longer():
        sliced = best_slicing(
            row.sequence, row.stages, StageTime(row, constants), multiple=GRID, sequences=row.sequences
        )
        long.append(
            {
                "sequence": row.sequence,
                "published_s": row.without_s,
                "predicted_s": unsliced_s(row, constants),
                "published_speedup": row.published,
                "predicted_speedup": unsliced_s(row, constants) / (sliced.step_s + reduction_s(row, constants)),
            }
        )
    return {"uniform": equal, "longer": long}


def objective_s(row: Setting, constants: Constants, slices: Sequence[int]) -> float:
    """TeraPipe's equation 5 for a slicing of all sequences, and the gradient sum."""
    times = slice_times(slices, StageTime(row, constants))
    return float(row.sequences * times.sum() + (row.stages - 1) * times.max()) + reduction_s(row, constants)


def sensitivity(rows: Sequence[Setting], constants: Constants) -> list[dict[str, Any]]:
    """The speed-ups of TeraPipe's slicing by its own objective when one constant is another."""
    found = []
    for name, factors in {"": (1.0,), **NUDGES}.items():
        for factor in factors:
            changed = replace(constants, **{name: getattr(constants, name) * factor}) if name else constants
            ups = {}
            for row in rows:
                slicing, _ = terapipe(row, changed)
                ups[str(row.number)] = unsliced_s(row, changed) / (slicing.step_s + reduction_s(row, changed))
            found.append({"constant": name, "factor": factor, "speedups": ups})
    return found


def line(one: Ran) -> dict[str, Any]:
    """What is written of a schedule."""
    return {
        "schedule": one.schedule,
        "rows": one.rows,
        "slices": list(one.slices),
        "step_s": one.step_s,
        "activations_bytes": one.activations_bytes,
        "peak_bytes": one.peak_bytes,
    }


def show(found: Mapping[str, Any]) -> None:
    """The tables."""
    fitted = ", ".join(f"{name} {found['constants'][name]:.3g}" for name in found["fitted"])
    print(f"replay: V100 costs fitted to the ten steps without slices: {fitted}")
    print(f"  mean error of the fit: {found['fit_mean_error']:.1%}")
    print(
        f"  {'setting':<18}{'sequences':>9}{'published':>10}{'predicted':>11}{'slices':>8}{'each costs':>13}"
        f"{'ours':>9}  {'schedule':<16}{'slices':>6}{'activations':>13}"
    )
    for one in found["rows"]:
        theirs, ours = one["terapipe"], one["ours"]
        share = ours["activations_bytes"] / theirs["activations_bytes"]
        label = f"{one['setting']:>2} {one['model']} {one['layout']}"
        print(
            f"  {label:<18}{one['sequences']:>9}{one['published']:>9.2f}x{theirs['speedup']:>10.2f}x"
            f"{max(1, len(theirs['slices'])):>8}{one['slice_overhead_s'] * 1e3:>10.2f} ms{ours['speedup']:>8.2f}x"
            f"  {ours['schedule']:<16}{max(1, len(ours['slices'])):>6}{share:>13.2f}"
        )
    print(f"  mean error of the predicted speed-ups: {found['speedup_mean_error']:.1%}")
    for row in found["held_out"]["longer"]:
        print(
            f"  not fitted to: {row['sequence']} tokens: published {row['published_s']:.3f} s, "
            f"{row['published_speedup']:.2f}x; predicted {row['predicted_s']:.3f} s, {row['predicted_speedup']:.2f}x"
        )
    uniform_error = mean(abs(row["predicted_s"] / row["published_s"] - 1) for row in found["held_out"]["uniform"])
    count = len(found["held_out"]["uniform"])
    print(f"  not fitted to: {count} steps with uniform slices: mean error {uniform_error:.1%}")
    print(
        "  speed-ups of its slicing if a constant were another ("
        + ", ".join(found["sensitivity"][0]["speedups"])
        + "):"
    )
    for row in found["sensitivity"]:
        ups = " ".join(f"{value:6.2f}" for value in row["speedups"].values())
        print(f"    {row['constant'] or 'as it is':<16} x {row['factor']:<5.2f}{ups}")


def mean(values: Any) -> float:
    each = list(values)
    return sum(each) / len(each)
