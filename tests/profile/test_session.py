"""Whole profiles: real processes over gloo, one that dies on the way, and the cluster that is assembled."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipefit import codec
from pipefit.cluster import load_cluster, parse_spec
from pipefit.cost.compute import curves
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.errors import RunError
from pipefit.model.graph import Graph, Model, Operator, ParameterSpec, TensorSpec
from pipefit.model.graph import Layer as ModelLayer
from pipefit.model.graph import ModelModule as ModelModule
from pipefit.profile import session
from pipefit.profile.board import StoreExchange
from pipefit.profile.partial import load_partial, partial_path

LIMIT_S = 120


def toy_model(path: Path) -> Model:
    """A saved model of two equal layers: x + linear(x), so that profiling needs no capture."""
    graph = Graph(
        inputs=(TensorSpec(name="x", shape=("B", "T", 32)),),
        outputs=("y",),
        operators=(
            Operator(kind="linear", inputs=("x", "w", ""), outputs=("h",)),
            Operator(kind="add", inputs=("x", "h"), outputs=("y",)),
        ),
        parameters=(ParameterSpec(name="w", shape=(32, 32)),),
        tensors=(TensorSpec(name="h", shape=("B", "T", 32)), TensorSpec(name="y", shape=("B", "T", 32))),
    )
    layers = tuple(ModelLayer(name=f"layers.{i}", graph="block", parameters={"w": f"{i}.w"}) for i in range(2))
    model = Model(
        family="user", config={}, modules=(ModelModule(name="model", layers=layers),), graphs={"block": graph}
    )
    path.write_text(codec.dump_text(model), encoding="utf-8")
    return model


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pipefit", "profile", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


@pytest.mark.gloo
def test_three_local_processes_make_a_cluster_file(tmp_path: Path) -> None:
    model = toy_model(tmp_path / "toy.json")
    output = tmp_path / "cluster.json"
    code, out, err = finish(
        start(
            "--local", "3", "--quick", "--device", "cpu", "--model", str(tmp_path / "toy.json"),
            "--sequence", "32", "--tokens", "128", "-o", str(output),
        )
    )  # fmt: skip
    assert code == 0, err
    cluster = load_cluster(output)
    assert [host.devices for host in cluster.hosts] == [3]
    assert cluster.provenance.source == "measured"
    assert cluster.provenance.environment["torch"]
    link = cluster.links["inside"]
    assert 1e-7 < link.latency_s < 0.05 and 1e6 < link.bandwidth_bytes_per_s < 1e12
    measured = cluster.measured
    assert measured is not None
    curve = measured.links["inside"]
    assert curve.pairs == 6, "three processes have six directed pairs"
    assert curve.time_s[-1] > curve.time_s[0]
    assert {each.operation for each in measured.collectives} == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcasts", "reduces",
    }  # fmt: skip
    assert {(layer.setting, layer.processes) for layer in measured.layers} == {("alone", 1), ("together", 3)}
    assert all(len(layer.points) < 40 and set(layer.actions) == set("FIWB") for layer in measured.layers)
    assert measured.memory["cpu"].process_bytes > 0
    costs = curves.MeasuredCosts(cluster)
    cost = costs.layer_cost(
        LayerQuery(model.graphs["block"], MicrobatchShape(4, 32, 0, 32), cluster.kinds["cpu"], "float32")
    )
    assert 0 < cost.forward_s < 1
    assert any("together (3 processes)" in note for note in costs.notes)
    assert "links inside hosts" in err and "layers, alone" in err, "progress is shown"
    assert "all_reduce on 3 devices" in out and f"written to {output}" in out
    assert not partial_path(output).exists()


def test_collectives_are_measured_on_groups_as_runs_have_them() -> None:
    """Of two hosts of four: all, each host, both heads, and pairs next to each other. The largest host is the one whose
    times are kept; one rank has no groups."""
    assert session.collective_groups([(0, 1, 2, 3), (4, 5, 6, 7)]) == [
        [tuple(range(8))], [(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 4)], [(0, 1), (2, 3), (4, 5), (6, 7)],
    ]  # fmt: skip
    assert session.collective_groups([(0,), (1, 2, 3, 4, 5)]) == [
        [(0, 1, 2, 3, 4, 5)], [(1, 2, 3, 4, 5)], [(0, 1)], [(1, 2), (3, 4)], [(1, 2, 3, 4)],
    ]  # fmt: skip
    assert session.collective_groups([(0, 1, 2)]) == [[(0, 1, 2)], [(0, 1)]]
    assert session.collective_groups([(0,), (1,), (2,)]) == [[(0, 1, 2)]]
    assert session.collective_groups([(0,)]) == []


def test_all_hosts_are_at_work_while_collectives_of_one_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices of a run's other hosts do not wait for it: three hosts, one of a single device."""
    asked: dict[int, list[tuple[int, ...]]] = {}

    class Recorded:
        def __init__(self, *_: object) -> None:
            pass

        def collective_times(self, operation: str, group: tuple[int, ...], members: int, size: int) -> list[float]:
            assert members == len(group) and profile.rank in group
            asked.setdefault(profile.rank, []).append(group)
            return [1e-3 * size] * 3

    monkeypatch.setattr(session, "LinkEndpoint", Recorded)
    monkeypatch.setattr(session, "OPERATIONS", ("all_reduce",))
    monkeypatch.setattr(session.dist, "new_group", tuple)
    cluster = parse_spec("3x2xA100-80:100Gbit/s")
    for rank in range(5):
        profile = session.ProfileRun.__new__(session.ProfileRun)
        each = [[1e-3] * 3] * 2
        attributes = {
            "members": range(5), "hosts": {"a": [0, 1], "b": [2, 3], "c": [4]}, "rank": rank, "device": None,
            "board": SimpleNamespace(barrier=lambda: None, gather=lambda own, each=each: [each] * 5),
            "config": SimpleNamespace(sizes_bytes=(8, 64, 512), link_rounds=1),
            "found": SimpleNamespace(collectives=[]), "show": lambda *_: None, "require_all": lambda _: None,
        }  # fmt: skip
        for name, value in attributes.items():
            setattr(profile, name, value)
        profile._measure_collectives(cluster)
        assert [one.devices for one in profile.found.collectives] == [(0, 1, 2, 3, 4), (0, 1), (0, 2, 4)]
    everyone, heads = (0, 1, 2, 3, 4), (0, 2, 4)
    assert {rank: [*dict.fromkeys(groups)] for rank, groups in asked.items()} == {
        0: [everyone, (0, 1), heads], 1: [everyone, (0, 1)], 2: [everyone, (2, 3), heads], 3: [everyone, (2, 3)],
        4: [everyone, heads],
    }  # fmt: skip


@pytest.mark.gloo
def test_a_process_that_dies_is_named_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "cluster.json"
    process = start("--local", "2", "--link-rounds", "600", "--device", "cpu", "-o", str(output))
    try:
        deadline = time.monotonic() + 60
        while measured_sources(output) != {0, 1}:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        victim = rank_process(process.pid, 1)
        os.kill(victim, signal.SIGKILL)
        code, _, err = finish(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert code == 2
    assert "rank 1" in err and str(partial_path(output)) in err
    assert not output.exists()
    kept = load_partial(partial_path(output))
    assert kept.phase == "links inside hosts"
    assert [member.rank for member in kept.members] == [0, 1]
    assert {sample.source for sample in kept.inside} == {0, 1}


def measured_sources(output: Path) -> set[int]:
    """Who has sent messages so far, by the partial file."""
    path = partial_path(output)
    if not path.exists():
        return set()
    kept = load_partial(path)
    return {sample.source for samples in (kept.inside, *kept.rails.values()) for sample in samples}


def start_hosts(count: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """One process for each of `count` hosts, as launchers on several machines would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [start(*arguments, **common, RANK=str(rank), PIPEFIT_HOST=f"node{rank}") for rank in range(count)]


@pytest.mark.gloo
def test_hosts_are_joined_by_a_rail_of_measured_pairs_and_of_predicted_ones(tmp_path: Path) -> None:
    """Four hosts, of six pairs five or six: what is measured next is decided by rank 0 and done by all."""
    output = tmp_path / "cluster.json"
    arguments = ("--only", "links", "--host-rounds", "3", "--quick", "--device", "cpu", "-o", str(output))
    finished = [finish(process) for process in start_hosts(4, *arguments)]
    assert [code for code, _, _ in finished] == [0] * 4, finished
    cluster = load_cluster(output)
    assert [host.name for host in cluster.hosts] == ["node0", "node1", "node2", "node3"]
    rail = cluster.rails[0]
    assert all(rail.bandwidth_bytes_per_s[a][b] > 1e6 for a in range(4) for b in range(4) if a != b)
    assert all(0 <= value <= 1 for row in rail.repeatability for value in row)
    assert cluster.measured is not None and len(cluster.measured.rails["network"].sizes_bytes) in (3, 4)
    curve = cluster.measured.rails["network"]
    assert curve.method is not None and curve.method.full_rounds == 3
    assert curve.method.rounds == 3 or (curve.method.crowded and 3 < curve.method.rounds <= 6), "one machine: a crowd"
    assert sum(map(len, curve.predicted)) in (0, 2)
    assert curve.sharing is not None and len(curve.sharing.out_bytes_per_s) == 4
    assert min(*curve.sharing.out_bytes_per_s, *curve.sharing.in_bytes_per_s) > 1e6
    assert not cluster.measured.collectives and not cluster.measured.layers
    assert finished[1][1] == "", "only rank 0 speaks"
    assert f"{curve.method.rounds} rounds of pairs (3 are all pairs), 2 times" in finished[0][1]


@pytest.mark.gloo
def test_a_host_that_fails_is_named_by_the_others(tmp_path: Path) -> None:
    output = tmp_path / "cluster.json"
    arguments = ("--link-rounds", "30", "--timeout", "4", "--device", "cpu", "-o", str(output))
    processes = start_hosts(3, *arguments)
    try:
        deadline = time.monotonic() + 60
        while measured_sources(output) != {0, 1, 2}:
            assert time.monotonic() < deadline and processes[0].poll() is None
            time.sleep(0.1)
        processes[2].kill()
        finished = [finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [code for code, _, _ in finished[:2]] == [2, 2]
    err = finished[0][2]
    assert "Host node2 failed while measuring: links between hosts" in err
    assert "no answer for 4 s" in err and str(partial_path(output)) in err
    kept = load_partial(partial_path(output))
    assert kept.lost == {"2": "no answer for 4 s"}
    after = [sample for sample in kept.rails["network"] if 2 not in (sample.source, sample.target)]
    assert {sample.source for sample in after} == {0, 1}
    assert not output.exists()


def rank_process(parent: int, rank: int) -> int:
    """The process id of a rank that `parent` started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                started_by = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if started_by == parent and f"RANK={rank}".encode() in variables:
                return int(entry.name)
    raise AssertionError(f"rank {rank} was not found")


class DeadStore:
    """A store whose ranks beside 0 never answer, or that is gone."""

    def __init__(self, gone: bool = False) -> None:
        self.data: dict[str, str] = {}
        self.gone = gone

    def set(self, key: str, value: str) -> None:
        if self.gone:
            raise RuntimeError("connection refused")
        self.data[key] = value

    def wait(self, keys: list[str], timeout: object) -> None:
        if any(key not in self.data for key in keys):
            raise RuntimeError("wait timeout")

    def check(self, keys: list[str]) -> bool:
        return all(key in self.data for key in keys)

    def get(self, key: str) -> bytes:
        return self.data[key].encode()

    def delete_key(self, key: str) -> None:
        self.data.pop(key, None)


def test_a_rank_that_does_not_answer_is_lost_for_everybody() -> None:
    store = DeadStore()
    store.set("profile/1/2", json.dumps("here"))
    board = StoreExchange(store, 0, range(3), 0.1)
    assert board.gather("mine") == {0: "mine", 2: "here"}
    assert board.lost == {1: "no answer for 0.1 s"} and board.members == [0, 2]
    other = StoreExchange(store, 2, range(3), 0.1)
    assert other.gather("here") == {0: "mine", 2: "here"}
    assert other.lost == board.lost


def test_a_store_that_is_gone_means_rank_0() -> None:
    with pytest.raises(RunError, match="Rank 0, which collects the measurements, is gone"):
        StoreExchange(DeadStore(gone=True), 1, range(2), 0.1).gather("x")
    assert StoreExchange(None, 0, [0], 0.1).gather("x") == {0: "x"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hosts.txt",), "Files are read only with --from."),
        (("--local", "-1"), "The number is too small."),
        (("--sequence", "4"), "The number is too small."),
        (("--dtype", "int8"), "The dtype is unknown."),
        (("--host-rounds", "2"), "The number of rounds of host pairs is invalid."),
        (("--rails", "0"), "The number is too small."),
        (("--only", "layers"), "This part cannot be measured alone."),
        (("--only", "links", "--model", "gpt2"), "The layers of a model are not measured with --only links."),
        (("--from", "ibstat", "x"), "No reader has this name."),
        (("--model", "no-such-model"), "The model is not known."),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, alone: None, pipefit: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = pipefit("profile", *arguments, "-o", str(tmp_path / "c.json"))
    assert code == 2 and message in err, err
    assert not (tmp_path / "c.json").exists()


def test_readers_on_the_command_line(tmp_path: Path, pipefit: Callable[..., tuple[int, str, str]]) -> None:
    output = tmp_path / "c.json"
    words = ("--from", "slurm", "n[1-2]", "--devices", "4xT4", "--network", "25Gbit/s", "-o", str(output), "--json")
    code, out, err = pipefit("profile", *words)
    assert code == 0, err
    assert json.loads(out)["hosts"][1]["name"] == "n2"
    assert len(load_cluster(output).hosts) == 2


def flood_main(rank: int, port: int, queue: Any) -> None:
    """Three ranks in a ring, everybody sending and receiving; then a plain round on the same wire."""
    import torch
    import torch.distributed as dist

    from pipefit.profile.wire import LinkEndpoint

    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    wire = LinkEndpoint(StoreExchange(store, rank, range(3), 30.0), torch.device("cpu"))
    wire.most_bytes = 2**20
    ring = wire.measure([(0, 1), (1, 2), (2, 0)], 2**18)
    plain = wire.measure([(1, 2)], 2**10)
    queue.put((rank, dict(ring.round_trip_s), dict(plain.round_trip_s)))
    wire.board.barrier()
    dist.destroy_process_group()


@pytest.mark.gloo
@pytest.mark.timeout(120)
def test_everybody_can_send_and_receive_at_once() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=flood_main, args=(rank, port, queue), daemon=True) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        found = [queue.get(timeout=90) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for _, ring, plain in found:
        assert set(ring) == {(0, 1), (1, 2), (2, 0)} and all(0 < time_s < 10 for time_s in ring.values())
        assert set(plain) == {(1, 2)}
    assert len({tuple(sorted(ring.items())) for _, ring, _ in found}) == 1, "all learn the same"
