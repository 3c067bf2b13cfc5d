"""Plans of several modules against one process: every mix of replica counts, frozen and trained modules, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from tests.support import modules_cases as cases
from tests.support import modules_toys as toys
from tests.support.modules_toys import ALL, Layout
from tests.support.worker_cases import prepare

from pipefit.errors import PlanError
from pipefit.plan.check.rules import check_plan
from pipefit.run.transfers.packed import TokenRuns
from pipefit.run.transfers.wiring import channel_pairs, edge_directions
from pipefit.run.worker.planned import edge_shapes
from pipefit.run.worker.runnable import check_runnable


def layouts(*each: Layout):
    return dict(zip(ALL, each, strict=False))


LAYOUTS = {
    "one device for all": (layouts(Layout(), Layout(), Layout()), {"together": True, "order": "gpipe"}),
    "1, 1, 1": (layouts(Layout(), Layout(), Layout()), {}),
    "3, 2, 1": (layouts(Layout((1,) * 3), Layout((1,) * 2), Layout()), {}),
    "1, 3, 4": (layouts(Layout(), Layout((1,) * 3), Layout((1,) * 4)), {"microbatches": 2}),
    "uneven 2:1, 3, 1:2": (layouts(Layout((2, 1)), Layout((1,) * 3), Layout((1, 2))), {"microbatches": 2}),
    "4, 2, 2, zero-1": (layouts(Layout((1,) * 4), Layout((1, 1)), Layout((1, 1))), {"sharded_state": "optimizer"}),
    "2, 2 x 2 stages, 2": (layouts(Layout((1, 1)), Layout((1, 1), (2,)), Layout((1, 1))), {"order": "gpipe"}),
    "2 stages, 2 x 2 stages, 2 stages": (layouts(Layout((1,), (1,)), Layout((1, 1), (2,)), Layout((1,), (2,))), {}),
    "2, 3 x 2 stages": (layouts(Layout((1, 1)), Layout((1,) * 3, (2,))), {"microbatches": 4}),
    "5, 3": (layouts(Layout((1,) * 5), Layout((1,) * 3)), {"microbatches": 1}),
    "2, 2 shards, 1": (layouts(Layout((1, 1)), Layout(shards=(1, 1)), Layout()), {}),
    "2 shards, 2, 2 shards": (layouts(Layout(shards=(1, 1)), Layout((1, 1)), Layout(shards=(1, 1))), {}),
    "2 shards, 2 x 2 shards, 2 shards": (
        layouts(Layout(shards=(1, 1)), Layout((1, 1), shards=(1, 1)), Layout(shards=(1, 1))), {"microbatches": 2},
    ),
    "2 x 2 shards with split tokens, 3, full recomputation": (
        layouts(Layout((1, 1), shards=(1, 1), sharding="megatron-sp"), Layout((1,) * 3), Layout()),
        {"microbatches": 2, "recompute": "full"},
    ),
    "1, 2 x 2 shards, 2 shards, split tokens": (
        layouts(
            Layout(),
            Layout((2, 1), shards=(1, 1), sharding="megatron-sp"),
            Layout(shards=(1, 1), sharding="megatron-sp"),
        ),
        {},
    ),
    "3, 5": (layouts(Layout((1,) * 3), Layout((1,) * 5)), {"microbatches": 2}),
    "shards 2:1, 2, 1:2 with split tokens": (
        layouts(
            Layout(shards=(2, 1)), Layout((1, 1), shards=(1, 1)), Layout(shards=(1, 2), sharding="megatron-sp")
        ),
        {},
    ),
    "split tokens 2:1, shards 2:1, 3": (
        layouts(Layout(shards=(2, 1), sharding="megatron-sp"), Layout(shards=(2, 1)), Layout((1,) * 3)), {},
    ),
    "6 microbatches, vision 3 together, generator 2 together": (
        layouts(Layout((1,) * 3), Layout((1, 1)), Layout((2, 1))),
        {"microbatches": 6, "multiples": {"vision": 3, "generator": 2}, "order": "gpipe"},
    ),
    "6 microbatches, vision 2 together in 2 stages, generator 6": (
        layouts(Layout((1, 1), (2,)), Layout((1,), (2,)), Layout((1, 1))),
        {"microbatches": 6, "multiples": {"vision": 2, "generator": 6}, "order": "gpipe"},
    ),
}  # fmt: skip


MODELS = (ALL, ALL[:2], ALL[1:])


@lru_cache
def reference(names: tuple[str, ...], frozen: tuple[str, ...] = (), tied: bool = False, step: int = 0):
    return toys.reference(toys.model(names, frozen, tied), step)


def run(pool, plan, model, *arguments):
    pool.run(prepare, [(plan, model)], True, ranks=8)
    return pool.run(cases.run_steps, plan, model, *arguments, ranks=len(plan.used_devices))[0]


def agrees(found, loss: float, gradients) -> None:
    assert found["steps"][0][0] == pytest.approx(loss, rel=1e-12)
    assert {*found["gradients"]} == {*gradients}
    norm = sum(float((g**2).sum()) for g in gradients.values()) ** 0.5
    assert found["steps"][0][1] == pytest.approx(norm, rel=1e-11), "the global norm counts a parameter not once"
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        error, own = np.abs(found["gradients"][name] - gradient.numpy()).max(), float(gradient.abs().max())
        # All scores of a query move alike with the bias of the keys: what comes out as its gradient is rounding.
        bound = 1e-14 * largest if name.endswith("k_proj.bias") else 1e-10 * own
        assert error <= bound, f"{name}: {error / own:.3g}"


@pytest.mark.parametrize("case", LAYOUTS)
def test_loss_and_every_gradient_are_those_of_one_process(gloo_pool, case):
    each, words = LAYOUTS[case]
    model = toys.model(tuple(each))
    plan = toys.plan(model, each, **words)
    check_plan(plan, model)
    agrees(run(gloo_pool, plan, model), *reference(tuple(each)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "first"),
    [pytest.param(n, first, id=f"{'-'.join(n)}, {first}") for n in MODELS for first in range(1, 10 - len(n))],
)
def test_every_mix_of_replica_counts_up_to_eight_processes(gloo_pool, names, first):
    model = toys.model(names)
    for others in product(range(1, 8), repeat=len(names) - 1):
        mix = (first, *others)
        if sum(mix) <= 8:
            microbatches = next(count for count in (3, 2, 1) if max(mix) <= toys.JOB.batch // count)
            each = {name: Layout((1,) * count) for name, count in zip(names, mix, strict=True)}
            plan = toys.plan(model, each, microbatches=microbatches)
            check_plan(plan, model)
            agrees(run(gloo_pool, plan, model), *reference(names))


@pytest.mark.parametrize("case", ["3, 2, 1", "2, 2 x 2 stages, 2", "1, 2 x 2 shards, 2 shards, split tokens"])
def test_a_step_without_an_image(gloo_pool, case):
    each, words = LAYOUTS[case]
    model = toys.model()
    assert not any(map(any, toys.counts(ALL, toys.NO_IMAGES).values()))
    found = run(gloo_pool, toys.plan(model, each, **words), model, 1, True, toys.NO_IMAGES)
    agrees(found, *reference(ALL, step=toys.NO_IMAGES))


def test_the_first_step_leaves_replicas_without_tokens():
    """Otherwise the cases above would no longer say anything of these."""
    each, words = LAYOUTS["4, 2, 2, zero-1"]
    plan = toys.plan(toys.model(), each, **words)
    tokens, empty = TokenRuns(plan), set()
    tokens.set_counts(toys.images(ALL, 0))
    for index, stage in enumerate(plan.stages):
        if stage.module != "language":
            runs = np.array([tokens.replica_runs(stage.space, index, m) for m in range(plan.order.microbatches)])
            held = (runs[..., 1] - runs[..., 0]).sum(axis=0)
            empty |= {(stage.module, replica) for replica, count in enumerate(held) if not count}
    assert empty == {("vision", 0), ("vision", 3), ("generator", 1)}


TIED = {
    "2 stages x 2 replicas": (layouts(Layout((1, 1)), Layout((1, 1), (2,)), Layout((1, 1))), {}),
    "zero-1": (layouts(Layout((1, 1)), Layout((1, 1), (2,)), Layout((1, 1))), {"sharded_state": "optimizer"}),
    "one stage": (layouts(Layout(), Layout((1, 1)), Layout()), {}),
    "2 stages, no image encoder": ({"language": Layout((1, 1), (2,)), "generator": Layout((1, 1))}, {}),
    "2 stages of 2 shards, no generator": (layouts(Layout((1, 1)), Layout((1,), (2,), (1, 1))), {}),
}


@pytest.mark.parametrize("case", TIED)
def test_tied_embeddings(gloo_pool, case):
    each, words = TIED[case]
    model = toys.model(tuple(each), (), True)
    plan = toys.plan(model, each, **words)
    check_plan(plan, model)
    (uses,) = (len(parameter.uses) for parameter in plan.parameters if "embed_tokens" in parameter.name)
    assert uses == len(each["language"].cuts) + 1 and not any("lm_head" in one.name for one in plan.parameters)
    agrees(run(gloo_pool, plan, model), *reference(tuple(each), tied=True))


FROZEN = {
    "vision: nothing before it is trained": (("vision",), {0}, LAYOUTS["3, 2, 1"]),
    "vision in 2 stages": (("vision",), {0, 1}, LAYOUTS["2 stages, 2 x 2 stages, 2 stages"]),
    "the encoder, before a trained projector": (
        ("vision.encoder",), {0}, (layouts(Layout((1, 1), (3,)), Layout((1,) * 3), Layout()), {}),
    ),
    "the encoder, with the projector in its stage": (("vision.encoder",), set(), LAYOUTS["3, 2, 1"]),
    "vision and language: only the generator is trained": (
        ("vision", "language"), {0, 1, 2}, LAYOUTS["2, 2 x 2 stages, 2"],
    ),
    "language: input gradients only": (("language",), set(), LAYOUTS["uneven 2:1, 3, 1:2"]),
    "generator": (("generator",), set(), LAYOUTS["1, 3, 4"]),
    "language and generator": (("language", "generator"), set(), LAYOUTS["4, 2, 2, zero-1"]),
    "vision and generator": (("vision", "generator"), {0}, LAYOUTS["3, 2, 1"]),
    "the projector, behind a trained encoder": (("vision.projector",), set(), LAYOUTS["4, 2, 2, zero-1"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FROZEN)
def test_frozen_modules(gloo_pool, case):
    frozen, dead, (each, words) = FROZEN[case]
    model = toys.model(ALL, frozen)
    plan = toys.plan(model, each, **words)
    check_plan(plan, model)
    agrees(run(gloo_pool, plan, model), *reference(ALL, frozen))
    kinds = {(action.kind, action.stage) for _, _, action in plan.order.to_schedule()}
    assert {stage for kind, stage in kinds if kind == "B"} == {*range(len(plan.stages))} - dead
    assert not {stage for kind, stage in kinds if kind in ("RECV_B", "REDUCE")} & dead, "a gradient nobody needs"


@pytest.mark.parametrize("case", ["uneven 2:1, 3, 1:2", "shards 2:1, 2, 1:2 with split tokens"])
def test_messages_need_no_tags_and_an_evaluation_gives_each_modules_loss(gloo_pool, case):
    """NCCL has no tags: what any step may send has a channel of its own, also what the first step does not."""
    each, words = LAYOUTS[case]
    model = toys.model()
    plan = toys.plan(model, each, **words)
    gloo_pool.run(prepare, [(plan, model)], False, ranks=8)
    devices = len(plan.used_devices)
    found = gloo_pool.run(cases.run_steps, plan, model, 3, False, ranks=devices)[0]
    wanted = run(gloo_pool, plan, model, 3)
    assert found["steps"] == wanted["steps"]
    assert all(np.array_equal(found["parameters"][name], value) for name, value in wanted["parameters"].items())
    losses, by = gloo_pool.run(cases.evaluated, plan, model, ranks=devices)[0], toys.divisors(ALL, 0)
    weighted = losses[0] / by["language"] + 0.5 * losses[1] / by["generator"]
    assert weighted == pytest.approx(reference(ALL)[0], rel=1e-12)
    alone = toys.plan(model, dict.fromkeys(ALL, Layout()), together=True, order="gpipe")
    for (loss, norm), one in zip(run(gloo_pool, alone, model, 3)["steps"], found["steps"], strict=True):
        assert one == pytest.approx((loss, norm), rel=1e-10)


@pytest.mark.parametrize("divided", [(), ("vision", "generator")])
def test_shards_that_meet_in_any_step_have_channels(gloo_pool, divided):
    """Which shards of split tokens meet depends on the counts: with one token a sample some never do. So it does, of
    replicas that divide images, for any two of them."""
    each, words = LAYOUTS["1, 2 x 2 shards, 2 shards, split tokens"]
    if divided:
        each = {**each, "vision": Layout((1, 1)), "generator": Layout((1, 1))}
    model = toys.model()
    plan = toys.plan(model, each, divided=divided, **words)
    shape_of, tokens = edge_shapes(plan, model), TokenRuns(plan)
    edges = {(edge.source, edge.target, edge.tensor): shape_of(edge, 0) for edge in plan.edges}

    def used() -> set[tuple[int, int]]:
        found = set()
        for (*key, _), way in edge_directions(plan).items():
            for microbatch in range(plan.order.microbatches):
                shape, runs = way.packed_extent(edges[tuple(key)], tokens, microbatch)
                for device in way.sender.devices:
                    found |= {(device, piece.peer) for piece in way.pieces_sent(shape, device, runs).pieces}
        return found

    made, simple, met = {*channel_pairs(plan, lambda edge: shape_of(edge, 0))}, used(), set()
    for step in range(3):
        tokens.set_counts(toys.images(ALL, step))
        met |= used()
    assert divided or met - simple, "a case in which one token a sample would do"
    assert met <= made
    gloo_pool.run(prepare, [(plan, model)], False, ranks=8)
    found = gloo_pool.run(cases.run_steps, plan, model, 2, False, ranks=len(plan.used_devices))[0]
    assert found["steps"] == run(gloo_pool, plan, model, 2)["steps"]


def test_stages_that_divide_images_alike_meet_only_their_own():
    """Two stages of the encoder on three replicas each: a channel for each replica and direction, not for all pairs."""
    model = toys.model()
    each = layouts(Layout((1, 1, 1), (2,)), Layout(), Layout())
    plan = toys.plan(model, each, divided=("vision",))
    pairs = {*channel_pairs(plan, lambda edge: edge_shapes(plan, model)(edge, 0))}
    assert {pair for pair in pairs if max(pair) < 6} == {(a, b) for a in range(6) for b in range(6) if abs(a - b) == 3}
    assert {pair for pair in pairs if max(pair) == 6} == {(a, 6) for a in (3, 4, 5)} | {(6, a) for a in (3, 4, 5)}


def test_what_is_not_run_is_refused():
    each, words = LAYOUTS["one device for all"]
    plan = toys.plan(toys.model(), each, **words)
    with pytest.raises(PlanError, match=r"Packed images are not cut into slices(.|\n)*packed space 'patches'"):
        check_runnable(replace(plan, order=replace(plan.order, slices=(13, 13))))
    shards = layouts(Layout(shards=(1, 1), sharding="megatron-sp"), Layout((1, 1)), Layout())
    split = toys.plan(toys.model(), shards, microbatches=2)
    together = replace(split, stages=(replace(split.stages[0], microbatch_multiple=2), *split.stages[1:]))
    with pytest.raises(PlanError, match=r"tokens replicated over its shards(.|\n)*edges\[0\], stage 0(.|\n)*G1"):
        check_runnable(together)
    with pytest.raises(PlanError, match=r"how many tokens every sample has(.|\n)*'latents'(.|\n)*each of the 12"):
        TokenRuns(plan).set_counts({"patches": [0] * 12})
    divided = TokenRuns(toys.plan(toys.model(), each, divided=("vision",), **words))
    with pytest.raises(PlanError, match=r"how many tokens every image has(.|\n)*'patches'"):
        divided.set_counts(toys.counts(ALL, 0))
