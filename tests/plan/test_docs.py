"""The pages on planning say what is true: their example is a valid plan, their commands and keys exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.golden_plans import tied_embeddings

from pipefit.codec import load_text
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.check.rules import check_plan, check_staleness
from pipefit.plan.request.constraints import KEYS
from pipefit.plan.types import InputHashes, Plan

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_of_the_format_is_a_valid_plan_written_by_hand() -> None:
    text = (DOCS / "reference" / "plan-format.md").read_text()
    example = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert example is not None
    plan = load_text(Plan, example[1], "docs/reference/plan-format.md")
    made = tied_embeddings()
    assert plan.prediction is None and plan.hashes == InputHashes(model="", cluster="")
    check_plan(plan, made.model, made.cluster)
    check_staleness(plan, made.model, made.cluster)
    assert simulate_plan(plan, made.model, made.cluster).timeline.makespan_s > 0


def test_every_field_of_a_plan_is_on_the_page() -> None:
    text = (DOCS / "reference" / "plan-format.md").read_text()
    for name in Plan.__dataclass_fields__:
        assert f"`{name}`" in text, name


def test_every_key_that_can_be_fixed_is_on_the_page() -> None:
    text = (DOCS / "design" / "planner.md").read_text()
    for key in KEYS:
        assert f"`{key}`" in text, key


def test_the_python_example_runs_as_it_stands() -> None:
    """With the toy model in place of the built-in one, which would need torch."""
    from tests.support.plan_toys import toy_model

    example = re.search(r"```python\n(.*?)```", (DOCS / "design" / "planner.md").read_text(), re.DOTALL)
    assert example is not None
    scope: dict[str, object] = {"open_model": lambda name: toy_model(3)}
    lines = [line for line in example[1].splitlines() if "model.registry" not in line]
    exec("\n".join(lines), scope)
    assert isinstance(scope["best"], Plan) and isinstance(scope["mine"], Plan)
