"""Rules for stages that take turns, each broken once: the message names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support import modules_toys as toys
from tests.support.changes import Change, put
from tests.support.modules_toys import Layout

from pipefit.codec import from_data, to_data
from pipefit.errors import PipefitError
from pipefit.plan.check.rules import check_plan
from pipefit.plan.types import Plan


def plan() -> Plan:
    """Vision on both lanes of the language model: stages 0 and 1, before 2 and 3."""
    layouts = {"vision": Layout(), "language": Layout((1, 1), (2,)), "generator": Layout()}
    pair = Layout(shards=(1, 1))
    return toys.plan(toys.model(), layouts, shared={"vision": (pair, pair)}, order="gpipe")


def swapped(lane: int, old: str, new: str) -> Change:
    def change(data: dict[str, Any]) -> None:
        lanes = data["order"]["lanes"]
        assert old in lanes[lane].split(), lanes[lane]
        lanes[lane] = " ".join(new if word == old else word for word in lanes[lane].split() if word != old or new)

    return change


def without_edge(data: dict[str, Any]) -> None:
    data["edges"] = data["edges"][1:]


def on_one_lane(data: dict[str, Any]) -> None:
    data["stages"][1]["group"] = data["order"]["placement"][1] = 0
    del data["groups"][1]
    for stage in data["stages"][2:]:
        stage["group"] -= 1


def images_unknown(data: dict[str, Any]) -> None:
    for stage in data["stages"][:2]:
        stage["divide"] = "images"
    data["spaces"][1]["counts"] = [3] * 12


def uses_of_one(data: dict[str, Any]) -> None:
    data["parameters"][0] |= {"uses": [0], "owner": 0}


BREAKS: dict[str, tuple[Change, list[str]]] = {
    "no such turn": (put("stages", 1, "turn", value=2), ["turn of a stage is out", "stages[1].turn", "turn 2 of 2"]),
    "a turn twice": (put("stages", 1, "turn", value=0), ["exactly one stage", "stages[1].layers"]),
    "a turn missing": (put("stages", 1, "turns", value=3), ["every turn once", "module 'vision'", "turn 1 of 3"]),
    "several together": (
        put("stages", 1, "microbatch_multiple", value=3),
        ["divide equally many microbatches together", "stages[1]", "3, beside 1"],
    ),
    "divided otherwise": (
        put("stages", 1, "divide", value="images"), ["equally many", "stages[1].divide", "images, beside samples"],
    ),
    "images of sequences": (
        put("stages", 2, "divide", value="images"), ["Only a stage of packed images", "stages[2].divide", "26 tokens"],
    ),
    "images unknown": (images_unknown, ["do not add up to the tokens", "(patches).images", "12 samples"]),
    "one lane": (on_one_lane, ["on different lanes", "module 'vision'", "lanes [0, 0]"]),
    "few microbatches": (put("order", "microbatches", value=1), ["fewer microbatches than turns", "1 microbatches"]),
    "an edge missing": (without_edge, ["needs an edge to each", "stage 2: only with [1]", "all of [0, 1]"]),
    "a use missing": (uses_of_one, ["use the same parameters", "vision.embed.patch.weight", "all of [0, 1]"]),
    "another's microbatch": (swapped(0, "0F2", "0F1"), ["Microbatch 1 is not one of stage 0", "turn 0 of 2"]),
    "a microbatch missing": (swapped(0, "0F2", ""), ["0B2 stands before its forward 0F2"]),
    "sent to another": (
        swapped(1, "1SEND_F1", "1SEND_F0"), ["Microbatch 0 is not one of stage 1", "turn 1 of 2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_every_break_is_named(name: str) -> None:
    change, expected = BREAKS[name]
    data = json.loads(json.dumps(to_data(plan())))
    change(data)
    with pytest.raises(PipefitError) as error:
        check_plan(from_data(Plan, data, "plan.json"))
    for word in expected:
        assert word in str(error.value), str(error.value)


def test_a_parameter_of_two_stages_of_a_lane_lies_in_one_grid() -> None:
    data = json.loads(json.dumps(to_data(plan())))
    parameter = next(each for each in data["parameters"] if each["uses"] == [2])
    parameter["uses"] = [0, 1, 2]
    with pytest.raises(PipefitError, match=r"must have the same grid(.|\n)*stages 0 and 2") as error:
        check_plan(from_data(Plan, data, "plan.json"))
    assert parameter["name"] in str(error.value)
