"""A plan in words and tables: the output of `pipefit plan` and `pipefit explain`. Plain text, no terminal control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipefit.plan.types import (
    AlternativePlan,
    ClusterSensitivity,
    LanePrediction,
    MemoryRisk,
    MeshPlan,
    Plan,
    PlanPrediction,
    Stage,
)
from pipefit.units import format_bytes, format_flops, format_seconds

MEMORY_ROWS = ("parameters", "gradients", "optimizer", "activations", "workspace")
"""Parts of memory in the order of the table."""

SLICES_SHOWN = 4
"""Largest number of slices of an alternative whose tokens are all listed."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table whose cells are ready to print."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def plan_headline(plan: Plan) -> str:
    """Return the model, job and devices of the plan, in one line."""
    job = plan.job
    return (
        f"{plan.model.name}: batch {job.batch} x {job.sequence} tokens, {job.precision}, {job.optimizer}, on "
        f"{len(plan.used_devices)} device{'s' if len(plan.used_devices) > 1 else ''}"
        + (f" of {plan.cluster}" if plan.cluster else "")
    )


def forecast_lines(plan: Plan) -> list[str]:
    """Return the prediction in a few lines, or a line that there is none."""
    prediction = plan.prediction
    if prediction is None:
        return ["no prediction: this plan was written by hand; `pipefit simulate` makes one"]
    rate = prediction.flops_per_step / prediction.step_s / len(plan.used_devices) if prediction.step_s else 0.0
    lines = [
        f"predicted step {format_seconds(prediction.step_s)}, {prediction.tokens_per_s:,.0f} tokens/s, "
        f"{format_flops(rate)}/s a device",
        f"critical path: {prediction.binds}",
        *search_notes(prediction),
    ]
    if prediction.lower_bound_s:
        over = prediction.step_s / prediction.lower_bound_s - 1
        lines.append(
            "lower bound of all plans considered, with replicas in lockstep: "
            f"{format_seconds(prediction.lower_bound_s)} (compute only, even cuts, no memory limit); "
            f"this plan is {over:.1%} above it"
        )
    if prediction.risk is not None:
        lines.append(risk_line(prediction))
    if prediction.sensitivity:
        lines.append(
            "with better hardware: "
            + "; ".join(_sensitivity_line(change, prediction) for change in prediction.sensitivity)
        )
    return lines


def search_notes(prediction: PlanPrediction) -> list[str]:
    """Return the notes on the tolerance, and on the search for placement, groups, slices, modules and samples."""
    told = ("tolerance: ", "placement: ", "groups: ", "slices: ", "modules: ", "samples: ")
    return [note for note in prediction.assumptions if note.startswith(told)]


def risk_line(prediction: PlanPrediction) -> str:
    """Return the probability that the plan does not fit, and its most likely lane. The plan must have one."""
    known = [(lane.memory.risk, index) for index, lane in enumerate(prediction.lanes) if lane.memory is not None]
    risk, worst = max(known)
    lane, memory = prediction.lanes[worst], prediction.lanes[worst].memory
    assert memory is not None and prediction.risk is not None
    return (
        f"probability that it does not fit: {format_percent(prediction.risk)} ({format_percent(risk)} on lane {worst}: "
        f"{format_bytes(memory.expected_bytes)} expected, up to {format_bytes(memory.margin_bytes)} more, "
        f"of {format_bytes(lane.limit_bytes)})"
    )


def format_percent(share: float) -> str:
    """Return a probability as a percentage; very small ones as `under 0.1%`."""
    return "under 0.1%" if share < 0.001 else f"{share:.1%}"


def decision_table(plan: Plan) -> TextTable:
    """Return the table of choices, by the keys of `--fix`."""
    rows = tuple(
        (key, _format_devices(list(map(int, value.split(",")))) if key == "mapping" else value)
        for key, value in plan.decisions.items()
    )
    return TextTable("decisions", ("what", "choice"), rows)


def stage_table(plan: Plan) -> TextTable:
    """Return the table of stages: layers, devices, busy and idle time of the lane, and the program if some are
    sharded."""
    shared = any(stage.sharding != "none" for stage in plan.stages)
    lanes = plan.prediction.lanes if plan.prediction else None
    rows = []
    for index, stage in enumerate(plan.stages):
        lane = plan.order.placement[index]
        times = ("", "") if lanes is None else (format_seconds(lanes[lane].busy_s), format_seconds(lanes[lane].idle_s))
        group = plan.groups[stage.group]
        start, stop = stage.layers
        rows.append(
            (
                str(index),
                f"{stage.module} {start}" + (f" to {stop - 1}" if stop - start > 1 else ""),
                str(lane),
                _format_devices(group.devices),
                _format_grid(group) + (f", state in groups of {stage.state_group}" if stage.state_group else ""),
                *([_format_program(stage)] if shared else []),
                stage.recompute,
                *times,
            )
        )
    program = ("program",) if shared else ()
    columns = ("stage", "layers", "lane", "devices", "grid", *program, "recompute", "busy", "idle")
    return TextTable("stages", columns, tuple(rows))


def memory_table(plan: Plan) -> TextTable:
    """Return the table of peak memory on every lane's fullest device, by parts, beside its limit.

    If device kinds hold different amounts, each kind has a row.
    """
    lanes = plan.prediction.lanes if plan.prediction else ()
    known = any(lane.memory is not None for lane in lanes)
    rows: list[tuple[str, ...]] = []
    for index, lane in enumerate(lanes):
        rows.append(
            (
                f"{index} {lane.kind}".rstrip(),
                *(format_bytes(lane.parts.get(part, 0.0)) for part in MEMORY_ROWS),
                format_bytes(lane.peak_bytes),
                format_bytes(lane.limit_bytes),
                f"{(lane.memory.expected_bytes if lane.memory else lane.peak_bytes) / lane.limit_bytes:.0%}",
                *(_corrected_cells(lane.memory) if known else ()),
            )
        )
        for kind in lane.others:
            sizes = (format_bytes(kind.peak_bytes), format_bytes(kind.limit_bytes))
            used = f"{kind.peak_bytes / kind.limit_bytes:.0%}"
            rows.append((f"{index} {kind.kind}", *[""] * len(MEMORY_ROWS), *sizes, used, *([""] * 3 if known else [])))
    more = ("corrected", "at most", "risk") if known else ()
    return TextTable("memory per device", ("lane", *MEMORY_ROWS, "peak", "limit", "used", *more), tuple(rows))


def _corrected_cells(memory: MemoryRisk | None) -> tuple[str, str, str]:
    if memory is None:
        return ("not known", "", "")
    upper_bytes = memory.expected_bytes + memory.margin_bytes
    return (format_bytes(memory.expected_bytes), format_bytes(upper_bytes), format_percent(memory.risk))


def alternative_table(plan: Plan) -> TextTable:
    """Return the table of runners-up, with the reason why each lost or did not fit."""
    keys = choice_keys(plan.decisions, *(runner_up.decisions for runner_up in plan.alternatives))
    winner = [_winner_row(plan, keys, plan.prediction)] if plan.prediction else []
    rows = [_alternative_row(alternative, keys) for alternative in plan.alternatives]
    return TextTable("alternatives", (*keys, "step", "memory", "why"), (*winner, *rows))


def trade_table(plan: Plan) -> TextTable:
    """Return the table of memory against time for the plan's layout. Points that are slower with more memory are left
    out."""
    prediction = plan.prediction
    rows: list[tuple[str, ...]] = []
    best_s = float("inf")
    for point in prediction.trade if prediction else ():
        if point.step_s < best_s or point.chosen:
            best_s = min(best_s, point.step_s)
            note = "chosen" if point.chosen else "" if point.fits else "does not fit"
            rows.append(
                (format_bytes(point.memory_bytes), format_seconds(point.step_s), point.schedule, point.recompute, note)
            )
    return TextTable("memory against time", ("memory", "step", "schedule", "recompute", ""), tuple(rows))


def explain_text(plan: Plan) -> str:
    """Return the whole explanation as plain text, for a pipe or a file."""
    parts = [plan_headline(plan), *forecast_lines(plan)]
    for table in plan_tables(plan):
        parts += ["", format_table(table)]
    if plan.prediction is not None:
        parts += ["", "figures come from:", *(f"  - {note}" for note in plan.prediction.assumptions)]
    return "\n".join(parts) + "\n"


def plan_tables(plan: Plan) -> list[TextTable]:
    """Return the tables that have rows."""
    tables = (
        decision_table(plan),
        stage_table(plan),
        memory_table(plan),
        trade_table(plan),
        alternative_table(plan),
    )
    return [table for table in tables if table.rows]


def format_table(table: TextTable) -> str:
    """Return a table with aligned columns and no lines."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"{table.title}:", *(f"  {line}" for line in lines)])


def _sensitivity_line(one: ClusterSensitivity, prediction: PlanPrediction) -> str:
    """Return `links twice as fast: 3.1 s, 4.0% less (the same plan, simulated again)`."""
    less = 1 - one.step_s / prediction.step_s if prediction.step_s else 0.0
    words = f"{format_seconds(one.step_s)}, {less:.1%} less" if less >= 5e-4 else "no gain"
    return f"{one.change}: {words} ({one.how})"


def fullest_lane(prediction: PlanPrediction) -> LanePrediction:
    """Return the lane that is fullest relative to its limit. If limits differ, it need not be the one with the most
    bytes."""
    return max(prediction.lanes, key=lambda lane: lane.peak_bytes / lane.limit_bytes)


def _winner_row(plan: Plan, keys: Sequence[str], prediction: PlanPrediction) -> tuple[str, ...]:
    fullest = fullest_lane(prediction)
    return (
        *choice_cells(plan.decisions, keys),
        format_seconds(prediction.step_s),
        _format_share(fullest.peak_bytes, fullest.limit_bytes),
        "chosen",
    )


def _alternative_row(one: AlternativePlan, keys: Sequence[str]) -> tuple[str, ...]:
    fits = one.peak_bytes <= one.limit_bytes
    return (
        *choice_cells(one.decisions, keys),
        ("" if fits else ">= ") + format_seconds(one.step_s),
        _format_share(one.peak_bytes, one.limit_bytes),
        one.reason,
    )


def choice_keys(*decisions: Mapping[str, str]) -> tuple[str, ...]:
    """Return the choices to show of these plans, which are of one model. Programs (`sharding`) are shown if the plans
    have several; slices, parts of sequences (`context`), an expert axis (`expert`) and groups that shard state
    (`state_group`) if any plan has some."""
    keys: tuple[str, ...] = ("replicas", "stages", "shards", "microbatches", "schedule", "recompute", "sharded_state")
    if names := module_names(decisions[0]):
        keys = (*names, "microbatches", "schedule")
    if any(choices.get("slices") for choices in decisions):
        keys = (*keys[:4], "slices", *keys[4:])
    if any(choices.get("context") for choices in decisions):
        keys = (*keys[:2], "context", *keys[2:])
    if any(choices.get("expert") for choices in decisions) and "shards" in keys:
        index = keys.index("shards")
        keys = (*keys[:index], "expert", *keys[index:])
    if any(choices.get("state_group") for choices in decisions):
        keys = (*keys, "state_group")
    if len({choices.get("sharding", "none") for choices in decisions} - {"none"}) > 1 and "shards" in keys:
        index = keys.index("shards") + 1
        keys = (*keys[:index], "sharding", *keys[index:])
    return keys


def choice_cells(decisions: Mapping[str, str], keys: Sequence[str]) -> list[str]:
    """Return decisions as cells. Slices are listed if they are few, else shortened to `16 (122,86,...,30)`."""
    words = dict(decisions)
    tokens = words.get("slices", "").split(",")
    if len(tokens) > SLICES_SHOWN:
        words["slices"] = f"{len(tokens)} ({tokens[0]},{tokens[1]},...,{tokens[-1]})"
    words = {"slices": "1", "context": "1", "expert": "1", "state_group": "all"} | {
        key: word for key, word in words.items() if word
    }
    for name in module_names(decisions):
        module_words = {key: words.get(f"{name}.{key}", "") for key in ("replicas", "stages", "shards", "recompute")}
        recompute = f", recompute {module_words['recompute']}" if module_words["recompute"] not in ("", "none") else ""
        placement = words.get(f"{name}.placement", "")
        stages = placement if placement in ("shared", "inline") else module_words["stages"]
        words[name] = f"{module_words['replicas']} x {stages} x {module_words['shards']}{recompute}"
    return [words.get(key, "") for key in keys]


def module_names(decisions: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules with separate choices (`vision.replicas`), in their order; none in a plan of one module.

    The cell of each (`choice_cells`) is replicas x stages x shards. For a guest on every lane of another module,
    `shared` replaces the stages, and replicas and shards are those of one lane.
    """
    return tuple(dict.fromkeys(key.partition(".")[0] for key in decisions if "." in key))


def _format_share(peak_bytes: float, limit_bytes: float) -> str:
    return f"{format_bytes(peak_bytes)} of {format_bytes(limit_bytes)}"


def _format_grid(group: MeshPlan) -> str:
    """Return `4 replicas x 2 shards`, with shares if they are uneven. A context axis is `2 parts of sequences`, an
    expert axis `2 expert parts`."""
    parts = []
    for axis in group.axes:
        if len(axis.shares) > 1:
            uneven = f" ({':'.join(map(str, axis.shares))})" if len({*axis.shares}) > 1 else ""
            name = {"context": "parts of sequences", "expert": "expert parts"}.get(axis.name, f"{axis.name}s")
            parts.append(f"{len(axis.shares)} {name}{uneven}")
    return " x ".join(parts) or "1 device"


def _format_program(stage: Stage) -> str:
    """Return `megatron`, or `searched 1f2e3d4c` with the name of the recipe set; '' for single devices."""
    return "" if stage.sharding == "none" else f"{stage.sharding} {stage.recipes}".rstrip()


def _format_devices(devices: Sequence[int]) -> str:
    """Return `0-3` for a run, `0,8,16,...` otherwise."""
    if len(devices) > 1 and list(devices) == list(range(devices[0], devices[0] + len(devices))):
        return f"{devices[0]}-{devices[-1]}"
    return ",".join(map(str, devices[:4])) + (",..." if len(devices) > 4 else "")
