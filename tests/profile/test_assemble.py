"""From measurements to a cluster: classes of links, rails, what is missing, calibration, the environment check."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.profile_toys import SOFTWARE, Simulated, members, rates

from pipefit.cluster import link_between, local_cluster, parse_spec
from pipefit.cluster.measured import ActionCurve, ClusterMeasurements, HostUplink, LayerCurve, LayerPoint, PortSharing
from pipefit.cluster.types import Cluster, Provenance
from pipefit.codec import dump_text, load_text
from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s
from pipefit.cost.comm.lowerings import DIRECT, CollectiveLowerings
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import digest_graph
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.roofline import RooflineCosts
from pipefit.errors import ClusterError, FormatError
from pipefit.model.graph import Graph, Operator, ParameterSpec, TensorSpec
from pipefit.profile.assemble import (
    ProfileFindings,
    RailNotes,
    assemble_cluster,
    check_same_software,
    host_ranks,
    short_kinds,
)
from pipefit.profile.calibrate import add_ratios, collective_curve, fit_efficiency
from pipefit.profile.config import SIZES
from pipefit.profile.environment import check_environment, machine_fingerprint
from pipefit.profile.estimate import LinkShape
from pipefit.profile.facts import middle_rates
from pipefit.profile.links import LinkSample, survey_pairs
from pipefit.profile.partial import PartialFile, PartialProfile, load_partial, partial_path
from pipefit.profile.summary import summarize_cluster
from pipefit.profile.tournament import parallel_tournaments, round_robin

WHEN = "2026-01-01T00:00:00+00:00"


def findings(hosts: int, per_host: int, network: Simulated) -> ProfileFindings:
    ranks = [list(range(h * per_host, (h + 1) * per_host)) for h in range(hosts)]
    made = ProfileFindings(members=members(hosts, per_host), rates={"cpu": rates()})
    made.inside = survey_pairs(
        parallel_tournaments([r for r in ranks if len(r) > 1]), SIZES, 3, network.measure
    ).samples
    if hosts > 1:
        made.rails = {"network": survey_pairs(round_robin([r[0] for r in ranks]), SIZES, 3, network.measure).samples}
    return made


def like(network: Simulated, per_host: int, inside: float = 1e10, between: float = 1e9) -> Simulated:
    """Equal links: `inside` within hosts, `between` otherwise, bytes/s."""
    host = np.arange(len(network.bandwidth)) // per_host
    network.bandwidth = np.where(host[:, None] == host[None, :], inside, between)
    network.latency_s[:] = 1e-5
    return network


def test_a_cluster_of_three_hosts_is_assembled_and_reloads_equal() -> None:
    network = like(Simulated(6), per_host=2)
    cluster = assemble_cluster(findings(3, 2, network), "toy", WHEN, 12.3)
    assert [(host.name, host.devices, host.link) for host in cluster.hosts] == [
        (f"host{i}", 2, "inside") for i in range(3)
    ]
    assert link_between(cluster, 0, 1).bandwidth_bytes_per_s == pytest.approx(1e10, rel=0.1)
    assert link_between(cluster, 0, 5).bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert cluster.kinds["cpu"].memory_bytes == 8 * 2**30 - 2**28
    assert cluster.kinds["cpu"].peak_flops_per_s["float32"] == 2e10
    assert cluster.measured is not None
    assert cluster.measured.links["inside"].pairs == 6
    assert len(cluster.measured.rails["network"].time_s) == len(SIZES)
    assert load_text(Cluster, dump_text(cluster), "c.json") == cluster
    text = summarize_cluster(cluster)
    assert "3 hosts, 6 devices, measured" in text and "inside: " in text and "between 3 hosts" in text


def test_hosts_whose_inner_links_differ_get_classes_of_their_own() -> None:
    network = like(Simulated(6), per_host=2)
    network.bandwidth[4, 5] = network.bandwidth[5, 4] = 2e9
    cluster = assemble_cluster(findings(3, 2, network), "toy", WHEN, 1.0)
    assert [host.link for host in cluster.hosts] == ["inside-host0", "inside-host0", "inside-host2"]
    assert cluster.links["inside-host2"].bandwidth_bytes_per_s == pytest.approx(2e9, rel=0.1)
    made = findings(3, 2, network)
    made.members = [replace(m, kind="cpu Other" if m.host == "host2" else m.kind) for m in made.members]
    made.rates = {name: rates() for name in short_kinds(made.members).values()}
    cluster = assemble_cluster(made, "toy", WHEN, 1.0)
    assert [host.link for host in cluster.hosts] == ["inside-cpu-Some-CPU"] * 2 + ["inside-cpu-Other"]


def test_links_that_could_not_be_measured_are_named() -> None:
    made = findings(3, 1, Simulated(3))
    assert assemble_cluster(made, "toy", WHEN, 1.0).links == {}
    made.rails["network"] = [s for s in made.rails["network"] if (s.source, s.target) != (0, 2)]
    with pytest.raises(ClusterError, match="These links could not be measured: host0 -> host2"):
        assemble_cluster(made, "toy", WHEN, 1.0)
    inside = findings(1, 3, Simulated(3))
    inside.inside = [s for s in inside.inside if s.target != 1]
    with pytest.raises(ClusterError, match="device 0 of host0 -> device 1 of host0"):
        assemble_cluster(inside, "toy", WHEN, 1.0)


def test_links_that_were_concluded_from_others_are_marked_and_ports_are_kept() -> None:
    """Of eight hosts five rounds of seven: the file says which links nobody measured, and how sure they are."""
    network = like(Simulated(8, noise=0.02), per_host=1)
    made = findings(8, 1, network)
    games = round_robin(range(8))[:5]
    met = {frozenset(pair) for pairs in games for pair in pairs}
    made.rails["network"] = survey_pairs(games, SIZES, 3, network.measure).samples
    made.rates = {"cpu": rates()}
    sharing = PortSharing(
        out_bytes_per_s=(2e9,) * 8,
        out_shared=(False,) * 7 + (True,),
        in_bytes_per_s=(2e9,) * 8,
        in_shared=(False,) * 8,
        uplinks=(HostUplink(hosts=("host0", "host1"), up_bytes_per_s=1.5e9, down_bytes_per_s=None),),
    )
    made.surveys["network"] = RailNotes(
        rounds=5,
        full_rounds=7,
        repeats=3,
        shape=LinkShape(),
        predicts=True,
        held_out_error=0.012,
        sharing=sharing,
        crowded=True,
    )
    cluster = assemble_cluster(made, "toy", WHEN, 1.0)
    assert cluster.measured is not None
    curve = cluster.measured.rails["network"]
    assert {frozenset((a, b)) for a, row in enumerate(curve.predicted) for b in row} == {
        frozenset((a, b)) for a in range(8) for b in range(a) if frozenset((a, b)) not in met
    }
    apart = ~np.eye(8, dtype=bool)
    assert np.array(cluster.rails[0].bandwidth_bytes_per_s)[apart] == pytest.approx(1e9, rel=0.1)
    assert (np.array(curve.error)[apart] < 0.1).all() and (np.array(curve.error)[apart] > 0).all()
    assert curve.method is not None and curve.method.held_out_error == 0.012 and curve.method.rounds == 5
    assert not cluster.rails[0].shared_ports, "most ports carry more than one link"
    assert load_text(Cluster, dump_text(cluster), "c.json") == cluster
    text = summarize_cluster(cluster)
    assert "network: 5 rounds of pairs (7 are all pairs), 3 times; noise" in text
    assert "16 links were predicted from others, not measured, mean error 1.2%" in text
    assert "ports of 1 of 8 hosts limit sending to two others at once" in text
    assert "host0, host1 share 1.50 GB/s out" in text and "slow each other down" in text
    made.surveys["network"] = replace(made.surveys["network"], predicts=False)
    with pytest.raises(ClusterError, match="These links could not be measured"):
        assemble_cluster(made, "toy", WHEN, 1.0)


def test_ranks_that_are_out_of_order_mixed_or_of_other_software() -> None:
    several_ranks = members(2, 2)
    swapped = [replace(m, host=f"host{m.rank % 2}") for m in several_ranks]
    with pytest.raises(ClusterError, match="The ranks of one host are not consecutive"):
        host_ranks(swapped)
    mixed = [replace(m, kind="NVIDIA T4") if m.rank == 1 else m for m in several_ranks]
    with pytest.raises(ClusterError, match="One host has several kinds of devices"):
        host_ranks(mixed)
    check_same_software(several_ranks)
    other = [replace(m, environment=SOFTWARE | {"torch": "2.11.0"}) if m.rank == 3 else m for m in several_ranks]
    with pytest.raises(ClusterError) as caught:
        check_same_software(other)
    assert "The hosts run different software." in str(caught.value)
    assert "host host1 (rank 3)" in str(caught.value) and "torch 2.11.0" in str(caught.value)


def test_kinds_are_named_shortly() -> None:
    assert short_kinds(members(2, 1)) == {"cpu Some CPU": "cpu"}
    assert short_kinds(members(1, 1, kind="NVIDIA A100-SXM4-80GB")) == {"NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB"}


def test_rates_of_several_devices_count_with_their_median() -> None:
    assert middle_rates([rates(1), rates(2), rates(9)]).flops_per_s["float32"] == 4e10


def test_collective_factors_recover_what_a_ring_costs_times_known_constants() -> None:
    cluster = parse_spec("1x4xA100-80")
    network = Network(cluster)
    sizes = (2**14, 2**18, 2**21, 2**24)
    for operation, passes, formula in (("all_reduce", 2, all_reduce_s), ("all_gather", 1, all_gather_s)):
        exact = [formula(network, [range(4)], size) for size in sizes]
        plain = collective_curve(cluster, operation, range(4), sizes, exact, [0.0] * 4)
        assert (plain.latency_factor, plain.bandwidth_factor) == pytest.approx((1.0, 1.0), rel=1e-6)
        ring = network.ring_time([range(4)])
        slow = [passes * 3 * (3 * ring.latency_s + size / 4 * 1.5 * ring.s_per_byte) for size in sizes]
        found = collective_curve(cluster, operation, range(4), sizes, slow, [0.0] * 4)
        assert (found.latency_factor, found.bandwidth_factor) == pytest.approx((3.0, 1.5), rel=1e-6)


def test_short_messages_of_direct_collectives_say_nothing_of_long_ones() -> None:
    """Times that grow faster than the bytes: the factor is that of long messages, not a mean over all."""
    cluster = parse_spec("4x1xA100-80:10MB/s")
    sizes = (2**15, 2**18, 2**20)
    for operation in DIRECT:
        latency_s, rounds = CollectiveLowerings(Network(cluster), [range(4)]).plain_lowering(*DIRECT[operation])
        bytes_s = [size * rounds.s_per_byte((0.25,) * 4) for size in sizes]
        times = [bytes_s[0] * 0.3, bytes_s[1] * 0.8, bytes_s[1] * 0.8 + bytes_s[2] - bytes_s[1]]
        found = collective_curve(cluster, operation, range(4), sizes, times, [0.0] * 3)
        assert found.bandwidth_factor == pytest.approx(1.0)
        assert found.latency_factor * latency_s < 0.1 * times[0]
        lowerings = CollectiveLowerings(
            Network(replace(cluster, measured=ClusterMeasurements(collectives=(found,)))), [range(4)]
        )
        for size, time_s in (*zip(sizes, times, strict=True), (2**22, times[2] + 3 * bytes_s[2])):
            assert lowerings.collective_time_s(*DIRECT[operation], size, (0.25,) * 4) == pytest.approx(time_s)


def product_graph(width: int = 64) -> Graph:
    return Graph(
        inputs=(TensorSpec(name="x", shape=("B", "T", width)),),
        outputs=("y",),
        operators=(Operator(kind="linear", inputs=("x", "w", ""), outputs=("y",)),),
        parameters=(ParameterSpec(name="w", shape=(width, width)),),
        tensors=(TensorSpec(name="y", shape=("B", "T", width)),),
    )


def test_efficiency_is_the_share_at_which_the_roofline_meets_the_measured_layers() -> None:
    graph = product_graph(1024)
    kind = replace(local_cluster(1).kinds["cpu"], efficiency=1.0)
    place = MicrobatchShape(4, 512, 0, 512)
    truth = RooflineCosts().layer_cost(LayerQuery(graph, place, replace(kind, efficiency=0.3), "float32"))

    def flat(time_s: float) -> ActionCurve:
        return ActionCurve(tokens=(16.0, 2048.0), time_s=(time_s, time_s))

    curve = LayerCurve(
        signature=digest_graph(graph), name="x", kind="cpu", dtype="float32", setting="alone", processes=1,
        fit_error=0.0, actions={"F": flat(truth.forward_s), "I": flat(truth.input_s), "W": flat(truth.weight_s),
                 "B": flat(truth.input_s + truth.weight_s)},
        points=(LayerPoint(rows=4, tokens=512, past=0, time_s={}, spread={}),),
    )  # fmt: skip
    assert fit_efficiency(kind, [graph], [curve]) == pytest.approx(0.3, rel=0.06)
    assert fit_efficiency(kind, [], []) == 1.0
    (found,) = add_ratios(replace(kind, efficiency=0.6), [graph], [curve])
    assert found.against_roofline["F"] == pytest.approx(2.0, rel=0.05)
    assert add_ratios(kind, [], [curve]) == [curve]


def test_partial_files_are_replaced_and_removed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    output = tmp_path / "cluster.json"
    sample = LinkSample(source=0, target=1, size_bytes=8, round_trip_s=1e-5, repeat=0)
    partial = PartialProfile(
        phase="links", members=tuple(members(1, 2)), lost={"1": "gone"}, inside=(sample,), rails={}, layers=()
    )
    file = PartialFile(output)
    file.write(partial)
    assert load_partial(partial_path(output)) == partial
    file.write(replace(partial, phase="later"))
    assert load_partial(partial_path(output)).phase == "links", "not written again within a moment"
    file.write(replace(partial, phase="later"), force=True)
    assert load_partial(partial_path(output)).phase == "later"
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.partial.json"]
    file.remove()
    assert not list(tmp_path.iterdir())
    PartialFile(None).write(partial, force=True)
    with pytest.raises(FormatError, match="The file cannot be read"):
        load_partial(partial_path(output))


def measured_there(**environment: str) -> Cluster:
    plain = local_cluster(2)
    provenance = Provenance(source="measured", when=WHEN, where="there", environment=environment)
    return replace(plain, provenance=provenance)


def test_a_profile_from_other_software_is_refused_unless_asked() -> None:
    here = {"python": "3.11.9", "torch": "2.13.0", "pipefit": "0.1.0", "cpu": "Some CPU", "os": "Linux 6"}
    assert check_environment(measured_there(**here), here=here) == ()
    assert check_environment(measured_there(**here), here=here | {"os": "Linux 7"}) == (), "the kernel is not compared"
    with pytest.raises(ClusterError) as caught:
        check_environment(measured_there(**here), here=here | {"torch": "2.11.0"})
    text = str(caught.value)
    assert "measured with other software than is running now" in text
    assert "torch 2.13.0 then, 2.11.0 now" in text and WHEN in text and "--allow-other-environment" in text
    said = check_environment(measured_there(**here), allow=True, here=here | {"torch": "2.11.0"})
    assert said == ("torch 2.13.0 then, 2.11.0 now",)
    with pytest.raises(ClusterError, match=r"another machine than this one(.|\n)*cpu Some CPU then, Else now"):
        check_environment(measured_there(**here), here=here | {"cpu": "Else"})
    assert check_environment(measured_there(**here), hardware=False, here=here | {"cpu": "Else"}) == ()
    with pytest.raises(ClusterError, match=r"cuda none then, 12\.8 now"):
        check_environment(measured_there(**here), here=here | {"cuda": "12.8"})


def test_data_sheets_and_unmarked_files_have_nothing_to_compare() -> None:
    assert check_environment(parse_spec("8xH100")) == ()
    assert check_environment(measured_there()) == ()


def test_the_fingerprint_is_that_of_this_machine_without_importing_torch() -> None:
    import importlib.metadata
    import platform

    found = machine_fingerprint()
    assert found["python"] == platform.python_version()
    assert found["torch"] == importlib.metadata.version("torch")
    assert check_environment(measured_there(**found)) == ()
