"""Headline figures of a plan or a run, predicted and measured, for the report and `pipefit compare`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipefit.errors import PlanError
from pipefit.plan.types import Plan
from pipefit.show.breakdown import measured_breakdown
from pipefit.show.record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FigurePair:
    """Predicted and measured value of one figure. None if unknown: the plan has not run, or the run has no trace."""

    predicted: float | None = None
    measured: float | None = None

    @property
    def relative_error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """The figures of one plan or run."""

    step_s: FigurePair
    tokens_per_s: FigurePair
    "Throughput of all devices together."
    peak_bytes: FigurePair
    "Peak of the device that uses most."
    peak_share: FigurePair
    "Peak as a share of the limit, on the device nearest its limit."
    idle_share: FigurePair
    "Share of the devices' time without computation: waiting for data, links or other devices."


def figures_of(plan: Plan, record: RunRecord | None) -> RunFigures:
    """Return the figures. Raises PlanError for a plan without prediction."""
    prediction = plan.prediction
    if prediction is None:
        raise PlanError(
            "The plan has no prediction.",
            where=f"plan {plan.content_hash}",
            next_step="fill it in: pipefit simulate, or make the plan with pipefit plan",
        )
    sizes = [plan.lane_mesh(lane).size for lane in range(len(prediction.lanes))]
    idle_s = sum(lane.idle_s * size for lane, size in zip(prediction.lanes, sizes, strict=True))
    whole_s = prediction.step_s * sum(sizes)
    measured_s = _number_or_none(record.step_s) if record else None
    peaks = record.peak_bytes if record else {}
    limits = limits_by_device(plan)
    return RunFigures(
        step_s=FigurePair(predicted=prediction.step_s, measured=measured_s),
        tokens_per_s=FigurePair(
            predicted=prediction.tokens_per_s,
            measured=plan.job.batch * plan.job.sequence / measured_s if measured_s else None,
        ),
        peak_bytes=FigurePair(
            predicted=max(lane.peak_bytes for lane in prediction.lanes),
            measured=max(peaks.values()) if peaks else None,
        ),
        peak_share=FigurePair(
            predicted=max(lane.peak_bytes / lane.limit_bytes for lane in prediction.lanes if lane.limit_bytes),
            measured=max(size / limits[device] for device, size in peaks.items()) if peaks else None,
        ),
        idle_share=FigurePair(predicted=idle_s / whole_s if whole_s else 0.0, measured=_measured_idle(plan, record)),
    )


def format_percent(share: float) -> str:
    """Format as `12 %`, below ten with one decimal."""
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def limits_by_device(plan: Plan) -> dict[int, float]:
    """Return the memory limit of each device in the plan."""
    assert plan.prediction is not None
    return {
        device: lane.for_device(device).limit_bytes
        for number, lane in enumerate(plan.prediction.lanes)
        for device in plan.lane_mesh(number).devices
    }


def _measured_idle(plan: Plan, record: RunRecord | None) -> float | None:
    if record is None or record.trace is None:
        return None
    parts = measured_breakdown(record.trace, plan)
    total_s = sum(part.total_s for part in parts)
    busy = sum(part.seconds["compute"] + part.seconds["optimizer"] for part in parts)
    return 1.0 - busy / total_s if total_s else None


def _number_or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
