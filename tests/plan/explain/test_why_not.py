"""The sentence of cause about a layout that lost, and the words of the layout."""

from __future__ import annotations

import pytest

from pipefit.errors import DoesNotFitError, PlanError
from pipefit.plan.explain.step_parts import BUBBLE, COLLECTIVES, COMPUTE, STEP_PARTS
from pipefit.plan.explain.text import format_table
from pipefit.plan.explain.why_not import (
    LayoutComparison,
    LayoutFigures,
    comparison_data,
    comparison_tables,
    explain_difference,
    parse_layout,
    rename_option,
)

GIB = 2.0**30


def figures_of(step_s: float, shards: str = "1", peak_bytes: float = GIB, **parts_s: float) -> LayoutFigures:
    """Return figures whose compute is the rest of the step."""
    known = {"bubble": BUBBLE, "collectives": COLLECTIVES}
    parts = dict.fromkeys(STEP_PARTS, 0.0) | {known[name]: seconds for name, seconds in parts_s.items()}
    parts[COMPUTE] = step_s - sum(parts.values())
    decisions = {"replicas": "1", "stages": "1", "shards": shards, "microbatches": "1", "schedule": "1f1b"}
    return LayoutFigures(decisions=decisions, step_s=step_s, parts_s=parts, peak_bytes=peak_bytes, limit_bytes=2 * GIB)


def compare(chosen: LayoutFigures, asked: LayoutFigures) -> LayoutComparison:
    return LayoutComparison(words="tp=2", chosen=chosen, asked=asked)


CASES = {
    "one cause": (
        compare(figures_of(1.0), figures_of(1.5, "2", collectives=0.5)),
        "tp=2 is 50.0% slower than the chosen plan (1.50 s against 1.00 s): 500 ms more collectives inside the layers.",
    ),
    "two causes": (
        compare(figures_of(1.0), figures_of(1.5, "2", collectives=0.3, bubble=0.2)),
        "tp=2 is 50.0% slower than the chosen plan (1.50 s against 1.00 s): 300 ms more collectives inside the layers "
        "and 200 ms more pipeline bubble.",
    ),
    "a gain beside the loss": (
        compare(figures_of(1.0, bubble=0.2), figures_of(1.3, "2", collectives=0.5)),
        "tp=2 is 30.0% slower than the chosen plan (1.30 s against 1.00 s): 500 ms more collectives inside the layers; "
        "it saves 200 ms of pipeline bubble.",
    ),
    "faster": (
        compare(figures_of(1.0, bubble=0.3), figures_of(0.8, "2", collectives=0.1)),
        "tp=2 is 20.0% faster than the chosen plan (800 ms against 1.00 s): 300 ms less pipeline bubble; it adds "
        "100 ms of collectives inside the layers.",
    ),
    "as fast": (
        compare(figures_of(1.0), figures_of(1.0, "2", peak_bytes=1.5 * GIB)),
        "tp=2 is as fast as the chosen plan, with 512 MiB more memory.",
    ),
    "the same": (compare(figures_of(1.0), figures_of(1.0)), "The chosen plan is the best plan with tp=2."),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_one_sentence(name: str) -> None:
    comparison, sentence = CASES[name]
    assert explain_difference(comparison) == sentence


def test_tables_have_both_plans_and_only_parts_that_some_plan_has() -> None:
    comparison = compare(figures_of(1.0), figures_of(1.3, "2", collectives=0.5))
    layouts, seconds = comparison_tables(comparison)
    assert [row[0] for row in layouts.rows] == ["chosen", "asked"] and layouts.rows[1][3] == "2"
    assert seconds.rows == (
        ("compute", "1.00 s", "800 ms", "-200 ms"),
        ("collectives inside the layers", "0 s", "500 ms", "+500 ms"),
        ("step", "1.00 s", "1.30 s", "+300 ms"),
    )
    assert len(format_table(seconds).splitlines()) < 15
    data = comparison_data(comparison)
    assert sum(data["difference_s"].values()) == pytest.approx(data["asked"]["step_s"] - data["chosen"]["step_s"])


def test_layouts_take_the_keys_and_aliases_of_fix() -> None:
    constraints = parse_layout(" tp=2  pp=4 recompute=full dp=2 mbs=1", batch=8)
    assert constraints.shard_count == 2 and constraints.stages == 4 and constraints.recompute == ("full",)
    assert constraints.microbatches == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ["layout to compare with is empty", "where: --why-not", "tp=8 pp=4"]),
        ("tp", ["written KEY=VALUE", "where: --why-not", "seen: 'tp'"]),
        ("tpp=2", ["--why-not has no key 'tpp'", "did you mean 'tp'"]),
        ("tp=x", ["not a valid value for 'shards'", "where: --why-not", "'tp=x'"]),
        ("tp=2 tp=4", ["fixed twice", "where: --why-not"]),
        ("tp=2 shards=4", ["different values", "where: --why-not"]),
        ("vp=2", ["not implemented", "where: --why-not", "vp=1"]),
        ("mbs=3", ["only with the number of replicas", "try: add dp=4, or use microbatches=8 in place of mbs=3"]),
    ],
)
def test_mistakes_name_the_option(words: str, expected: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        parse_layout(words, batch=8)
    for text in expected:
        assert text in str(caught.value)
    assert "--fix" not in str(caught.value)


def test_a_renamed_error_keeps_its_kind() -> None:
    error = DoesNotFitError("No plan fits.", where="x", next_step="drop --fix shards: without it a plan fits")
    renamed = rename_option(error)
    assert isinstance(renamed, DoesNotFitError)
    assert renamed.next_step == "drop shards: without it a plan fits" and renamed.allowed is None
