"""The alternatives are the best plan of each kind, and no two rows show the same choices."""

from __future__ import annotations

from pipefit.cluster import open_cluster
from pipefit.model.registry import open_model
from pipefit.plan.explain.text import alternative_table
from pipefit.plan.make import make_plan
from pipefit.plan.request.plan_kinds import KINDS
from pipefit.plan.types import Job


def test_alternatives_are_of_several_kinds_and_every_row_differs() -> None:
    plan = make_plan(open_model("tiny"), open_cluster("4xA100-40"), Job(batch=8, sequence=64))
    fitting = [one for one in plan.alternatives if one.peak_bytes <= one.limit_bytes]
    kinds = [one.reason.partition(": ")[0] for one in fitting]
    assert {*kinds} <= {kind.name for kind in KINDS}
    assert len({*kinds}) > 1, kinds
    table = alternative_table(plan)
    rows = [row[: table.columns.index("step")] for row in table.rows]
    assert len({*rows}) == len(rows)
