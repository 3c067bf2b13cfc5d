"""Helpers of the plan commands: open the named plan, model and cluster, and print tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.errors import PipefitError

if TYPE_CHECKING:
    from pipefit.cluster import Cluster
    from pipefit.model.graph import Model
    from pipefit.plan.explain.text import TextTable
    from pipefit.plan.types import Plan


MEMORY_FLAGS = {
    "memory_correction": ("--memory-correction", "--memory"),
    "max_oom_probability": ("--max-oom-probability", "--risk"),
}
"""Option strings of a memory correction; the second ones are earlier names."""

INTERRUPTED_CODE = 130
"""Exit code after Ctrl-C without a plan, as shells report it."""


def cluster_text(cluster: str | None, local: int | None) -> str:
    """Return the text that names the cluster. Raises PipefitError unless exactly one option is given."""
    from pipefit.cluster import LOCAL

    if (cluster is None) == (local is None):
        raise PipefitError(
            "Say which cluster to plan for." if cluster is None else "The cluster is named twice.",
            where="--cluster, --local",
            allowed="one of --cluster FILE.json, --cluster 8xH100, --cluster 2x8xA100-80:200Gbit/s, --local 4",
        )
    return f"{LOCAL}{local}" if cluster is None else cluster


def open_subject(plan: Plan, model: str | None, cluster: str | None, local: int | None) -> tuple[Model, Cluster]:
    """Open the model and cluster of a plan: as named in the plan, unless the user names others.

    Raises StalePlanError if either has changed since the plan was made, PipefitError if the plan names no cluster.
    """
    from pipefit.cluster import open_cluster
    from pipefit.model.registry import open_model
    from pipefit.plan.check.rules import check_plan, check_staleness

    named = cluster is not None or local is not None
    text = cluster_text(cluster, local) if named else plan.cluster
    if not text:
        raise PipefitError(
            "The plan does not say which cluster it is for.",
            where="cluster",
            next_step="add --cluster FILE.json or --local N",
        )
    opened_cluster = open_cluster(text)
    opened_model = open_model(model or plan.model.name, plan.job.sequence, plan.model.config)
    check_staleness(plan, opened_model, opened_cluster)
    check_plan(plan, opened_model, opened_cluster)
    return opened_model, opened_cluster


def plan_maker(memory: Path | None, risk: float | None) -> Callable[..., Plan]:
    """Return the planning function: with the analytic memory model, or with a memory correction and an allowed risk."""
    from pipefit.cost.memory.correction_file import load_memory
    from pipefit.errors import PlanError
    from pipefit.plan.make import make_plan
    from pipefit.plan.risk import RISK, check_risk, make_plan_at_risk

    if memory is None:
        if risk is not None:
            raise PlanError(
                "The probability that a plan does not fit is unknown without a memory correction.",
                where="--max-oom-probability",
                seen=risk,
                next_step="name a file with --memory-correction FILE; `pipefit verify PLAN --record FILE` makes one",
            )
        return make_plan
    allowed = RISK if risk is None else risk
    check_risk(allowed)
    return partial(make_plan_at_risk, facts=load_memory(memory), risk=allowed)


def print_tables(tables: Iterable[TextTable]) -> None:
    """Print tables, with lines on a terminal and plain into a pipe."""
    if not sys.stdout.isatty():
        from pipefit.plan.explain.text import format_table

        for table in tables:
            print(f"\n{format_table(table)}")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for table in tables:
        drawn = Table(title=table.title, box=box.SIMPLE_HEAD, title_justify="left")
        for column in table.columns:
            drawn.add_column(column, overflow="fold")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
