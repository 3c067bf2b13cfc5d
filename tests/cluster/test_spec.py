"""Short cluster texts, the data-sheet library, this machine, and what links two devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipefit.cluster import (
    check_cluster,
    device_count,
    host_of,
    kind_of,
    link_between,
    load_cluster,
    local_cluster,
    open_cluster,
    parse_spec,
)
from pipefit.cluster.spec import PROCESS_BYTES
from pipefit.cluster.topology import SELF, place_in_host, rail_index
from pipefit.errors import ClusterError, PipefitError


def test_one_host_needs_no_bandwidth() -> None:
    cluster = parse_spec("8xH100")
    check_cluster(cluster)
    assert device_count(cluster) == 8 and len(cluster.hosts) == 1 and cluster.rails == ()
    assert kind_of(cluster, 7).peak_flops_per_s["bfloat16"] == 989e12
    assert cluster.provenance.source == "data-sheet"


def test_network_cards_of_a_host_add_up() -> None:
    cluster = parse_spec("2x8xH100:8x400Gbit/s")
    assert link_between(cluster, 0, 8).bandwidth_bytes_per_s == 400e9
    assert parse_spec("1x64xH100:1Gbit/s").rails == () and device_count(parse_spec("1x64xH100")) == 64


def test_several_hosts_are_joined_by_what_is_given() -> None:
    cluster = parse_spec("2x4xA100-80:200Gbit/s")
    check_cluster(cluster)
    assert device_count(cluster) == 8
    assert link_between(cluster, 0, 7).bandwidth_bytes_per_s == 25e9
    assert link_between(cluster, 0, 3) == cluster.links["inside"]
    assert link_between(cluster, 5, 5) is SELF
    assert host_of(cluster, 4).name == "host1" and place_in_host(cluster, 5) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2x8xH100", ["Several hosts need the bandwidth", "2x8xH100:8x400Gbit/s"]),
        ("8xH1000", ["No data sheet is known", "where: --cluster", "did you mean H100?"]),
        ("8xBanana", ["No data sheet is known", "pipefit devices H100", "PIPEFIT_DEVICES"]),
        ("0xH100", ["at least one host and one device"]),
        ("2x8xH100:fast", ["not a number with a unit", "--cluster"]),
        ("8xH100:banana", ["not a number with a unit", "'banana'"]),
        ("2x8xH100:", ["not a number with a unit", "--cluster"]),
        ("8xH100:3.2Tb/s", ["The unit is unknown", "Tbit/s"]),
        ("2x8xH100:400", ["The unit is unknown", "Gbit/s"]),
        ("8xH100:400Gbit/s", ["One host has no bandwidth to other hosts", "2x8xH100:400Gbit/s"]),
        ("8x8xH100:3200GB/s", ["No network between hosts", "3.20 TB/s per host", "bit/s or B/s"]),
        ("8x8xH100:400bit/s", ["No network between hosts", "50.0 B/s per host"]),
        ("64xH100", ["One host of 64 H100 is larger than usual hosts, of 8", "8x8xH100:8x400Gbit/s", "1x64xH100"]),
    ],
)
def test_wrong_texts_say_what_is_allowed(text: str, words: list[str]) -> None:
    with pytest.raises(PipefitError) as error:
        open_cluster(text)
    for word in words:
        assert word in str(error.value)


def test_a_text_of_another_form_is_told() -> None:
    with pytest.raises(ClusterError, match="neither a cluster file nor a short cluster text"):
        parse_spec("eight H100")


def test_local_shares_this_machine_and_says_that_it_guesses() -> None:
    one, four = local_cluster(1), local_cluster(4)
    check_cluster(four)
    assert device_count(four) == 4
    assert (kind_of(one, 0).memory_bytes + PROCESS_BYTES) // 4 == kind_of(four, 0).memory_bytes + PROCESS_BYTES
    assert kind_of(one, 0).peak_flops_per_s["float32"] == pytest.approx(
        4 * kind_of(four, 0).peak_flops_per_s["float32"]
    )
    assert kind_of(four, 0).provenance.source == "assumed" == four.provenance.source
    assert open_cluster("local:4") == four, "a plan names it so, and finds the same again"
    with pytest.raises(ClusterError, match="At least one device"):
        local_cluster(0)
    with pytest.raises(ClusterError, match="too little memory for this number of processes") as error:
        local_cluster(100_000)
    assert "100000 processes" in str(error.value) and "at most" in str(error.value)


def test_devices_are_numbered_host_by_host_and_take_the_rails_in_turn() -> None:
    cluster = load_cluster(Path(__file__).parents[2] / "examples/clusters/mixed-kinds.json")
    assert [host_of(cluster, d).name for d in (0, 3, 4, 8, 16, 23)] == ["a0", "a0", "a1", "v0", "v1", "v1"]
    assert kind_of(cluster, 7).name == "A100-40" and kind_of(cluster, 8).name == "V100"
    assert link_between(cluster, 0, 20).bandwidth_bytes_per_s == 3.125e9
    assert link_between(cluster, 0, 20).latency_s == 3e-5
    assert rail_index(cluster, 21) == 0
    with pytest.raises(ClusterError, match="no such device") as error:
        host_of(cluster, 24)
    assert "0 to 23" in str(error.value)


def test_no_link_is_made_up_between_hosts() -> None:
    cluster = parse_spec("2x1xH100:1GB/s")
    bare = type(cluster)(**{name: getattr(cluster, name) for name in cluster.__dataclass_fields__} | {"rails": ()})
    with pytest.raises(ClusterError, match="no rail that joins them"):
        link_between(bare, 0, 1)
