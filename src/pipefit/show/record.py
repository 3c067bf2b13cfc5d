"""Reader of a run directory: its plan, metrics and trace. Every defect is one FormatError.

Files: `plan.json`; `metrics.jsonl` (one object a line: a step, an evaluation, or broken images); optionally
`trace.json`, `cluster.json` and `environment.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pipefit.codec import load_file
from pipefit.errors import FormatError
from pipefit.plan.types import Plan
from pipefit.show.trace import StepTrace, read_trace

PLAN, METRICS, TRACE = "plan.json", "metrics.jsonl", "trace.json"
CLUSTER, ENVIRONMENT = "cluster.json", "environment.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One line of the metrics. A missing figure is NaN."""

    step: int
    loss: float
    step_s: float
    tokens: float
    memory_bytes: float
    grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run, read from its directory."""

    path: Path
    plan: Plan
    steps: tuple[RecordedStep, ...]
    "Steps in order. If a resumed run repeated a step, the later record counts."
    evaluations: tuple[tuple[int, float], ...]
    "(step, mean loss over the held-out text)."
    trace: StepTrace | None
    environment: Mapping[str, str]

    @property
    def step_s(self) -> float:
        """Return the median step time without warm-up, which is the first tenth and at least one step. NaN without
        steps."""
        return steady_median([step.step_s for step in self.steps])

    @property
    def core_share(self) -> float | None:
        """Return the smallest share of the time in which a process had a core of its machine; None if not recorded."""
        facts = self.trace.facts.values() if self.trace is not None else ()
        return min((fact.core_share for fact in facts if fact.core_share is not None), default=None)

    @property
    def peak_bytes(self) -> Mapping[int, float]:
        """Return the measured peak of every device that recorded one; rank 0 also from the metrics."""
        peaks = {}
        if self.trace is not None:
            peaks = {d: f.memory_bytes for d, f in self.trace.facts.items() if f.memory_bytes is not None}
        first = [step.memory_bytes for step in self.steps if step.memory_bytes > 0]
        if first and self.plan.used_devices[0] not in peaks:
            peaks[self.plan.used_devices[0]] = max(first)
        return peaks


def warm_up_count(steps: int) -> int:
    """Return the number of first steps that count as warm-up."""
    return max(1, steps // 10) if steps > 1 else 0


def steady_median(times_s: Sequence[float]) -> float:
    """Return the median of the positive step times in seconds, without those of the warm-up. NaN if there are none."""
    times = [time_s for time_s in times_s[warm_up_count(len(times_s)) :] if time_s > 0]
    return median(times) if times else math.nan


def read_run(path: Path) -> RunRecord:
    """Read a run directory. Raises FormatError for a missing, truncated or malformed file."""
    if not (path / PLAN).is_file():
        raise FormatError(
            "The directory is not a run directory: it has no plan.",
            where=str(path),
            seen=", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "an empty directory",
            allowed=f"{PLAN} and {METRICS}, as pipefit train writes them",
        )
    plan = load_file(Plan, path / PLAN)
    steps, evaluations = _read_metrics(path / METRICS)
    return RunRecord(
        path=path,
        plan=plan,
        steps=steps,
        evaluations=evaluations,
        trace=read_trace(path / TRACE, plan),
        environment=_read_environment(path / ENVIRONMENT),
    )


def _read_metrics(path: Path) -> tuple[tuple[RecordedStep, ...], tuple[tuple[int, float], ...]]:
    if not path.is_file():
        raise FormatError(
            "The run has no metrics; it may have stopped before its first step.",
            where=str(path),
            next_step="run pipefit train again, or report the plan alone: pipefit report plan.json",
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError("The metrics cannot be read.", where=str(path), seen=error) from None
    steps: dict[int, RecordedStep] = {}
    evaluations: dict[int, float] = {}
    for number, line in enumerate(lines, 1):
        record = _parse_line(line, f"{path}, line {number}")
        if "eval_loss" in record:
            evaluations[_read_integer(record, number, path)] = _read_number(record, "eval_loss", number, path)
        elif "broken_images" not in record:
            step = _read_step(record, number, path)
            steps[step.step] = step
    return tuple(steps[key] for key in sorted(steps)), tuple(sorted(evaluations.items()))


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        record = None
    if not isinstance(record, dict):
        raise FormatError(
            "The metrics have a line that is not a JSON object; the run may have been killed while it wrote.",
            where=where,
            seen=repr(line[:60]),
            next_step="delete that line if it is the last one",
        )
    return record


def _read_step(record: Mapping[str, Any], number: int, path: Path) -> RecordedStep:
    def read_optional(name: str) -> float:
        return _read_number(record, name, number, path) if record.get(name) is not None else math.nan

    step_s = _read_number(record, "step_s", number, path)
    if not step_s > 0:
        raise FormatError(
            "A step takes a positive time.", where=f"{path}, line {number}: step_s", seen=record["step_s"]
        )
    return RecordedStep(
        step=_read_integer(record, number, path),
        loss=_read_number(record, "loss", number, path),
        step_s=step_s,
        tokens=read_optional("tokens"),
        memory_bytes=read_optional("memory_bytes"),
        grad_norm=read_optional("grad_norm"),
    )


def _read_number(record: Mapping[str, Any], name: str, number: int, path: Path) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FormatError(
            f"A line of the metrics has no number {name!r}.",
            where=f"{path}, line {number}",
            seen=json.dumps(value),
            allowed="step, loss, step_s of every step; step, eval_loss of every evaluation",
        )
    return float(value)


def _read_integer(record: Mapping[str, Any], number: int, path: Path) -> int:
    value = _read_number(record, "step", number, path)
    if value != int(value) or value < 0:
        raise FormatError("A step is a count.", where=f"{path}, line {number}: step", seen=record["step"])
    return int(value)


def _read_environment(path: Path) -> Mapping[str, str]:
    if not path.is_file():
        return {}
    return {str(key): str(value) for key, value in load_file(dict, path).items()}
