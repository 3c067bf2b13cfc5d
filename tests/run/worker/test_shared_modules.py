"""Modules that lie on the language model's devices in a grid of their own, against one process, in float64.

A shared module is held whole on every lane of the language model; its stages take turns at the microbatches.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.run.worker.test_modules import agrees, layouts, reference, run
from tests.support import modules_cases as cases
from tests.support import modules_toys as toys
from tests.support.modules_toys import ALL, Layout
from tests.support.worker_cases import prepare

from pipefit.plan.check.rules import check_plan
from pipefit.run.transfers.packed import TokenRuns
from pipefit.run.worker.build import shared_devices, stage_programs, tied_uses

ONE = Layout()
PAIR, SHARDS = Layout((1, 1)), Layout(shards=(1, 1))
FOUR, GRID, SPLIT = Layout((1,) * 4), Layout((1, 1), shards=(1, 1)), Layout(shards=(1,) * 2, sharding="megatron-sp")
CUT = (2,)


def lying(language: Layout, vision: Layout = ONE, generator: Layout = ONE):
    """The layout of every module; what is shared takes none of it."""
    return layouts(vision, language, generator)


SHARED = {
    "vision, one device a lane": (lying(Layout((1,), CUT)), {"vision": (ONE, ONE)}, {}),
    "vision 2 replicas on language 2 shards": (lying(Layout((1,), CUT, (1, 1))), {"vision": (PAIR, PAIR)}, {}),
    "vision 2 shards on language 2 replicas, zero-1": (
        lying(Layout((1, 1), CUT)), {"vision": (SHARDS, SHARDS)}, {"sharded_state": "optimizer"},
    ),
    "vision on one lane in another grid": (lying(Layout(shards=(1, 1))), {"vision": (PAIR,)}, {}),
    "generator 2 replicas on language 2 shards": (lying(Layout((1,), CUT, (1, 1))), {"generator": (PAIR, PAIR)}, {}),
    "both, in grids that differ from lane to lane": (
        lying(Layout((1, 1), CUT, (1, 1))), {"vision": (FOUR, GRID), "generator": (GRID, FOUR)}, {"recompute": "full"},
    ),
    "both, unequal shares": (
        lying(Layout((2, 1, 1), CUT)),
        {"vision": (Layout((1,) * 3), Layout((1, 2, 1))), "generator": (Layout((1, 1, 2)), Layout((1,) * 3))},
        {},
    ),
    "vision with split tokens, generator elsewhere": (
        lying(Layout((1, 1), CUT), generator=Layout((1, 1, 1))), {"vision": (SPLIT, SPLIT)}, {},
    ),
    "both in the language model's grid, other forms": (
        lying(Layout((1,), CUT, (1, 1))), {"vision": (SPLIT, SHARDS), "generator": (SPLIT, SPLIT)}, {},
    ),
    "generator, vision elsewhere": (
        lying(Layout((1,), CUT, (1, 1)), vision=Layout((1,) * 3)), {"generator": (PAIR, SHARDS)},
            {"sharded_state": "optimizer"},
    ),
    "4 turns on lanes of 2": (
        lying(Layout((1, 1), (1, 2, 3))),
        {"vision": (PAIR, SHARDS, PAIR, PAIR), "generator": (PAIR, PAIR, SHARDS, PAIR)}, {"microbatches": 6},
    ),
    "one lane of 6, vision 6 replicas": (
        lying(Layout((1,) * 3, shards=(1, 1)), generator=PAIR), {"vision": (Layout((1,) * 6),)}, {"microbatches": 2},
    ),
}  # fmt: skip


def made(case: str, frozen: tuple[str, ...] = (), tied: bool = False, **more):
    """(model, checked plan) of a case."""
    each, shared, words = (SHARED | TOGETHER | DIVIDED | INLINE)[case]
    model = toys.model(ALL, frozen, tied)
    order = "inline 1f1b" if case in INLINE else "gpipe"
    plan = toys.plan(model, each, shared=shared, **{"order": order} | words | more)
    check_plan(plan, model)
    return model, plan


@pytest.mark.parametrize("case", SHARED)
def test_loss_and_every_gradient_are_those_of_one_process(gloo_pool, case):
    model, plan = made(case)
    agrees(run(gloo_pool, plan, model), *reference(ALL))


TOGETHER = {
    "6 microbatches, vision 3 together on 4 replicas, language 2 x 2": (
        lying(Layout((1, 1), CUT, (1, 1))), {"vision": (FOUR, FOUR), "generator": (GRID, GRID)},
        {"microbatches": 6, "multiple": 3},
    ),
    "both, 2 of 4 together, in other grids": (
        lying(Layout((1, 1), CUT)), {"vision": (PAIR, SHARDS), "generator": (SHARDS, PAIR)},
        {"microbatches": 4, "multiple": 2},
    ),
    "one lane, the same grid": (lying(PAIR), {"vision": (PAIR,)}, {"microbatches": 6, "multiple": 2}),
    "unequal shares, 2 of 4 together": (
        lying(Layout((2, 1), CUT)),
        {"vision": (Layout((2, 1)), Layout((1, 2))), "generator": (Layout((1, 2)), Layout((2, 1)))},
        {"microbatches": 4, "multiple": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOGETHER)
def test_several_microbatches_together(gloo_pool, case):
    model, plan = made(case)
    assert max(stage.microbatch_multiple for stage in plan.stages) > 1
    agrees(run(gloo_pool, plan, model), *reference(ALL))


DIVIDED = {
    "vision on 4 replicas, in line with language 2 x 2": (
        lying(Layout((1, 1), (), (1, 1), "megatron-sp")), {"vision": (FOUR,)}, {"divided": ("vision",)},
    ),
    "both, 2 of 4 together": (
        lying(Layout((1, 1), CUT)), {"vision": (PAIR, SHARDS), "generator": (SHARDS, PAIR)},
        {"microbatches": 4, "multiple": 2, "divided": ("vision", "generator")},
    ),
    "one grid, vision alone": (lying(PAIR), {"vision": (PAIR,)}, {"divided": ("vision",)}),
    "split tokens, generator on devices of its own": (
        lying(Layout((1, 1), CUT), generator=Layout((1, 2, 1))), {"vision": (SPLIT, SPLIT)},
        {"divided": ("vision", "generator"), "sharded_state": "optimizer"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DIVIDED)
def test_replicas_that_divide_images(gloo_pool, case):
    """Replicas hold images of samples that the language model has elsewhere."""
    model, plan = made(case)
    runs = TokenRuns(plan)
    runs.set_counts(toys.images(ALL, 0))
    samples = TokenRuns(replace(plan, stages=tuple(replace(stage, divide="samples") for stage in plan.stages)))
    samples.set_counts(toys.images(ALL, 0))
    stages = [index for index, stage in enumerate(plan.stages) if stage.divide == "images"]
    asked = [(plan.stages[stage].space, stage, m) for stage in stages for m in range(plan.order.microbatches)]
    assert any(runs.replica_runs(*one) != samples.replica_runs(*one) for one in asked)
    agrees(run(gloo_pool, plan, model), *reference(ALL))


FROZEN = {
    "vision": (("vision",), "both, in grids that differ from lane to lane", {0, 1}),
    "the encoder before its projector": (("vision.encoder",), "both, 2 of 4 together, in other grids", set()),
    "vision and language": (("vision", "language"), "generator, vision elsewhere", {0, 1, 2}),
    "generator": (("generator",), "generator 2 replicas on language 2 shards", set()),
    "language": (("language",), "both, unequal shares", set()),
    "language and generator": (("language", "generator"), "both, 2 of 4 together, in other grids", set()),
    "vision and generator": (("vision", "generator"), "both in the language model's grid, other forms", {0, 1}),
    "vision, in line": (("vision",), "grids of their own", {0}),
    "generator, in line": (("generator",), "2 shards, split tokens", set()),
}  # fmt: skip


@pytest.mark.parametrize("case", FROZEN)
def test_frozen_modules(gloo_pool, case):
    frozen, layout, dead = FROZEN[case]
    model, plan = made(layout, frozen)
    agrees(run(gloo_pool, plan, model), *reference(ALL, frozen))
    kinds = {(action.kind, action.stage) for _, _, action in plan.to_schedule()}
    assert {stage for kind, stage in kinds if kind == "B"} == {*range(len(plan.stages))} - dead
    assert not {stage for kind, stage in kinds if kind in ("RECV_B", "REDUCE")} & dead, "a gradient nobody needs"


@pytest.mark.parametrize(
    "case",
    [
        "both, in grids that differ from lane to lane", "4 turns on lanes of 2", "both, 2 of 4 together",
        "grids of their own",
    ],
)  # fmt: skip
def test_a_step_without_an_image(gloo_pool, case):
    model, plan = made(case)
    agrees(run(gloo_pool, plan, model, 1, True, toys.NO_IMAGES), *reference(ALL, step=toys.NO_IMAGES))


@pytest.mark.parametrize("case", ["both, unequal shares", "2 replicas"])
def test_tied_embeddings(gloo_pool, case):
    """On the first and the last lane, where other modules lie as well: in turns, and in line with ZeRO-1."""
    model, plan = made(case, tied=True)
    (uses,) = (parameter.uses for parameter in plan.parameters if "embed_tokens" in parameter.name)
    assert [plan.stages[use].module for use in uses] == ["language"] * 2
    agrees(run(gloo_pool, plan, model), *reference(ALL, tied=True))


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_stages_beside_a_pipeline_in_its_own_order(gloo_pool, family):
    model, plan = made(
        "both, in grids that differ from lane to lane", order=f"beside {family}", microbatches=6, multiple=2
    )
    agrees(run(gloo_pool, plan, model), *reference(ALL))


@pytest.mark.parametrize("microbatches", [4, 6])
def test_four_turns_beside_four_lanes(gloo_pool, microbatches):
    model, plan = made("4 turns on lanes of 2", order="beside 1f1b", microbatches=microbatches)
    agrees(run(gloo_pool, plan, model), *reference(ALL))


INLINE = {
    "2 replicas": (lying(Layout((1, 1), CUT)), {"vision": (PAIR,), "generator": (PAIR,)},
        {"sharded_state": "optimizer"}),
    "2 shards, split tokens": (
        lying(Layout((1,), CUT, (1, 1), "megatron-sp")), {"vision": (SPLIT,), "generator": (SPLIT,)}, {},
    ),
    "grids of their own": (
        lying(Layout((1,), CUT, (1, 1), "megatron-sp")), {"vision": (PAIR,), "generator": (PAIR,)},
            {"sharded_state": "optimizer"},
    ),
    "one grid of its own, 4 devices a lane": (
        lying(Layout((1, 1), CUT, (1, 1), "megatron-sp")),
        {"vision": (Layout((1, 1, 1, 1)),), "generator": (Layout((1, 1), (), (1, 1), "megatron-sp"),)}, {},
    ),
    "unequal shares": (
        lying(Layout((2, 1), CUT)), {"vision": (Layout((2, 1)),), "generator": (Layout((1, 2)),)}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "family", "groups"),
    [
        ("2 replicas", "zb-h1", 2), ("2 shards, split tokens", "1f1b", 2), ("grids of their own", "1f1b", 4),
        ("grids of their own", "zb-h1", 4), ("one grid of its own, 4 devices a lane", "eager-1f1b", 3),
        ("unequal shares", "1f1b", 3),
    ],
)  # fmt: skip
def test_modules_in_line_on_the_first_and_the_last_lane(gloo_pool, case, family, groups):
    model, plan = made(case, order=f"inline {family}", microbatches=3)
    assert plan.order.placement == (0, 0, 1, 1) and len(plan.groups) == groups
    agrees(run(gloo_pool, plan, model), *reference(ALL))


def test_messages_need_no_tags_training_goes_on_alike_and_an_evaluation_takes_turns_too(gloo_pool):
    """Three steps: what every lane holds of a shared module stays the same, and a parameter is saved once."""
    model, plan = made("both, unequal shares")
    gloo_pool.run(prepare, [(plan, model)], False, ranks=8)
    devices = len(plan.used_devices)
    found = gloo_pool.run(cases.run_steps, plan, model, 3, False, ranks=devices)[0]
    losses, by = gloo_pool.run(cases.evaluated, plan, model, ranks=devices)[0], toys.divisors(ALL, 0)
    weighted = losses[0] / by["language"] + 0.5 * losses[1] / by["generator"]
    assert weighted == pytest.approx(reference(ALL)[0], rel=1e-12)
    alone = toys.plan(model, dict.fromkeys(ALL, Layout()), together=True, order="gpipe")
    wanted = run(gloo_pool, alone, model, 3)
    for (loss, norm), one in zip(wanted["steps"], found["steps"], strict=True):
        assert one == pytest.approx((loss, norm), rel=1e-10)
    assert {*found["parameters"]} == {*wanted["parameters"]}
    for name, value in wanted["parameters"].items():
        if not name.endswith("k_proj.bias"):  # its gradient is rounding, which AdamW makes large
            assert np.allclose(found["parameters"][name], value, rtol=1e-8, atol=1e-11), name


@pytest.mark.parametrize("ways", [("shared", "apart"), ("apart", "shared")])
def test_a_checkpoint_goes_from_one_placement_to_the_other(gloo_pool, tmp_path, ways):
    """A parameter is saved once, with its moments, and every lane of the next plan has it."""
    model, shared = made("vision 2 shards on language 2 replicas, zero-1")
    apart = toys.plan(model, layouts(Layout((1, 1)), Layout((1, 1), CUT), Layout((1,))), sharded_state="optimizer")
    plans = [{"shared": shared, "apart": apart}[way] for way in ways]
    gloo_pool.run(prepare, [(one, model) for one in plans], True, ranks=8)
    ranks = max(len(one.used_devices) for one in plans)
    found = gloo_pool.run(cases.resumed, str(tmp_path), *plans, model, ranks=ranks)[0]
    wanted = run(gloo_pool, apart, model, 4)["steps"][2:]
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_one_sum_makes_the_gradients_of_stages_that_hold_parameters_alike():
    """Over the devices of all lanes; where a lane splits what another has whole, lanes exchange their own sums."""

    def members(case: str, name: str):
        model, plan = made(case)
        programs = stage_programs(plan, model)
        return shared_devices(plan, model, tied_uses(plan, model, programs), programs).get(name)

    weight = "vision.layers.0.mlp.fc1.weight"
    assert members("vision 2 replicas on language 2 shards", weight) == dict.fromkeys(range(4), (0, 1, 2, 3))
    assert members("vision 2 shards on language 2 replicas, zero-1", weight) == {
        0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3),
    }  # fmt: skip
    assert members("both, in grids that differ from lane to lane", weight) is None
