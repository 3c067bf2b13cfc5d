"""The constraints of a plan: one field for every key of `--fix`, and the same checks from Python."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pipefit.errors import PlanError
from pipefit.plan.request.constraints import KEYS, NO_CONSTRAINTS, Constraints, check_one_module, parse_constraints


def test_every_key_is_a_field_and_free_by_default() -> None:
    assert [*KEYS, "per_module"] == [entry.name for entry in fields(Constraints)]
    assert NO_CONSTRAINTS.to_mapping() == {} and parse_constraints([]) == NO_CONSTRAINTS


def test_words_become_values_of_the_fields() -> None:
    words = ["replicas=2:1", "stages=3", "recompute=none,full,none", "zero1=no", "mapping=hostname", "cuts=1,4"]
    parsed = parse_constraints(words)
    assert parsed == Constraints(
        replicas=(2, 1),
        stages=3,
        recompute=("none", "full", "none"),
        sharded_state="none",
        mapping="hostname",
        cuts=(1, 4),
    )
    assert list(parsed.to_mapping()) == ["replicas", "stages", "recompute", "sharded_state", "cuts", "mapping"]
    assert Constraints(**parsed.to_mapping()) == parsed


def test_words_of_a_module_become_its_own_constraints() -> None:
    parsed = parse_constraints(["vision.replicas=2", "microbatches=4", "vision.placement=shared", "language.shards=2"])
    assert parsed.of_module("vision") == Constraints(replicas=(1, 1), placement="shared")
    assert parsed.of_module("generator") == NO_CONSTRAINTS
    assert replace(parsed, per_module={}) == Constraints(microbatches=4)
    assert set(parsed.to_mapping()) == {"microbatches", "vision.replicas", "vision.placement", "language.shards"}


def test_defaults_fill_only_what_is_free() -> None:
    fixed = Constraints(schedule="gpipe", sharded_state="none")
    assert fixed.with_defaults(schedule="1f1b", sharded_state="optimizer", stages=2) == replace(fixed, stages=2)


def test_counts_follow_from_shares_cuts_and_placement() -> None:
    fixed = Constraints(replicas=(2, 1), cuts=(1, 4), placement=(0, 1, 0))
    assert (fixed.replica_count, fixed.shard_count, fixed.stage_count) == (2, 1, 3)
    assert fixed.lane_of_stage == (0, 1, 0)
    assert NO_CONSTRAINTS.stage_count is None and Constraints(placement="shared").lane_of_stage is None


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        (Constraints(sharding="searched"), "needs the number of shards"),
        (Constraints(stages=3, cuts=(2,)), "different numbers of stages"),
        (Constraints(shards=(1, 1), sharding="none"), "More than one shard needs a sharding"),
    ],
)
def test_contradictions_are_refused_from_python_as_well(constraints: Constraints, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_one_module(constraints)
