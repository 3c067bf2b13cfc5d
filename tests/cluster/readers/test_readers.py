"""Readers of other tools' output, on sample files; and every way in which such files are wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipefit.cluster import link_between, parse_spec
from pipefit.cluster.kinds import LINK_SHARE
from pipefit.cluster.readers import check_plausible, find_readers, read_cluster
from pipefit.cluster.readers.hostfile import parse_hosts
from pipefit.cluster.readers.nccl_tests import link_of, parse_table
from pipefit.cluster.readers.reader import ReaderInput
from pipefit.cluster.readers.slurm import expand_nodes
from pipefit.cluster.readers.topology import parse_topology as parse_topology
from pipefit.cluster.readers.topology import path_bytes_per_s, slowest_path
from pipefit.cluster.spec import uniform_rail
from pipefit.cluster.types import Cluster, Link
from pipefit.errors import ClusterError, FormatError, PipefitError

SAMPLES = Path(__file__).parent / "samples"
ONE_HOST = str(SAMPLES / "all_reduce_perf_one_host.txt")
TWO_HOSTS = str(SAMPLES / "sendrecv_perf_two_hosts.txt")
OLD = str(SAMPLES / "all_reduce_old_two_hosts.txt")
TOPOLOGY = str(SAMPLES / "topo_8xa100.txt")


def text_of(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


def changed(tmp_path: Path, sample: str, change: Callable[[str], str]) -> str:
    """A changed copy of a sample file."""
    path = tmp_path / Path(sample).name
    path.write_text(change(Path(sample).read_text(encoding="utf-8")), encoding="utf-8")
    return str(path)


# ---- nccl-tests ------------------------------------------------------------------------------------------------------


def test_nccl_table_with_root_is_read_by_its_header() -> None:
    table = parse_table(text_of("all_reduce_perf_one_host.txt"), ONE_HOST)
    assert table.operation == "all_reduce"
    assert [rank.device for rank in table.ranks] == list(range(8))
    assert table.host_names == ("gpu-n01",)
    assert len(table.rows) == 14
    last = table.rows[-1]
    assert last.size_bytes == 8 * 4**13
    assert last.out_of_place.bus_bytes_per_s == pytest.approx(last.out_of_place.algorithm_bytes_per_s * 1.75, rel=0.01)
    assert last.size_bytes / last.out_of_place.time_s == pytest.approx(
        last.out_of_place.algorithm_bytes_per_s, rel=0.01
    )
    assert last.in_place is not None and last.in_place.time_s != last.out_of_place.time_s
    link = link_of(table)
    assert link.bandwidth_bytes_per_s == max(row.out_of_place.bus_bytes_per_s for row in table.rows)
    assert link.latency_s == pytest.approx(table.rows[0].out_of_place.time_s / 14)


def test_nccl_older_table_without_root_reads_alike() -> None:
    table = parse_table(text_of("all_reduce_old_two_hosts.txt"), OLD)
    assert table.host_names == ("v100-a", "v100-b")
    assert table.ranks[0].name == "Tesla V100-SXM2-16GB"
    assert 8e9 < link_of(table).bandwidth_bytes_per_s < 10e9


def test_nccl_sendrecv_without_in_place_checks() -> None:
    table = parse_table(text_of("sendrecv_perf_two_hosts.txt"), TWO_HOSTS)
    assert table.operation == "sendrecv"
    assert link_of(table).latency_s == table.rows[0].out_of_place.time_s


def test_nccl_files_of_a_host_and_of_a_pair_make_one_cluster() -> None:
    cluster = read_cluster("nccl-tests", [ONE_HOST, TWO_HOSTS], devices="8xA100-80")
    assert [(host.name, host.devices, host.kind) for host in cluster.hosts] == [
        ("gpu-n01", 8, "A100-80"),
        ("gpu-n02", 8, "A100-80"),
    ]
    assert 200e9 < link_between(cluster, 0, 1).bandwidth_bytes_per_s < 235e9
    assert 22e9 < link_between(cluster, 0, 8).bandwidth_bytes_per_s < 23.2e9
    assert link_between(cluster, 8, 9).bandwidth_bytes_per_s == LINK_SHARE * 300e9, (
        "the host without a file: the data sheet"
    )
    assert cluster.provenance.source == "measured"
    assert "sendrecv on 2 ranks of gpu-n01, gpu-n02" in cluster.provenance.where


def test_nccl_devices_come_from_the_file_where_it_lists_them() -> None:
    cluster = read_cluster("nccl-tests", [OLD])
    assert [(host.devices, host.kind) for host in cluster.hosts] == [(4, "V100"), (4, "V100")]


def test_nccl_hosts_that_no_file_measures_together(tmp_path: Path) -> None:
    other = changed(tmp_path, ONE_HOST, lambda text: text.replace("gpu-n01", "gpu-n09"))
    with pytest.raises(ClusterError) as caught:
        read_cluster("nccl-tests", [ONE_HOST, other])
    assert "No file measures these hosts with each other: gpu-n01 -- gpu-n09." in str(caught.value)
    assert "--network" in str(caught.value)
    assert (
        read_cluster("nccl-tests", [ONE_HOST, other], network="200Gbit/s").rails[0].bandwidth_bytes_per_s[0][1] == 25e9
    )


def cut(lines: int) -> Callable[[str], str]:
    return lambda text: "\n".join(text.splitlines()[:lines])


NCCL_ERRORS: list[tuple[str, Callable[[str], str], str]] = [
    ("empty", lambda text: "", "There is no nccl-tests table"),
    ("before the table", cut(9), "There is no nccl-tests table"),
    ("no rows", cut(16), "the file was cut short"),
    ("some rows", cut(20), "the file was cut short"),
    ("half a row", lambda text: "\n".join(text.splitlines()[:20])[:-30], "The row does not fit the header"),
    ("no devices", lambda text: text.replace(" on ", " at "), "does not list its devices"),
    ("other units", lambda text: text.replace("(us)", "(ms)"), "units of the table are not the ones"),
    ("negative", lambda text: text.replace("   36.", "  -36.", 1), "The entry is impossible."),
    ("no number", lambda text: text.replace("   36.", "   x6.", 1), "The entry is no number."),
    ("missing", lambda text: re.sub(r"  36\.\d+", "", text, count=1), "does not fit the header"),
    ("two missing", lambda text: re.sub(r"  36\.\d+ +0.00", "", text, count=1), "does not fit the header"),
    ("three missing", lambda text: re.sub(r"  36\.\d+ +0.00 +0.00", "", text, count=1), "does not fit the header"),
]


@pytest.mark.parametrize(("what", "change", "message"), NCCL_ERRORS, ids=[case[0] for case in NCCL_ERRORS])
def test_nccl_files_that_are_wrong(what: str, change: Callable[[str], str], message: str, tmp_path: Path) -> None:
    text = change(text_of("all_reduce_perf_one_host.txt"))
    assert text != text_of("all_reduce_perf_one_host.txt"), what
    with pytest.raises(FormatError, match=message):
        parse_table(text, "all_reduce_perf.txt")


def test_nccl_test_without_a_name_wrong_results_and_no_time() -> None:
    text = text_of("all_reduce_perf_one_host.txt")
    with pytest.raises(FormatError, match="does not say which test"):
        parse_table(text.replace("all_reduce_perf", "a.out"), "output.txt")
    assert parse_table(text.replace("all_reduce_perf", "a.out"), "runs/all_gather-8.txt").operation == "all_gather"
    lines = text.splitlines()
    row = next(i for i, line in enumerate(lines) if line.strip().startswith("8 "))
    words = lines[row].split()
    for place, value, message in (
        (8, "3", "found wrong results"),
        (5, "N/A", "The row has no time"),
        (5, "0.00", "no time"),
    ):
        bad = [*words[:place], value, *words[place + 1 :]]
        with pytest.raises(FormatError, match=message):
            parse_table("\n".join([*lines[:row], "  ".join(bad), *lines[row + 1 :]]), "all_reduce_perf.txt")


def test_nccl_unknown_and_mixed_devices(tmp_path: Path) -> None:
    unknown = changed(tmp_path, ONE_HOST, lambda text: text.replace("NVIDIA A100-SXM4-80GB", "Quadro K620"))
    with pytest.raises(ClusterError, match="No data sheet is known for 'Quadro K620'"):
        read_cluster("nccl-tests", [unknown])
    assert read_cluster("nccl-tests", [unknown], devices="T4").hosts[0].devices == 8
    mixed = changed(tmp_path, ONE_HOST, lambda text: text.replace("NVIDIA A100-SXM4-80GB", "Tesla T4", 1))
    with pytest.raises(ClusterError, match="devices of several kinds"):
        read_cluster("nccl-tests", [mixed])


# ---- nvidia-smi topo -m ----------------------------------------------------------------------------------------------


def test_topology_with_cards_and_escapes() -> None:
    topology = parse_topology(text_of("topo_8xa100.txt"), TOPOLOGY)
    assert len(topology.gpus) == 8 and topology.cards == ("NIC0", "NIC1", "NIC2", "NIC3")
    assert topology.ways[0][:3] == ("X", "NV12", "NV12") and topology.ways[5][8:] == ("SYS", "SYS", "PXB", "NODE")
    assert slowest_path(topology) == "NV12"
    cluster = read_cluster("nvidia-smi-topo", [TOPOLOGY], devices="A100-80")
    assert cluster.links["NV12 of A100-80"].bandwidth_bytes_per_s == 300e9
    assert cluster.hosts[0].devices == 8 and cluster.hosts[0].name == "topo_8xa100"
    assert cluster.provenance.source == "data-sheet"
    assert "slowest way NV12 (12 NVLinks)" in cluster.provenance.where


def test_topology_of_an_older_version_goes_by_the_slowest_way() -> None:
    name = str(SAMPLES / "topo_4xt4_old.txt")
    topology = parse_topology(text_of("topo_4xt4_old.txt"), name)
    assert topology.cards == ("mlx5_0",) and slowest_path(topology) == "SYS"
    cluster = read_cluster("nvidia-smi-topo", [name], devices="T4")
    assert cluster.links["SYS of T4"].bandwidth_bytes_per_s == 16e9
    assert "the link between processors" in cluster.provenance.where


TOPOLOGY_ERRORS: list[tuple[Callable[[str], str], str]] = [
    (lambda text: "", "There is no topology matrix"),
    (lambda text: "No devices were found\n", "There is no topology matrix"),
    (cut(6), "the file was cut short"),
    (lambda text: "\n".join(text.splitlines()[:9])[:-30], "the file was cut short"),
    (lambda text: text.replace("GPU0\t X \tNV12", "GPU0\t X \tQPI", 1), "an entry that is not known"),
    (lambda text: text.replace("GPU0\t X \tNV12", "GPU0\t X \tSYS", 1), "The matrix contradicts itself."),
    (lambda text: text.replace("GPU7\tNIC0", "NIC9\tGPU8\tNIC0", 1), "unknown order"),
]


@pytest.mark.parametrize(("change", "message"), TOPOLOGY_ERRORS, ids=[message[-24:] for _, message in TOPOLOGY_ERRORS])
def test_topologies_that_are_wrong(change: Callable[[str], str], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_topology(change(text_of("topo_8xa100.txt")), TOPOLOGY)


def test_topology_needs_the_kind_and_knows_its_nvlinks(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="the input does not name them"):
        read_cluster("nvidia-smi-topo", [TOPOLOGY])
    with pytest.raises(ClusterError, match="disagree on the devices of a host"):
        read_cluster("nvidia-smi-topo", [TOPOLOGY], devices="4xA100-80")
    with pytest.raises(ClusterError, match="NVLinks; their speed on this kind of device is not known"):
        read_cluster("nvidia-smi-topo", [TOPOLOGY], devices="MI300X")
    assert path_bytes_per_s("NV18", "B200", "here") == 18 * 50e9
    assert path_bytes_per_s("NV0", "H100", "here") == 25e9, "a single device"
    assert path_bytes_per_s("NV0", "L40", "here") == 32e9
    for kind, gb_per_s in (("T4", 16), ("V100", 16), ("A100-80", 32), ("RTX-5090", 64), ("H100", 64)):
        assert path_bytes_per_s("SYS", kind, "here") == gb_per_s * 1e9
    with pytest.raises(ClusterError, match="Two files describe the same host"):
        read_cluster("nvidia-smi-topo", [TOPOLOGY, TOPOLOGY], devices="A100-80", network="100Gbit/s")
    other = tmp_path / "second.txt"
    other.write_text(text_of("topo_8xa100.txt"), encoding="utf-8")
    with pytest.raises(ClusterError, match="Several hosts need the bandwidth between them"):
        read_cluster("nvidia-smi-topo", [TOPOLOGY, str(other)], devices="A100-80")


# ---- hostfiles -------------------------------------------------------------------------------------------------------


def test_hostfiles_in_their_forms() -> None:
    assert parse_hosts(ReaderInput("h", text_of("hostfile_slots.txt"))) == {"gpu-n01": 8, "gpu-n02": 8, "gpu-n03": 4}
    assert parse_hosts(ReaderInput("h", text_of("hostfile_mpich.txt"))) == {"gpu-n01": 8, "gpu-n02": 8}
    assert parse_hosts(ReaderInput("h", text_of("hostfile_bare.txt"))) == {"worker-a": 2, "worker-b": 2}
    assert parse_hosts(ReaderInput("h", "one\ntwo\n")) == {"one": None, "two": None}
    cluster = read_cluster("hostfile", [str(SAMPLES / "hostfile_slots.txt")], devices="A100-80", network="200Gbit/s")
    assert [host.devices for host in cluster.hosts] == [8, 8, 4]
    assert cluster.rails[0].bandwidth_bytes_per_s[0][2] == 25e9
    assert "25.0 GB/s per host as given" in cluster.provenance.where


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("# only a comment\n", "names no host"),
        ("node1 slots=8\nnode1 slots=8\n", "line 2(.|\n)*node1"),
        ("node1 slots=8\nnode1\n", "listed twice"),
        ("node1 slots=0\n", "at least one slot"),
        ("node1 slots=-8\n", "at least one slot"),
        ("node1 slots=\n", "not a line of a hostfile"),
        ("node1 slots=many\n", "does not say a number of slots"),
        ("node1 gpus=8\n", "not a line of a hostfile"),
        ("node[1-4] slots=8\n", "not a line of a hostfile"),
    ],
)
def test_hostfiles_that_are_wrong(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_hosts(ReaderInput("hosts.txt", text))


def test_a_host_in_two_hostfiles_and_a_missing_count(tmp_path: Path) -> None:
    name = str(SAMPLES / "hostfile_mpich.txt")
    with pytest.raises(FormatError, match="A host is listed twice"):
        read_cluster("hostfile", [name, name], devices="A100-80", network="1GB/s")
    bare = tmp_path / "bare"
    bare.write_text("one\ntwo\n", encoding="utf-8")
    with pytest.raises(ClusterError, match="The number of devices of a host is not known"):
        read_cluster("hostfile", [str(bare)], devices="A100-80", network="1GB/s")
    assert len(read_cluster("hostfile", [str(bare)], devices="8xA100-80", network="1GB/s").hosts) == 2
    with pytest.raises(ClusterError, match="This does not name the devices of a host"):
        read_cluster("hostfile", [str(bare)], devices="eight of them", network="1GB/s")


# ---- Slurm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node7", ["node7"]),
        ("node[001-004,007]", ["node001", "node002", "node003", "node004", "node007"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("a,b[1-2],c", ["a", "b1", "b2", "c"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[1[0-2],20]-ib", ["n10-ib", "n11-ib", "n12-ib", "n20-ib"]),
        ("gpu-[09-11].hall", ["gpu-09.hall", "gpu-10.hall", "gpu-11.hall"]),
    ],
)
def test_node_lists_expand(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node[001-004", "brackets of the node list do not match"),
        ("node001-004]", "brackets of the node list do not match"),
        ("node[4-1]", "runs backwards"),
        ("node[1-9999999]", "too many nodes"),
        ("r[1-999]n[1-999]", "too many nodes"),
        ("node[a-c]", "Only numbers and ranges"),
        ("node[1,]", "A part of the node list is empty"),
        ("a,,b", "A part of the node list is empty"),
        ("node one", "not the name of a node"),
    ],
)
def test_node_lists_that_are_wrong(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        expand_nodes(text)


def test_slurm_variables_and_literal_lists(tmp_path: Path) -> None:
    cluster = read_cluster("slurm", [str(SAMPLES / "slurm_env.txt")], devices="H100", network="400Gbit/s")
    assert [host.name for host in cluster.hosts] == ["gpu001", "gpu002", "gpu003", "gpu007"]
    assert {host.devices for host in cluster.hosts} == {8}
    cluster = read_cluster("slurm", [str(SAMPLES / "slurm_tasks.txt")], devices="H100", network="400Gbit/s")
    assert [host.devices for host in cluster.hosts] == [8, 8, 8, 4]
    cluster = read_cluster("slurm", ["node[1-3]"], devices="4xT4", network="25Gbit/s")
    assert len(cluster.hosts) == 3 and cluster.hosts[2].devices == 4
    for text, message in (
        ("SLURM_JOB_ID=7\n", "do not hold the job's node list"),
        ("SLURM_JOB_NODELIST=a[1-2]\nSLURM_TASKS_PER_NODE=8(x3)\n", "not one task count for each node"),
        ("SLURM_JOB_NODELIST=a[1-2]\nSLURM_TASKS_PER_NODE=8(x\n", "not a list of task counts"),
        ("SLURM_JOB_NODELIST=a[1-2]\nSLURM_GPUS_ON_NODE=-8\n", "not a number of GPUs"),
        ("\n# nothing\n", "The node list is empty"),
        ("a1\na1\n", "A node is listed twice"),
    ):
        path = tmp_path / "slurm.txt"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(FormatError, match=message):
            read_cluster("slurm", [str(path)], devices="H100", network="400Gbit/s")


# ---- what all share --------------------------------------------------------------------------------------------------


def test_unknown_readers_missing_and_unreadable_files(tmp_path: Path) -> None:
    assert set(find_readers()) >= {"nccl-tests", "nvidia-smi-topo", "hostfile", "slurm"}
    with pytest.raises(PipefitError, match=r"No reader has this name(.|\n)*nccl-tests \(output of"):
        read_cluster("ibstat", ["x"])
    with pytest.raises(PipefitError, match="did you mean 'slurm'"):
        read_cluster("slrum", ["x"])
    with pytest.raises(PipefitError, match=r"nothing to read(.|\n)*name the hostfile"):
        read_cluster("hostfile", [])
    with pytest.raises(FormatError, match="The file cannot be read"):
        read_cluster("hostfile", [str(tmp_path / "absent")])
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(FormatError, match="The file cannot be read"):
        read_cluster("nccl-tests", [str(binary)])


def scaled(cluster: Cluster, rails: float = 1.0, links: float = 1.0, latency: float = 1.0) -> Cluster:
    rail = cluster.rails[0]
    return replace(
        cluster,
        links={
            name: Link(latency_s=link.latency_s * latency, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * links)
            for name, link in cluster.links.items()
        },
        rails=(uniform_rail("network", 2, rail.latency_s[0][1] * latency, rail.bandwidth_bytes_per_s[0][1] * rails),),
    )


def test_mistaken_units_are_told_with_the_factor() -> None:
    good = parse_spec("2x8xA100-80:200Gbit/s")
    check_plausible(good, "cluster.json")
    cases = [
        (
            scaled(good, rails=1e3),
            "Every bandwidth between hosts is about 1,000 times too large: the unit is mistaken.",
        ),
        (scaled(good, rails=1e-3), "Every bandwidth between hosts is about 1,000 times too small"),
        (scaled(good, links=1e3), "Every bandwidth inside the hosts is about 1,000 times too large"),
        (scaled(good, links=1e-3), "Every bandwidth inside the hosts is about 1,000 times too small"),
        (scaled(good, latency=1e6), "Every latency inside the hosts is about 1,000 times too large"),
        (scaled(good, rails=1e-9), "Every bandwidth between hosts is impossibly small."),
    ]
    for cluster, message in cases:
        with pytest.raises(ClusterError) as caught:
            check_plausible(cluster, "cluster.json")
        text = str(caught.value)
        assert message in text
        assert "seen:" in text and "allowed:" in text and "try:" in text


def test_one_odd_link_is_a_fact_not_a_mistake() -> None:
    good = parse_spec("3x8xA100-80:200Gbit/s")
    rail = good.rails[0]
    rows = [list(row) for row in rail.bandwidth_bytes_per_s]
    rows[0][1] = 1e6
    odd = replace(good, rails=(replace(rail, bandwidth_bytes_per_s=tuple(map(tuple, rows))),))
    check_plausible(odd, "cluster.json")
    check_plausible(replace(good, rails=()), "cluster.json")


def test_units_mistaken_in_a_read_file(tmp_path: Path) -> None:
    """Figures written in MB/s under a header that says GB/s."""

    def times_1000(text: str) -> str:
        lines = []
        for line in text.splitlines():
            words = line.split()
            if len(words) == 13 and words[0].isdigit():
                for place in (6, 7, 10, 11):
                    words[place] = str(float(words[place]) * 1000)
                line = "  ".join(words)
            lines.append(line)
        return "\n".join(lines)

    with pytest.raises(ClusterError, match="Every bandwidth inside the hosts is about 1,000 times too large"):
        read_cluster("nccl-tests", [changed(tmp_path, ONE_HOST, times_1000)])
