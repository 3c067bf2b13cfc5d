"""The alternatives are the best plan of each kind, and no two rows show the same choices."""

from __future__ import annotations

from pipefit.cluster import open_cluster
from pipefit.model.registry import open_model
from pipefit.plan.explain.step_parts import STEP_PARTS, describe_part
from pipefit.plan.explain.text import alternative_table
from pipefit.plan.make import make_plan
from pipefit.plan.request.plan_kinds import PLAN_KINDS
from pipefit.plan.types import Job


def test_alternatives_are_of_several_kinds_and_every_row_differs() -> None:
    plan = make_plan(open_model("tiny"), open_cluster("4xA100-40"), Job(batch=8, sequence=64))
    fitting = [one for one in plan.alternatives if one.peak_bytes <= one.limit_bytes]
    kinds = [one.reason.partition(": ")[0] for one in fitting]
    assert {*kinds} <= {kind.name for kind in PLAN_KINDS}
    assert len({*kinds}) > 1, kinds
    table = alternative_table(plan)
    rows = [row[: table.columns.index("step")] for row in table.rows]
    assert len({*rows}) == len(rows)


def test_every_slower_plan_lost_by_seconds_of_one_part() -> None:
    """The part is one of those of `--why-not`, so both tell the same cause."""
    plan = make_plan(open_model("tiny"), open_cluster("4xA100-40"), Job(batch=8, sequence=64), top=12)
    causes = [one.reason.partition(" slower: ")[2] for one in plan.alternatives if " slower: " in one.reason]
    assert len(causes) > 2
    assert {cause.partition(" more ")[2] for cause in causes} <= {describe_part(name) for name in STEP_PARTS}


def test_alternatives_of_several_modules_have_the_same_parts() -> None:
    plan = make_plan(open_model("multimodal-tiny"), open_cluster("4xH100"), Job(batch=8, sequence=128))
    causes = [one.reason.partition(" slower: ")[2] for one in plan.alternatives if " slower: " in one.reason]
    assert causes and {cause.partition(" more ")[2] for cause in causes} <= {describe_part(name) for name in STEP_PARTS}
