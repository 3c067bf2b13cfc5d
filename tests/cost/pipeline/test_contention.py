"""What messages load, and what pipelines share, against figures worked out by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tests.support.plan_toys import toy_model

from pipefit.cluster import Cluster, Host, local_cluster, parse_spec
from pipefit.cluster.measured import ClusterMeasurements, CollectiveCurve, HostUplink, PortSharing, RailCurve
from pipefit.cluster.types import Provenance, Rail
from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s
from pipefit.cost.comm.network import Network
from pipefit.cost.pipeline.contention import MOST_PIPELINES, with_contention
from pipefit.cost.types import PortContention
from pipefit.plan.assemble.pipeline_work import pipeline_work
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job

MB = 1e6
FAST = (1e9,) * 4
NO = (False,) * 4


def measured(
    sharing: PortSharing | None, devices: int = 1, rates: dict[tuple[int, int], float] | None = None
) -> Cluster:
    """Four hosts joined by links of 1 MB/s, or `rates` in MB/s, as a profile over gloo would leave it."""
    matrix = tuple(tuple(MB * (rates or {}).get((a, b), 1.0) for b in range(4)) for a in range(4))
    curve = RailCurve(
        sizes_bytes=(1, 1001),
        time_s=tuple(tuple(tuple(0.0 if a == b else size / matrix[a][b] for b in range(4)) for a in range(4))
                     for size in (1, 1001)),
        spread=(((0.0,) * 4,) * 4,) * 2,
        sharing=sharing,
    )  # fmt: skip
    plain = parse_spec(f"4x{devices}xA100-80:1MB/s")
    return replace(
        plain,
        hosts=tuple(Host(name=f"h{i}", kind=plain.hosts[0].kind, devices=devices, link=plain.hosts[0].link)
                    for i in range(4)),
        rails=(Rail(name="net", latency_s=((0.0,) * 4,) * 4, bandwidth_bytes_per_s=matrix),),
        measured=ClusterMeasurements(rails={"net": curve}),
        provenance=Provenance(source="measured", environment={"cpu": "some processor"}),
    )  # fmt: skip


def test_a_measured_port_is_shared_and_links_are_not_slowed_by_what_carries_more() -> None:
    open_ports = PortSharing(out_bytes_per_s=FAST, out_shared=NO, in_bytes_per_s=FAST, in_shared=NO)
    tight = replace(open_ports, out_bytes_per_s=(1.5 * MB, *FAST[1:]), out_shared=(True, False, False, False))
    messages = [(0, 1, MB), (0, 2, MB)]
    assert Network(measured(None)).transfer_time(messages).port_s == pytest.approx(2.0), (
        "the port is as fast as the link"
    )
    assert Network(measured(open_ports)).transfer_time(messages).port_s == pytest.approx(1.0)
    assert Network(measured(tight)).transfer_time(messages).port_s == pytest.approx(2 / 1.5)
    assert Network(measured(tight)).transfer_time([(1, 0, MB), (2, 0, MB)]).port_s == pytest.approx(1.0), (
        "its way in is free"
    )
    assert Network(measured(open_ports)).transfer_time([(0, 1, MB), (0, 1, MB)]).port_s == pytest.approx(2.0), (
        "one link"
    )


def test_an_uplink_carries_what_leaves_the_rack() -> None:
    rack = HostUplink(hosts=("h0", "h1"), up_bytes_per_s=1.25 * MB, down_bytes_per_s=None)
    sharing = PortSharing(out_bytes_per_s=FAST, out_shared=NO, in_bytes_per_s=FAST, in_shared=NO, uplinks=(rack,))
    network = Network(measured(sharing))
    assert network.transfer_time([(0, 2, MB), (1, 3, MB)]).port_s == pytest.approx(2 / 1.25)
    assert network.transfer_time([(0, 1, MB), (1, 3, MB)]).port_s == pytest.approx(1.0), (
        "within the rack it is not crossed"
    )
    assert network.transfer_time([(2, 0, MB), (3, 1, MB)]).port_s == pytest.approx(1.0), (
        "nobody said that the way down is"
    )


def test_gloo_sums_go_round_backwards_and_gathers_forwards() -> None:
    """Forwards the slowest hop is 1 to 2 at 0.5 MB/s; backwards all have 1 MB/s. Three steps of a quarter a pass."""
    cluster = measured(None, rates={(1, 2): 0.5})
    network = Network(cluster)
    assert network.over_gloo
    assert all_gather_s(network, [[0, 1, 2, 3]], 4 * MB) == pytest.approx(3 * 2.0)
    assert all_reduce_s(network, [[0, 1, 2, 3]], 4 * MB) == pytest.approx(2 * 3 * 1.0)
    elsewhere = Network(replace(cluster, provenance=Provenance(source="measured", environment={"device": "a GPU"})))
    assert not elsewhere.over_gloo
    assert all_reduce_s(elsewhere, [[0, 1, 2, 3]], 4 * MB) == pytest.approx(2 * 3 * 2.0)


def test_gloo_has_no_levels() -> None:
    """Two devices on each of four hosts: gloo goes round all eight, 2 x 7 steps of an eighth at 1 MB/s."""
    network = Network(measured(None, devices=2))
    assert all_reduce_s(network, [list(range(8))], 8 * MB) == pytest.approx(14.0, rel=1e-3)
    other = Network(replace(network.cluster, provenance=Provenance(source="measured")))
    assert all_reduce_s(other, [list(range(8))], 8 * MB) < 13.0


def test_collectives_inside_a_host_have_factors_of_their_own() -> None:
    def curve(devices: tuple[int, ...], factor: float) -> CollectiveCurve:
        return CollectiveCurve(
            operation="all_reduce", devices=devices, sizes_bytes=(8,), time_s=(1.0,), spread=(0.0,),
            latency_factor=1.0, bandwidth_factor=factor,
        )  # fmt: skip

    cluster = measured(None, devices=2)
    assert cluster.measured is not None
    curves = (curve((0, 1), 2.0), curve((0, 2, 4, 6), 1.0), curve(tuple(range(8)), 1.21))
    network = Network(replace(cluster, measured=replace(cluster.measured, collectives=curves)))
    assert network.collective_factors("all_reduce", 2, inside=True) == pytest.approx((1.0, 2.0))
    assert network.collective_factors("all_reduce", 4, inside=False) == pytest.approx((1.0, 1.0))
    alone = Network(replace(cluster, measured=replace(cluster.measured, collectives=curves[:1])))
    assert alone.collective_factors("all_reduce", 4, inside=False) == pytest.approx((1.0, 2.0)), "better than nothing"


def test_collectives_have_the_factors_of_groups_of_the_nearest_size() -> None:
    """One host of eight: pairs were measured twice, the whole host once. As ratios 4 is as near to 2 as to 8, 5 is
    nearer to 8. A ring of two goes by the pairs' factors where a run has one."""

    def curve(devices: tuple[int, ...], factor: float) -> CollectiveCurve:
        return CollectiveCurve(
            operation="all_reduce", devices=devices, sizes_bytes=(8,), time_s=(1.0,), spread=(0.0,),
            latency_factor=1.0, bandwidth_factor=factor,
        )  # fmt: skip

    cluster = replace(local_cluster(8), measured=ClusterMeasurements(collectives=(
        curve((0, 1), 1.0), curve((2, 3), 4.0), curve(tuple(range(8)), 0.5),
    )))  # fmt: skip
    network = Network(cluster)
    found = {size: network.collective_factors("all_reduce", size, inside=True)[1] for size in (2, 3, 4, 5, 8)}
    assert found == pytest.approx({2: 2.0, 3: 2.0, 4: (1.0 * 4.0 * 0.5) ** (1 / 3), 5: 0.5, 8: 0.5})
    plain = Network(local_cluster(8))
    for rings, factor in (([[4, 5], [6, 7]], 2.0), ([list(range(8))], 0.5)):
        found_s, plain_s = (
            all_reduce_s(each, rings, 80 * MB) - all_reduce_s(each, rings, 40 * MB) for each in (network, plain)
        )
        assert found_s == pytest.approx(factor * plain_s)


def contention_of(cluster: Cluster, **choices: object) -> tuple[PortContention, PlannerContext]:
    context = PlannerContext(toy_model(4), cluster)
    job = Job(batch=64, sequence=64, precision="float32")
    parts = context.make_skeleton(job, ParallelConfig(**choices))  # type: ignore[arg-type]
    work = pipeline_work(parts, context.programs)
    found = with_contention(context.build_cost_table(parts), work, context.network, context.layers).contention
    assert found is not None
    return found, context


def test_pipelines_have_the_times_of_their_own_links() -> None:
    """Stages on hosts (0, 1) and (2, 3), or (0, 2) and (1, 3): replica 1's message from 1 to 3 is slower."""
    found, _ = contention_of(
        measured(None, rates={(1, 3): 0.25}), stages=2, replicas=(1, 1), microbatches=2, devices=(0, 1, 2, 3)
    )
    one, two = (float(table.edges[0].forward_port_s[0, 0]) for table in found.pipelines)
    assert two == pytest.approx(4 * one)
    assert found.pipelines[0].edges[0].backward_port_s == pytest.approx(found.pipelines[1].edges[0].backward_port_s)
    flow = found.flows["SEND_F", 0, 0, 1]
    assert flow.bytes_per_s == pytest.approx(0.25 * MB)


def test_rings_and_messages_share_the_ports_of_a_host() -> None:
    """Replicas on hosts 0 and 1, then 2 and 3: the sums of stage 0 enter host 0, as do the gradients from stage 1."""
    found, _ = contention_of(measured(None), stages=2, replicas=(1, 1), microbatches=2, devices=(0, 1, 2, 3))
    ring, back = found.flows["REDUCE", 0, 0, 0], found.flows["SEND_B", 0, 0, 0]
    assert set(ring.ports) & set(back.ports)
    assert ring.queue == -1 and back.queue >= 0
    assert all(0.9 < use <= 1.0 for use in ring.use), "alone, a ring fills the ports of its slowest hop"
    assert ring.bytes_per_s == pytest.approx(MB, rel=0.01)


def test_equal_work_between_the_same_hosts_waits_in_one_queue() -> None:
    found, _ = contention_of(measured(None, devices=2), stages=2, replicas=(1, 1), microbatches=2)
    queues = {found.flows["SEND_F", 0, 0, k].queue for k in (0, 1)}
    assert len(queues) == 1 and -1 not in queues
    assert found.flows["SEND_B", 0, 0, 0].queue not in queues, "the way back is another link"


def test_collectives_inside_actions_share_the_ports_that_replicas_share() -> None:
    """Shards on two hosts. Two replicas on the same hosts: each takes what both together do. On hosts of their own:
    each takes what its own links do, and only the second, whose link has a quarter of the rate, is as slow as both."""

    def forward_s(devices: tuple[int, ...], each: int) -> tuple[float, float, float]:
        cluster = measured(None, devices=each, rates={(2, 3): 0.25, (3, 2): 0.25})
        found, context = contention_of(
            cluster, replicas=(1, 1), shards=(1, 1), sharding="megatron", microbatches=2, devices=devices
        )
        parts = context.make_skeleton(
            Job(batch=64, sequence=64, precision="float32"),
            ParallelConfig(replicas=(1, 1), shards=(1, 1), sharding="megatron", microbatches=2, devices=devices),
        )
        together = float(context.build_cost_table(parts).actions["F"].time_s.max())
        one, two = (float(table.actions["F"].time_s.max()) for table in found.pipelines)
        return one, two, together

    one, two, together = forward_s((0, 2, 1, 3), 2)
    assert one == two == together
    one, two, together = forward_s((0, 1, 2, 3), 1)
    assert two == together and one == pytest.approx(two / 4, rel=0.01)


@pytest.mark.parametrize("replicas", [(1,), (1, 1)])
def test_an_action_loads_the_ports_of_its_collectives_on_average(replicas: tuple[int, ...]) -> None:
    """Both stages have their shards on the first two hosts, and all rings cross these hosts' ports. On links without
    end, collectives take no time."""
    shape = {"stages": 2, "replicas": replicas, "shards": (1, 1), "sharding": "megatron", "microbatches": 2}
    each = 2 * len(replicas)
    lanes = [[lane * len(replicas) + k + host * each for k in range(len(replicas)) for host in (0, 1)]
             for lane in (0, 1)]  # fmt: skip
    devices = tuple(lanes[0] + lanes[1])
    cluster = measured(None, devices=each)
    found, _ = contention_of(cluster, **shape, devices=devices)
    endless = {(a, b): 1e9 for a in range(4) for b in range(4)}
    quick, _ = contention_of(measured(None, devices=each, rates=endless), **shape, devices=devices)
    for stage, kind in itertools.product((0, 1), "FB"):
        whole_s, rest_s = (float(one.pipelines[0].actions[kind].time_s[stage].max()) for one in (found, quick))
        for pipeline in range(len(replicas)):
            flow = found.flows[kind, stage, 0, pipeline]
            assert len(flow.ports) == 4 and flow.queue == -1, "out of each host, and into it"
            assert flow.use == pytest.approx([(1 - rest_s / whole_s) / len(replicas)] * 4, rel=1e-3)
            assert flow.bytes_per_s == pytest.approx(MB / len(replicas))
        assert 0.5 < 1 - rest_s / whole_s < 1.0


def test_an_action_shares_nothing_with_its_own_lane() -> None:
    """Its stage's gradients are summed after it, and other replicas' collectives are in its time already."""
    found, _ = contention_of(
        measured(None, devices=2), replicas=(1, 1), shards=(1, 1), sharding="megatron", microbatches=2,
        devices=(0, 2, 1, 3),
    )  # fmt: skip
    assert not found.flows and found.ports == 0


def test_many_replicas_go_in_step() -> None:
    wide = parse_spec(f"{MOST_PIPELINES + 2}x2xA100-80:1GB/s")
    replicas = (1,) * (MOST_PIPELINES + 1)
    found, _ = contention_of(replace(wide, measured=None), stages=2, replicas=replicas[:16], microbatches=2)
    assert len(found.pipelines) == 16
    context = PlannerContext(toy_model(4), wide)
    job = Job(batch=2 * len(replicas), sequence=64, precision="float32")
    parts = context.make_skeleton(job, ParallelConfig(stages=2, replicas=replicas, microbatches=2))
    work = pipeline_work(parts, context.programs)
    costs = context.build_cost_table(parts)
    (only,) = with_contention(costs, work, context.network, context.layers).contention.pipelines  # type: ignore[union-attr]
    assert only is costs


def sent_bytes(hosts: list[list[int]], size: float) -> tuple[dict[int, float], dict[int, float]]:
    """An all-reduce in two levels, message by message: bytes that every device sends inside its host, and that every
    host sends to others. Inside, n - 1 steps of an n-th each, once to add and once to gather; between them device i of
    every host does the same with the n-th part of its own."""
    inside = {device: 0.0 for host in hosts for device in host}
    across = dict.fromkeys(range(len(hosts)), 0.0)
    for _ in ("add", "gather"):
        for host in hosts:
            for _step in range(len(host) - 1):
                for device in host:
                    inside[device] += size / len(host)
        for _ in hosts[0]:
            for _step in range(len(hosts) - 1):
                for number, host in enumerate(hosts):
                    across[number] += size / len(host) / len(hosts)
    return inside, across


def test_a_collective_in_two_levels_loads_ports_as_its_levels_do() -> None:
    """Two hosts of eight devices; a stage has four of each, so that both stages' sums share the hosts' ports."""
    lanes = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    cluster = parse_spec("2x8xA100-80:1GB/s")
    decisions = ParallelConfig(
        stages=2, replicas=(1,) * 8, microbatches=2, devices=tuple(lanes[0] + lanes[1]), sharded_state="none"
    )
    context = PlannerContext(toy_model(4), cluster)
    parts = context.make_skeleton(Job(batch=64, sequence=64, precision="float32"), decisions)
    work = pipeline_work(parts, context.programs)
    costs = context.build_cost_table(parts)
    found = with_contention(costs, work, context.network, context.layers).contention
    assert found is not None
    network = context.network
    for stage, devices in enumerate(lanes):
        size = 4.0 * max(work.stages[stage].parameters.trainable)
        inside, across = sent_bytes([devices[:4], devices[4:]], size)
        flow, duration_s = found.flows["REDUCE", stage, 0, 0], float(costs.reduce_s[stage])
        between = network.find_link(devices[0], devices[4]).bandwidth_bytes_per_s
        own = network.find_link(devices[0], devices[1]).bandwidth_bytes_per_s
        expected = [sent / between for sent in across.values()] * 2 + [sent / own for sent in inside.values()]
        assert sorted(use * duration_s for use in flow.use) == pytest.approx(sorted(expected))
        flat = 2 * 7 / 8 * size / between
        assert max(flow.use) * duration_s < flat, "a flat ring would send more between the hosts"
        assert flow.bytes_per_s == pytest.approx(2 / 2 * size / 4 / duration_s)
