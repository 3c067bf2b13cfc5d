"""A cluster reader of another package, from the how-to page: found by its entry point, and read by the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.plugin_package import installed, page_examples, write_package

from pipefit.cluster import load_cluster, open_cluster, parse_spec
from pipefit.cluster.files import check_cluster
from pipefit.cluster.readers import ClusterReader, find_readers, register_reader
from pipefit.cluster.readers.reader import ReaderOptions, cluster_of_hosts
from pipefit.errors import ClusterError, PipefitError, PluginError
from pipefit.plan.check.rules import load_plan
from pipefit.plugins import load_plugins

__all__ = ["installed"]


@pytest.fixture
def inventory(tmp_path: Path, installed) -> Path:
    """The page's package, installed, and an inventory of one host."""
    files = page_examples("add-a-cluster-reader.md")
    installed(write_package(tmp_path / "site", files, "toy_inventory"), find_readers())
    path = tmp_path / "machines.txt"
    path.write_text("north 4 H100\n", encoding="utf-8")
    return path


def test_a_plan_is_made_from_a_file_that_the_reader_reads(inventory: Path, pipefit) -> None:
    output = inventory.with_name("plan.json")
    words = ("--batch", "16", "--seq", "128", "--fix", "stages=2", "--fix", "replicas=2", "-o", str(output))
    code, out, err = pipefit("plan", "--model", "tiny", "--cluster", f"toy-inventory:{inventory}", *words)
    assert code == 0, err
    assert f"on 4 devices of toy-inventory:{inventory}" in out
    plan = load_plan(output)
    assert plan.cluster == f"toy-inventory:{inventory}" and plan.used_devices == (0, 1, 2, 3)
    cluster = open_cluster(plan.cluster)
    assert [(host.name, host.devices, host.kind) for host in cluster.hosts] == [("north", 4, "H100")]
    assert cluster.kinds == parse_spec("4xH100").kinds
    code, out, err = pipefit("simulate", str(output))
    assert code == 0 and "lane 1" in out, err
    inventory.write_text("north 8 H100\n", encoding="utf-8")
    code, _, err = pipefit("simulate", str(output))
    assert code == 2 and "cluster" in err, "a changed inventory is another cluster"


def test_profile_writes_the_cluster_of_several_hosts(inventory: Path, pipefit) -> None:
    inventory.write_text("north 2 H100\nsouth 2 H100\n", encoding="utf-8")
    output = inventory.with_name("cluster.json")
    words = ("--from", "toy-inventory", str(inventory), "--network", "200Gbit/s", "-o", str(output))
    code, _, err = pipefit("profile", *words)
    assert code == 0, err
    assert [host.name for host in load_cluster(output).hosts] == ["north", "south"]


def test_hosts_of_several_kinds_keep_their_links(inventory: Path, pipefit) -> None:
    inventory.write_text("north 8 H100\nsouth 4 NVIDIA-L40\n", encoding="utf-8")
    output = inventory.with_name("cluster.json")
    words = ("profile", "--from", "toy-inventory", str(inventory), "--network", "8x400Gbit/s", "-o", str(output))
    code, _, err = pipefit(*words)
    assert code == 0, err
    cluster = load_cluster(output)
    assert [(host.kind, host.link) for host in cluster.hosts] == [("H100", "inside H100"), ("L40", "inside L40")]
    for kind in ("H100", "L40"):
        alone = parse_spec(f"4x{kind}")
        assert cluster.links[f"inside {kind}"] == alone.links[alone.hosts[0].link]
        assert cluster.kinds[kind] == alone.kinds[kind]
    assert cluster.rails[0].bandwidth_bytes_per_s[0][1] == 400e9, "eight cards"
    code, _, err = pipefit(*words, "--devices", "A100-80")
    assert code == 0, err
    assert {host.kind for host in load_cluster(output).hosts} == {"A100-80"}, "the option wins"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"The input names no host with devices\.(.|\n)*machines\.txt\n  allowed: one host or more"),
        ("north 8 Grace-X\n", r"'Grace-X'(.|\n)*where: .*machines\.txt"),
    ],
)
def test_an_input_without_a_known_host_is_named(inventory: Path, text: str, message: str) -> None:
    load_plugins()
    inventory.write_text(text, encoding="utf-8")
    with pytest.raises(PipefitError, match=message):
        open_cluster(f"toy-inventory:{inventory}")


def test_a_file_that_lacks_facts_leads_to_profile(inventory: Path) -> None:
    load_plugins()
    inventory.write_text("north 2 H100\nsouth 2 H100\n", encoding="utf-8")
    with pytest.raises(ClusterError) as error:
        open_cluster(f"toy-inventory:{inventory}")
    command = f"pipefit profile --from toy-inventory {inventory} --network 200Gbit/s -o cluster.json"
    assert f"try: {command}" in str(error.value), "the file holds the devices"


def test_a_file_without_devices_leads_to_those_alone(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("north slots=4\n", encoding="utf-8")
    with pytest.raises(ClusterError, match=r"hosts --devices H100 -o cluster.json"):
        open_cluster(f"hostfile:{tmp_path / 'hosts'}")
    (tmp_path / "hosts").write_text("north\nsouth\n", encoding="utf-8")
    with pytest.raises(ClusterError, match=r"hosts --devices 8xH100 --network 200Gbit/s -o cluster.json"):
        open_cluster(f"hostfile:{tmp_path / 'hosts'}")


def test_a_reader_of_a_similar_name_is_suggested(pipefit) -> None:
    words = ("--batch", "16", "--seq", "128")
    code, _, err = pipefit("plan", "--model", "tiny", "--cluster", "hostfil:machines", *words)
    assert code == 2 and "No reader has this name." in err and "try: did you mean 'hostfile'?" in err
    assert "allowed: NAME:FILE for the readers hostfile, " in err


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda inputs, options: {}["host"], "(?s)The cluster reader 'toy' failed.*line .*KeyError: 'host'"),
        (lambda inputs, options: None, "(?s)The cluster reader 'toy' returned a value of a wrong.*allowed: Cluster"),
    ],
)
def test_a_reader_that_fails_is_named(tmp_path: Path, installed, read, message: str) -> None:
    installed(tmp_path, find_readers())
    register_reader(ClusterReader(name="toy", summary="toy", takes="text", literal=True, read=read))
    with pytest.raises(PluginError, match=message):
        open_cluster("toy:machines")


def test_a_count_that_is_no_number_is_named() -> None:
    wrong = cluster_of_hosts(["a"], ["4"], ReaderOptions(devices="H100"), "inventory", "toy")  # type: ignore[list-item]
    with pytest.raises(ClusterError, match=r"at least one device(.|\n)*hosts\[0\] \(a\).devices\n  seen: '4'"):
        check_cluster(wrong, "inventory")


def test_errors_of_the_reader_reach_the_user(inventory: Path, pipefit) -> None:
    inventory.write_text("north many\n", encoding="utf-8")
    code, _, err = pipefit(
        "plan", "--model", "tiny", "--cluster", f"toy-inventory:{inventory}", "--batch", "16", "--seq", "128"
    )
    assert code == 2 and f"where: {inventory}, line 1" in err and "allowed: NAME COUNT KIND" in err


def test_a_second_reader_of_a_name_is_refused() -> None:
    with pytest.raises(PipefitError, match="Two cluster readers have one name"):
        register_reader(ClusterReader(name="slurm", summary="", takes="", read=lambda inputs, options: parse_spec("")))


def test_built_in_readers_are_read_by_the_same_text(tmp_path: Path) -> None:
    table = Path(__file__).parent / "samples" / "all_reduce_perf_one_host.txt"
    assert [host.devices for host in open_cluster(f"nccl-tests:{table}").hosts] == [8]
