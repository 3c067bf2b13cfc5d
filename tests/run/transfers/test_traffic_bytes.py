"""What the report counts on the links is what processes really send: every pair of devices, by the kernel's counters.

Programs that gather parameters, gather factors, send tokens to experts and turn splits, on three devices with uneven
shares, so that rings have a direction.
"""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
import torch.distributed as dist
from tests.run.worker.test_gathered import gathered
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans
from tests.support.sockets import received_bytes

from pipefit.cluster import local_cluster
from pipefit.cost.comm.network import Network
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.show.traffic import step_traffic

pytestmark = pytest.mark.gloo


def count_step(plan, model, vocabulary):
    """What came on every connection of this rank in one step, after one to make the connections."""
    worker = cases.build(plan, model)
    group = cases.group_of(worker)
    cases.train(worker, plan, vocabulary, range(1))
    dist.barrier(group)
    before = received_bytes()
    cases.train(worker, plan, vocabulary, range(1, 2))
    dist.barrier(group)
    return {ends: size - before.get(ends, 0) for ends, size in received_bytes().items()}


def sent(pool, plan, name):
    """(source, target) -> bytes of one step, by rank."""
    pool.run(cases.prepare, [(plan, plans.model(name))], ranks=8)
    counts = pool.run(count_step, plan, plans.model(name), plans.VOCABULARY, ranks=len(plan.used_devices))
    rank_of = {own: rank for rank, found in enumerate(counts) for own, _ in found}
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    for rank, found in enumerate(counts):
        for (_, other), size in found.items():
            if rank_of.get(other, rank) != rank:
                pairs[rank_of[other], rank] += size
    return pairs


def traffic_of(plan, name):
    """The same as the report counts it."""
    cluster = local_cluster(8)
    work = simulate_plan(plan, plans.model(name), cluster).work
    return step_traffic(work, Network(cluster), plan.order.microbatches)


def counted(plan, name):
    """All of each pair."""
    return traffic_of(plan, name).pair_totals()


def factors(recipe):
    """A recipe whose MLP gathers the factors of its weights' gradients instead of its weights."""
    return re.sub(r"mlp\.\w+\.weight:G0>I/\S+ d0", "d0*", recipe)


HEADERS = 60_000
"""Bytes of gloo's own words between two ranks, and of what is not counted: barriers, the norm, the loss."""


def agree(found, wanted, slack):
    """Every pair, in its direction: no less than counted, and little more."""
    assert set(wanted) <= set(found)
    for pair, size in found.items():
        counted_bytes = wanted.get(pair, 0.0)
        assert (1 - slack) * counted_bytes <= size <= (1 + slack) * counted_bytes + HEADERS, pair


def test_gathered_parameters_factors_and_turned_splits(gloo_pool):
    """On a ring of three. Between the two plans nothing else differs, so that the headers cancel out."""
    words_of, seen, said = [], [], []
    for edit in (str, factors):
        plan, words = gathered("wide", shares=(2, 1, 1), edit=edit)
        words_of.append(words)
        seen.append(sent(gloo_pool, plan, "wide"))
        said.append(counted(plan, "wide"))
        agree(seen[-1], said[-1], 0.01)
    assert any(word.endswith(">I/padded+alltoallv") and ".weight:" in word for word in words_of[0])
    assert "d0*" in words_of[1] and any(word.partition("/")[0].endswith("G0>G2") for word in words_of[1])
    for pair, size in said[0].items():
        assert seen[0][pair] - seen[1][pair] == pytest.approx(size - said[1][pair], rel=0.06)
    assert max(said[0].values()) > 5 * min(said[0].values()), "the ring goes round one way"


def whole(recipe):
    """A recipe that keeps parameters whole."""
    return re.sub(r"\S*weight:G\d>I\S* ", "", recipe)


def test_whole_parameters_are_reduced_once_an_iteration(gloo_pool):
    """Twice as many microbatches of half as many rows send the same; reduced in each, gradients would come twice."""
    seen, said = [], []
    for microbatches in (2, 4):
        plan, words = gathered("wide", shares=(1, 1), edit=whole, microbatches=microbatches)
        assert not any("weight:G" in word for word in words)
        seen.append(sent(gloo_pool, plan, "wide"))
        said.append(traffic_of(plan, "wide"))
        agree(seen[-1], said[-1].pair_totals(), 0.01)
    for pair, size in seen[0].items():
        once = said[0].bytes[pair]["reduction"]
        assert once == said[1].bytes[pair]["reduction"] > 8 * HEADERS
        assert seen[1][pair] - size < HEADERS


def test_gradients_are_summed_round_the_ring_backwards(gloo_pool):
    """As gloo does it: from each device to the one before."""
    plan, _ = gathered("wide", shares=(2, 1, 1), edit=whole)
    found, said = sent(gloo_pool, plan, "wide"), traffic_of(plan, "wide")
    agree(found, said.pair_totals(), 0.01)
    assert {pair for pair, parts in said.bytes.items() if "reduction" in parts} == {(0, 2), (2, 1), (1, 0)}


def test_tokens_that_go_to_their_experts(gloo_pool):
    """Prices and counts take routing to be balanced."""
    plan, words = gathered("mixtral")
    assert "experts0" in words
    agree(sent(gloo_pool, plan, "mixtral"), counted(plan, "mixtral"), 0.1)


def test_tokens_that_go_to_experts_of_an_expert_axis_and_its_shards(gloo_pool):
    """Over all four devices, beside collectives over two and sums over other two."""
    axes = {"expert": 2, "shards": (1, 1), "sharding": "megatron-sp"}
    plan = plans.plan("mixtral", microbatches=2, **axes)
    agree(sent(gloo_pool, plan, "mixtral"), counted(plan, "mixtral"), 0.1)
