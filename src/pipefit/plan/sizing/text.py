"""The sizes of a training as text: the question in one line, the answers, and the table."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.plan.explain.text import TextTable
from pipefit.plan.sizing.request import SizingRequest
from pipefit.plan.sizing.sizes import DAY_S, SizedTraining, answer_sizes
from pipefit.units import format_count, format_seconds


def size_headline(request: SizingRequest) -> str:
    """Return the training in one line."""
    job = request.job
    deadline = "" if request.deadline_s is None else f", within {format_days(request.deadline_s / DAY_S)}"
    return (
        f"{request.name}: {format_count(request.tokens)} tokens{deadline}; {request.steps:,.0f} steps of "
        f"{job.batch:,} x {job.sequence:,} tokens ({format_count(job.batch * job.sequence)}), {job.precision}, "
        f"{job.optimizer}"
    )


def answer_lines(request: SizingRequest, trainings: Sequence[SizedTraining]) -> list[str]:
    """Return a line for each answer, such as `smallest in time: 8x8xH100:8x400Gbit/s, 21.3 days, ...`."""
    return [
        f"{answer.question}: {'none' if answer.training is None else training_words(answer.training)}"
        for answer in answer_sizes(trainings, request.deadline_s)
    ]


def training_words(training: SizedTraining) -> str:
    """Return a training that fits in words: its cluster, time, cost, and layout."""
    return f"{training.size.cluster}, {time_words(training)}; {training.layout}"


def time_words(training: SizedTraining) -> str:
    """Return the time of a training that fits, and its cost if there are prices."""
    assert training.days is not None
    cost = "" if training.cost is None else f", {format_cost(training.cost)}"
    return f"{format_days(training.days)}{cost}"


def size_table(request: SizingRequest, trainings: Sequence[SizedTraining]) -> TextTable:
    """Return the table of all clusters."""
    columns = size_columns(request)
    return TextTable("clusters", columns, tuple(size_cells(request, training) for training in trainings))


def size_columns(request: SizingRequest) -> tuple[str, ...]:
    """Return the heads of the table."""
    cost = () if request.prices is None else ("cost",)
    deadline = () if request.deadline_s is None else ("in time",)
    return ("cluster", "devices", "step", "time", *deadline, "device hours", *cost, "MFU", "memory", "layout")


def size_cells(request: SizingRequest, training: SizedTraining) -> tuple[str, ...]:
    """Return the cells of a row, by `size_columns`."""
    size = training.size
    if training.days is None or training.step_s is None:
        blanks = len(size_columns(request)) - 3
        return (size.cluster, str(size.devices), *[""] * blanks, training.layout)
    in_time = request.deadline_s is not None and training.days * DAY_S <= request.deadline_s
    return (
        size.cluster,
        str(size.devices),
        format_seconds(training.step_s),
        format_days(training.days),
        *(() if request.deadline_s is None else ("yes" if in_time else "no",)),
        format_cost(training.device_hours or 0.0),
        *(() if training.cost is None else (format_cost(training.cost),)),
        f"{training.mfu or 0:.1%}",
        f"{training.memory_share or 0:.0%}",
        training.layout,
    )


def format_days(days: float) -> str:
    """Return a duration as `21.3 days`, or in hours below two days."""
    if days < 2:
        hours = 24 * days
        return f"{hours:.1f} hours" if hours >= 1 else format_seconds(hours * 3600)
    return f"{days:,.1f} days"


def format_cost(cost: float) -> str:
    """Return a cost without a currency, which the prices do not name, or hours of devices."""
    return f"{cost:,.0f}" if cost >= 100 else f"{cost:,.2f}"
