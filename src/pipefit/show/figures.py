"""Figures of a plan or a run, predicted and measured: the columns of `pipefit compare` and the tiles of the report.

Each figure is one function and one entry of `COLUMNS`; a plug-in calls `register_report_column`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from pipefit.errors import PlanError, PluginError
from pipefit.plan.types import Plan, PlanPrediction
from pipefit.plugins import NamedRegistry, call_plugin
from pipefit.show.breakdown import measured_breakdown
from pipefit.show.record import RunRecord
from pipefit.units import format_bytes, format_count, format_seconds


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
class ReportColumn:
    """A figure of a plan or a run: a column of `pipefit compare`, and a tile at the head of the report."""

    name: str
    "Key in `pipefit compare --json`."
    heading: str
    "Heading of the column."
    title: str = ""
    "Name of the tile; '' for none."
    figure: Callable[[Plan, RunRecord | None], FigurePair]
    "The figure of a plan with a prediction and, if it has run, its record."
    format_value: Callable[[float], str]
    is_share: bool = False
    "True for a share: its error is in percentage points, and its tile follows all tiles of other figures."


def register_report_column(column: ReportColumn) -> ReportColumn:
    """Append a column, and return it. Raises PipefitError for a name that another column has."""
    return COLUMNS.add_entry(column.name, column)


def figures_of(plan: Plan, record: RunRecord | None) -> dict[str, FigurePair]:
    """Return the figure of each column by name. A column of a plug-in that fails is left out, with a warning.

    Raises PlanError for a plan without prediction.
    """
    if plan.prediction is None:
        raise PlanError(
            "The plan has no prediction.",
            where=f"plan {plan.content_hash}",
            next_step="fill it in: pipefit simulate, or make the plan with pipefit plan",
        )
    pairs = {name: _column_figure(column, plan, record) for name, column in COLUMNS.items()}
    return {name: pair for name, pair in pairs.items() if pair is not None}


def _column_figure(column: ReportColumn, plan: Plan, record: RunRecord | None) -> FigurePair | None:
    """Return the figure, with texts that can be formatted. Returns None and warns if a column of a plug-in fails."""
    subject = COLUMNS.describe_entry(column.name)
    try:
        figure = call_plugin(subject, column.figure, plan, record, returns=FigurePair)
        pair = FigurePair(predicted=_number_or_none(figure.predicted), measured=_number_or_none(figure.measured))
        for value in (pair.predicted, pair.measured):
            if value is not None:
                call_plugin(subject, column.format_value, value, returns=str)
    except PluginError as error:
        warnings.warn(f"a column is left out. {error.full_text()}", stacklevel=3)
        return None
    return pair


def _step_figure(plan: Plan, record: RunRecord | None) -> FigurePair:
    measured_s = _number_or_none(record.step_s) if record else None
    return FigurePair(predicted=_plan_prediction(plan).step_s, measured=measured_s)


def _throughput_figure(plan: Plan, record: RunRecord | None) -> FigurePair:
    """Return the tokens per second of all devices together."""
    measured_s = _step_figure(plan, record).measured
    return FigurePair(
        predicted=_plan_prediction(plan).tokens_per_s,
        measured=plan.job.batch * plan.job.sequence / measured_s if measured_s else None,
    )


def _idle_figure(plan: Plan, record: RunRecord | None) -> FigurePair:
    """Return the share of the devices' time without computation: waiting for data, links or other devices."""
    prediction = _plan_prediction(plan)
    sizes = [plan.lane_mesh(lane).size for lane in range(len(prediction.lanes))]
    idle_s = math.fsum(lane.idle_s * size for lane, size in zip(prediction.lanes, sizes, strict=True))
    whole_s = prediction.step_s * sum(sizes)
    return FigurePair(predicted=idle_s / whole_s if whole_s else 0.0, measured=_measured_idle(plan, record))


def _peak_figure(plan: Plan, record: RunRecord | None) -> FigurePair:
    """Return the peak of the device that uses most, in bytes."""
    peaks = record.peak_bytes if record else {}
    return FigurePair(
        predicted=max(lane.peak_bytes for lane in _plan_prediction(plan).lanes),
        measured=max(peaks.values()) if peaks else None,
    )


def _peak_share_figure(plan: Plan, record: RunRecord | None) -> FigurePair:
    """Return the peak as a share of the limit, on the device nearest its limit."""
    peaks = record.peak_bytes if record else {}
    limits = limits_by_device(plan)
    return FigurePair(
        predicted=max(lane.peak_bytes / lane.limit_bytes for lane in _plan_prediction(plan).lanes if lane.limit_bytes),
        measured=max(size / limits[device] for device, size in peaks.items()) if peaks else None,
    )


def headline_lines(plan: Plan, record: RunRecord | None) -> list[str]:
    """Return `step time: 160 ms predicted, 171 ms measured (-6.4 %)` and the same for memory; nothing without a run."""
    figures, lines = figures_of(plan, record), []
    for name in ("step_s", "peak_bytes"):
        column, pair = COLUMNS[name], figures[name]
        if pair.predicted is not None and pair.measured is not None:
            predicted, measured = (column.format_value(value) for value in (pair.predicted, pair.measured))
            lines.append(
                f"{column.title.lower()}: {predicted} predicted, {measured} measured "
                f"({format_difference(pair, column.is_share)})"
            )
    return lines


def format_difference(pair: FigurePair, is_share: bool) -> str:
    """Return the prediction over the measurement as `-6.4 %`, or as `-6.4 points` for shares. Both are known."""
    assert pair.predicted is not None and pair.measured is not None
    if is_share:
        return f"{100 * (pair.predicted - pair.measured):+.1f} points"
    return f"{100 * (pair.relative_error or 0.0):+.1f} %"


def format_percent(share: float) -> str:
    """Format as `12 %`, below ten with one decimal."""
    return f"{100 * share:.1f} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def limits_by_device(plan: Plan) -> dict[int, float]:
    """Return the memory limit of each device in the plan."""
    return {
        device: lane.for_device(device).limit_bytes
        for number, lane in enumerate(_plan_prediction(plan).lanes)
        for device in plan.lane_mesh(number).devices
    }


def _plan_prediction(plan: Plan) -> PlanPrediction:
    assert plan.prediction is not None, "figures_of refuses a plan without prediction"
    return plan.prediction


def _measured_idle(plan: Plan, record: RunRecord | None) -> float | None:
    if record is None or record.trace is None:
        return None
    parts = measured_breakdown(record.trace, plan)
    total_s = math.fsum(part.total_s for part in parts)
    busy = math.fsum(part.seconds["compute"] + part.seconds["optimizer"] for part in parts)
    return 1.0 - busy / total_s if total_s else None


def _number_or_none(value: float | None) -> float | None:
    return None if value is None or value != value else value


COLUMNS = NamedRegistry(
    "report columns",
    {
        column.name: column
        for column in (
            ReportColumn(
                name="step_s", heading="step", title="Step time", figure=_step_figure, format_value=format_seconds
            ),
            ReportColumn(
                name="tokens_per_s",
                heading="tokens/s",
                title="Tokens per second",
                figure=_throughput_figure,
                format_value=format_count,
            ),
            ReportColumn(
                name="idle_share",
                heading="idle",
                title="Idle share",
                figure=_idle_figure,
                format_value=format_percent,
                is_share=True,
            ),
            ReportColumn(
                name="peak_bytes",
                heading="peak memory",
                title="Peak memory of a device",
                figure=_peak_figure,
                format_value=format_bytes,
            ),
            ReportColumn(
                name="peak_share",
                heading="of limit",
                figure=_peak_share_figure,
                format_value=format_percent,
                is_share=True,
            ),
        )
    },
)
"""Every column by name, in the order of `pipefit compare`."""
