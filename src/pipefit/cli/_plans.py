"""What the plan commands share: opening what the user named, and printing tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipefit.errors import PipefitError

if TYPE_CHECKING:
    from pipefit.cluster import Cluster
    from pipefit.model.graph import Model
    from pipefit.plan.explain.text import TextTable
    from pipefit.plan.types import Plan


def cluster_text(cluster: str | None, local: int | None) -> str:
    """The one way in which the user named the cluster. Raises PipefitError for none or both."""
    from pipefit.cluster import LOCAL

    if (cluster is None) == (local is None):
        raise PipefitError(
            "Say which cluster to plan for." if cluster is None else "The cluster is named twice.",
            where="--cluster, --local",
            allowed="one of --cluster FILE.json, --cluster 8xH100, --cluster 2x8xA100-80:200Gbit/s, --local 4",
        )
    return f"{LOCAL}{local}" if cluster is None else cluster


def open_subject(plan: Plan, model: str | None, cluster: str | None, local: int | None) -> tuple[Model, Cluster]:
    """The model and the cluster that a plan is for: as the plan names them, unless the user names others.

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
    found = open_cluster(text)
    opened = open_model(model or plan.model.name)
    check_staleness(plan, opened, found)
    check_plan(plan, opened, found)
    return opened, found


def print_tables(tables: Iterable[TextTable]) -> None:
    """Tables with lines on a terminal, plain ones into a pipe."""
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
