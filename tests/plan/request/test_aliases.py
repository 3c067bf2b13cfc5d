"""The field's names for keys of `--fix`, and what is said about fixes that contradict each other."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from tests.support.plan_toys import toy_model

from pipefit.cluster import parse_spec
from pipefit.errors import PlanError
from pipefit.plan.candidates.space_checks import check_space
from pipefit.plan.make import make_plan
from pipefit.plan.request.aliases import ALIASES, ROWS, UNAVAILABLE
from pipefit.plan.request.constraints import KEYS, NO_CONSTRAINTS, Constraints, parse_constraints
from pipefit.plan.types import Job

JOB = Job(batch=12, sequence=64, precision="float32")


@pytest.mark.parametrize(
    ("words", "constraints"),
    [
        ("dp=2 tp=4 pp=3", Constraints(replicas=(1, 1), shards=(1,) * 4, stages=3)),
        ("dp=2:1", Constraints(replicas=(2, 1))),
        ("zero=0", Constraints(sharded_state="none")),
        ("zero=1", Constraints(sharded_state="optimizer")),
        ("zero=2", Constraints(sharded_state="gradients")),
        ("zero=3", Constraints(sharded_state="parameters")),
        ("fsdp=true", Constraints(sharded_state="parameters")),
        ("fsdp=4", Constraints(replicas=(1,) * 4, sharded_state="parameters")),
        ("zero1=true", Constraints(sharded_state="optimizer")),
        ("tp=2 sp=true", Constraints(shards=(1, 1), sharding="megatron-sp")),
        ("tp=2 sp=no", Constraints(shards=(1, 1), sharding="megatron")),
        ("mbs=2 dp=3", Constraints(replicas=(1, 1, 1), microbatches=2)),
        ("mbs=2 dp=3 microbatches=2", Constraints(replicas=(1, 1, 1), microbatches=2)),
        ("tp=2 shards=2", Constraints(shards=(1, 1))),
        ("ep=1 vp=1", NO_CONSTRAINTS),
        ("ep=4", Constraints(shards=(1,) * 4, sharding="expert")),
        ("ep=4 dp=8", Constraints(shards=(1,) * 4, sharding="expert", replicas=(1, 1))),
        ("dp=4 ep=4 tp=1", Constraints(shards=(1,) * 4, sharding="expert", replicas=(1,))),
        ("ep=2 fsdp=4", Constraints(shards=(1, 1), sharding="expert", replicas=(1, 1), sharded_state="parameters")),
        ("ep=2 fsdp=2", Constraints(shards=(1, 1), sharding="expert", replicas=(1,), sharded_state="parameters")),
        ("ep=2 replicas=3", Constraints(shards=(1, 1), sharding="expert", replicas=(1, 1, 1))),
        ("ep=2 dp=4 mbs=1", Constraints(shards=(1, 1), sharding="expert", replicas=(1, 1), microbatches=3)),
        ("ep=8 tp=8", Constraints(shards=(1,) * 8, sharding="megatron-sp", expert=1)),
        ("ep=8 tp=2", Constraints(shards=(1, 1), sharding="megatron-sp", expert=4)),
        ("ep=8 tp=2 dp=8", Constraints(shards=(1, 1), sharding="megatron-sp", expert=4, replicas=(1, 1))),
        (
            "ep=4 tp=2 fsdp=2 mbs=3",
            Constraints(
                shards=(1, 1),
                sharding="megatron-sp",
                expert=2,
                replicas=(1,),
                sharded_state="parameters",
                microbatches=2,
            ),
        ),
        ("rank_order=pp-first device_order=search", Constraints(inner="stage", mapping="search")),
        ("rank_order=dp-first", Constraints(inner="replica")),
        ("max_units_ahead=2 microbatches_per_call=3", Constraints(ahead=2, multiple=3)),
        ("split_by=images", Constraints(divide="images")),
        ("cp=2 tp=4", Constraints(context=2, shards=(1,) * 4)),
        ("vision.tp=2", Constraints(per_module={"vision": Constraints(shards=(1, 1))})),
    ],
)
def test_aliases_become_fields(words: str, constraints: Constraints) -> None:
    assert parse_constraints(words.split(), batch=12) == constraints


FIELD_WORDS = {
    "rank_order": ("inner", {"dp-first": "replica", "pp-first": "stage"}),
    "device_order": ("mapping", {"hostname": "hostname", "search": "search", "1,0": "1,0"}),
    "microbatches_per_call": ("multiple", {"3": "3"}),
    "split_by": ("divide", {"images": "images", "samples": "samples"}),
    "max_units_ahead": ("ahead", {"2": "2"}),
}


@pytest.mark.parametrize("alias", FIELD_WORDS)
def test_a_word_of_the_field_is_a_key_of_plan_files(alias: str) -> None:
    """By each value, alone and for a module. A wrong value is refused."""
    key, values = FIELD_WORDS[alias]
    for module, (value, known) in itertools.product(("", "vision."), values.items()):
        constraints = parse_constraints([f"{module}{alias}={value}"])
        assert constraints == parse_constraints([f"{module}{key}={known}"]) != NO_CONSTRAINTS
    with pytest.raises(PlanError, match="not a valid value for"):
        parse_constraints([f"{alias}=neither"])


def test_the_glossary_lists_these_words() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", text.partition("## Keys of")[2], re.MULTILINE)
    assert dict(rows) == {alias: key for alias, (key, _) in FIELD_WORDS.items()}


def test_no_alias_hides_a_key() -> None:
    assert not {*ALIASES, *UNAVAILABLE, ROWS} & {*KEYS}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("tp=2 shards=4", ["different values", "tp=2 and shards=4", "leave one of them out"]),
        ("zero=1 sharded_state=none", ["zero=1 and sharded_state=none"]),
        ("tp=2 sp=true sharding=megatron", ["sp=true and sharding=megatron"]),
        ("mbs=2 dp=3 microbatches=4", ["microbatches=4 and mbs=2"]),
        ("tp=2 tp=4", ["fixed twice", "'tp=2' and 'tp=4'"]),
        ("sharded_state=weights", ["not a kind of sharded state", "none, optimizer, gradients, parameters"]),
        ("zero=7", ["not a valid value for 'zero'", "0 none, 1 optimizer"]),
        ("fsdp=1", ["not a valid value for 'fsdp'", "from 2 on"]),
        ("tp=many", ["not a valid value for 'shards'", "tp=many"]),
        ("sp=true", ["A sharding needs the number of shards"]),
        ("cp=0", ["not a valid value for 'context'", "cp=0"]),
        ("cp=2 context=4", ["different values", "cp=2 and context=4"]),
        ("ep=0", ["not a valid value for 'ep'"]),
        ("ep=many", ["not a valid value for 'ep'", "ep=many"]),
        ("language.ep=2", ["models of one module", "language.ep=2", "language.ep=1"]),
        ("ep=8 tp=3", ["tp divides ep", "tp=3 and ep=8", "tp of 1, 2, 4, 8, or ep=6"]),
        ("ep=8 tp=2 dp=6", ["divides the devices of data parallelism", "dp=6 and tp=2 ep=8", "dp=4"]),
        ("ep=8 tp=2 sp=false", ["different values", "ep=8 and sp=false"]),
        ("ep=8 mbs=2", ["add --fix dp=32"]),
        ("ep=2 dp=2:1", ["are a count", "dp=2:1 and ep=2", "replicas=2:1"]),
        ("ep=8 hsdp=8 dp=16", ["over all devices of a stage", "leave out state_group"]),
        ("ep=8 dp=12", ["divides the devices of data parallelism", "dp=12 and ep=8", "dp=8"]),
        ("ep=2 shards=4", ["different values", "ep=2 and shards=4"]),
        ("ep=2 sp=true", ["ep=2 and sp=true"]),
        ("ep=2 hsdp=2", ["not over groups", "state_group=2"]),
        ("vp=2", ["interleaved-1f1b"]),
        ("mbs=2", ["add --fix dp=4"]),
        ("mbs=0 dp=2", ["not a valid value for 'mbs'"]),
        ("mbs=5 dp=2", ["mbs=5 x dp=2 = 10 rows", "mbs=1, mbs=2, mbs=3, mbs=6"]),
        ("mbs=1 dp=5", ["dp of 2, 3, 4, 6"]),
        ("fsdpp=2", ["no key 'fsdpp'", "did you mean 'fsdp'"]),
    ],
)
def test_bad_aliases_are_answered(words: str, told: list[str]) -> None:
    with pytest.raises(PlanError) as refused:
        parse_constraints(words.split(), batch=12)
    assert all(part in str(refused.value) for part in told), str(refused.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("dp=3 tp=2", "the nearest that go together: replicas=2 shards=2, or replicas=3 shards=1"),
        ("dp=12", "the nearest possible: replicas=4"),
        ("microbatches=5", "the nearest possible: microbatches=4"),
        (
            "dp=4 microbatches=12",
            "the nearest that go together: replicas=1 microbatches=12, or replicas=4 microbatches=3",
        ),
    ],
)
def test_fixes_that_leave_no_plan_are_answered_with_the_nearest(words: str, told: str) -> None:
    with pytest.raises(PlanError) as refused:
        make_plan(toy_model(6), parse_spec("4xA100-80"), JOB, parse_constraints(words.split()))
    assert told in str(refused.value), str(refused.value)


def test_the_nearest_fixes_are_those_of_all_counts() -> None:
    """Against every pair of counts: no closer count of the replicas leaves a plan with four shards."""
    allowed = []
    for replicas, shards in itertools.product(range(1, 13), (4,)):
        try:
            check_space(JOB, 6, 8, Constraints(replicas=(1,) * replicas, shards=(1,) * shards))
        except PlanError:
            continue
        allowed.append(replicas)
    with pytest.raises(PlanError) as refused:
        make_plan(toy_model(6), parse_spec("8xA100-80"), JOB, parse_constraints(["dp=7", "tp=4"]))
    nearest = min(allowed, key=lambda count: (abs(count - 7), count))
    assert f"replicas={nearest} shards=4" in str(refused.value)
