"""Faults as inputs: ranks that die, hang, run out of memory or hold another plan. One message, code 2, nobody left."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.support import train_toys as toys
from tests.support import worker_plans as plans

from pipefit.errors import RunError
from pipefit.plan.types import LanePrediction, PlanPrediction
from pipefit.run.config import TrainConfig
from pipefit.run.session.faults import (
    HeartbeatMonitor,
    dead_rank,
    exited_rank,
    is_connection_lost,
    is_out_of_memory,
    out_of_memory,
    say_once,
    verify_ranks,
)
from pipefit.run.session.launch import _judge_failures, rank_token
from pipefit.run.session.rendezvous import World
from pipefit.run.session.train import corpus_mismatch
from pipefit.run.update.optimizer import OptimizerConfig

LIMIT_S = 60.0


class Failure:
    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode


def wait_for(condition, limit_s: float = 5.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def monitors(store, count: int, beating: int, left: list[int]):
    made = [HeartbeatMonitor(store, rank, count, 0.3, grace_s=0.1, leave=left.append) for rank in range(beating)]
    for monitor in made:
        monitor.start()
    return made


def test_a_silent_rank_is_named_once_and_all_others_leave(capsys):
    left: list[int] = []
    made = monitors(dist.HashStore(), 4, 3, left)
    assert wait_for(lambda: len(left) == 3)
    assert left == [2, 2, 2]
    err = capsys.readouterr().err
    assert err.count("Rank 3 died or hangs") == 1 and "no heartbeat for 0.3 s" in err and "--resume" in err
    assert all("Rank 3" in monitor.fault.full_text() for monitor in made)


def test_ranks_that_stop_as_meant_are_not_called_dead(capsys):
    left: list[int] = []
    first, second = monitors(dist.HashStore(), 2, 2, left)
    second.stop()
    time.sleep(0.8)
    assert first.fault is None
    first.stop()
    assert not left and not capsys.readouterr().err


def test_a_fault_of_one_rank_reaches_all_and_is_printed_once(capsys):
    left: list[int] = []
    made = monitors(dist.HashStore(), 3, 3, left)
    made[1].announce_fault(RunError("The thing broke.", where="here", next_step="mend it"))
    assert wait_for(lambda: len(left) == 3)
    err = capsys.readouterr().err
    assert err.count("The thing broke.") == 1 and "try: mend it" in err
    assert "where: here" in made[0].await_fault(1.0).full_text()


def test_the_end_of_the_store_is_told(capsys):
    class Gone:
        def set(self, *_):
            raise dist.DistNetworkError("Connection reset by peer")

        add = set

    left: list[int] = []
    monitor = HeartbeatMonitor(Gone(), 1, 2, 0.3, grace_s=0.0, leave=left.append)
    monitor.start()
    assert wait_for(lambda: left == [2])
    assert "the host that started the run died" in capsys.readouterr().err


def test_a_rank_that_is_not_the_first_waits_for_the_word_of_the_first_and_speaks_if_none_comes(capsys):
    """The first may be stopped between its claim and its word: what it would have said is said by the next."""
    error = RunError("It broke.")
    store = dist.HashStore()
    say_once(store, error, 0.2)
    say_once(store, RunError("Something else broke."), 5.0)
    assert capsys.readouterr().err == f"pipefit: {error.full_text()}\n"
    stopped = dist.HashStore()
    stopped.add("pipefit/claimed", 1)
    say_once(stopped, error, 0.2)
    assert capsys.readouterr().err == f"pipefit: {error.full_text()}\n" and stopped.check(["pipefit/fault"])


def test_out_of_memory_stands_beside_the_prediction():
    one = plans.plan("llama", stages=2, microbatches=2)
    lane = LanePrediction(
        peak_bytes=3 << 30, limit_bytes=4 << 30, static_bytes=1 << 30, busy_s=1.0, idle_s=0.0,
        parts={"activations": 2 << 30, "parameters": 1 << 30},
    )  # fmt: skip
    prediction = PlanPrediction(step_s=1.0, compute_s=1.0, tokens_per_s=1.0, flops_per_step=1.0, lanes=(lane, lane))
    error = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: tried 99 bytes")
    assert is_out_of_memory(error) and is_out_of_memory(MemoryError()) and not is_out_of_memory(ValueError("memory"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    text = out_of_memory(replace(one, prediction=prediction), 1, 1, 6, error).full_text()
    assert "Device 1 ran out of memory" in text and "lane 1, step 7" in text
    assert "predicted peak 3.00 GiB of 4.00 GiB (activations 2.00 GiB, parameters 1.00 GiB)" in text
    assert "--fix recompute=full" in text
    assert "the plan has no prediction" in out_of_memory(one, 1, 1, 6, MemoryError()).full_text()


def test_lost_connections_are_told_from_bugs():
    assert is_connection_lost(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1"))
    assert is_connection_lost(dist.DistBackendError("NCCL error"))
    assert not is_connection_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_connection_lost(ValueError("Connection closed by peer"))


def test_ranks_with_another_plan_are_named():
    store = dist.HashStore()
    for rank, token in ((1, "plan a"), (2, "plan b"), (3, "plan a")):
        store.set(f"pipefit/token/{rank}", token)
    with pytest.raises(RunError) as error:
        verify_ranks(store, 0, 4, "plan a", 5.0)
    assert "another plan, options or software than the rest: 2." in error.value.full_text()
    assert "plan b on rank 2, plan a on rank 0" in error.value.full_text()
    with pytest.raises(RunError, match="than the rest: 2"):
        verify_ranks(store, 3, 4, "plan a", 5.0)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"optimizer": OptimizerConfig(lr=1e-2)}, "lr 0.01 on rank 1, lr 0.0003 on rank 0"),
        (
            {"steps": 9, "keep_checkpoints": 2},
            "keep checkpoints 2, steps 9 on rank 1, keep checkpoints 3, steps 4 on rank 0",
        ),
        ({"held_out": 8.0}, "held out 8.0 on rank 1, held out 0.01 on rank 0"),
        ({"resume": "run"}, "resumes True on rank 1, resumes False on rank 0"),
    ],
)
def test_ranks_with_other_options_are_named(options, seen):
    one = plans.plan("llama", stages=2, microbatches=2)
    config = TrainConfig(plan="p", run_dir="r", steps=4)
    store = dist.HashStore()
    store.set("pipefit/token/1", rank_token(one, replace(config, **options), 1))
    with pytest.raises(RunError) as error:
        verify_ranks(store, 0, 2, rank_token(one, config, 0), 5.0)
    assert "another plan, options or software than the rest: 1." in error.value.full_text()
    assert (
        f"seen: {seen}\n" in error.value.full_text()
        and "start all ranks with the same command" in error.value.full_text()
    )


def test_paths_may_differ_between_hosts():
    one = plans.plan("llama", stages=2, microbatches=2)
    config = TrainConfig(plan="p", run_dir="r", steps=4, weights="w")
    there = TrainConfig(plan="a/p", cluster="c", run_dir="a/r", steps=4, weights="a/w", data=("a",), tokenizer="a/t")
    assert rank_token(one, config, 0) == rank_token(one, there, 1)


def test_ranks_with_another_corpus_are_named(monkeypatch):
    """Rank 0 and rank 2 of a world whose other ranks have spoken already; both are told the same."""
    store = dist.HashStore()
    for rank, digest in ((1, "aaaa"), (2, "bbbb"), (3, "bbbb")):
        store.set(f"pipefit/corpus/{rank}", digest)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, digest in ((0, "aaaa"), (2, "bbbb")):
        monkeypatch.setenv("RANK", str(rank))
        world = World(torch.device("cpu"))
        world.store = store
        with pytest.raises(RunError) as error:
            world.require_agreement("corpus", digest, corpus_mismatch)
        assert "These ranks read another corpus than rank 0: 2, 3." in error.value.full_text()
        assert "seen: corpus bbbb on rank 2, aaaa on rank 0" in error.value.full_text()
        assert "--data and --tokenizer" in error.value.full_text()
    store.set("pipefit/other/1", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    same = World(torch.device("cpu"))
    same.store = store
    same.require_agreement("other", "x", corpus_mismatch)


def test_ranks_that_never_start_are_named():
    with pytest.raises(RunError) as error:
        verify_ranks(dist.HashStore(), 0, 3, "plan a", 0.2)
    assert (
        "These ranks did not start: 1, 2." in error.value.full_text()
        and "1 of 3 ranks within 0.2 s" in error.value.full_text()
    )


def test_the_launcher_names_the_rank_that_died_first():
    with pytest.raises(RunError) as error:
        _judge_failures({0: Failure(-15), 2: Failure(-9), 1: Failure(-15)})
    assert "Rank 2 died" in error.value.full_text() and "killed by SIGKILL" in error.value.full_text()
    assert _judge_failures({0: Failure(-15), 1: Failure(2)}) == 2, "that rank has spoken for itself"
    assert _judge_failures({0: Failure(1)}) == 1
    assert _judge_failures({0: Failure(-15), 1: Failure(1)}) == 1, "that rank has printed its traceback"
    assert "ran out of memory" in error.value.full_text()
    with pytest.raises(RunError, match=r"Rank 0 died.*\n.*\n.*SIGTERM\n  try: continue with --resume RUN_DIR$"):
        _judge_failures({0: Failure(-15), 1: Failure(-15)})
    assert "exit code 7" in exited_rank(3, 7).full_text() and "Rank 5" in dead_rank(5, 60).full_text()


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill@1,1", ("Rank 1 died", "SIGKILL")),
        ("oom@1,1", ("Device 1 ran out of memory", "lane 1, step 2", "injected: out of memory")),
        ("plan@1", ("another plan, options or software than the rest", "-other")),
    ],
)
def test_a_local_run_ends_with_one_message(tmp_path, fault, words):
    text = toys.write_text(tmp_path)
    path, _ = toys.write_plan(tmp_path, stages=2, microbatches=4)
    run = tmp_path / "run"
    began = time.monotonic()
    result = toys.start(toys.command(path, text, run, "--local", "2", "--timeout", "5"), PIPEFIT_FAULT=fault)
    assert result.returncode == 2, result.stderr
    assert time.monotonic() - began < LIMIT_S
    assert all(word in result.stderr for word in words), result.stderr
    assert result.stderr.count("pipefit: ") == 1 and "Traceback" not in result.stderr, result.stderr
    assert not (run / "weights").exists() and not (run / "checkpoints").exists()


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "survivors"), [("kill@1,1", [0, 2]), ("stop@1,1", [0]), ("error@1,1", [0])])
def test_without_a_launcher_the_others_stop_and_name_the_rank(tmp_path, fault, survivors):
    """Ranks, each as if on a host of its own; rank 1 dies, hangs, or breaks. Rank 0's store lives on."""
    text, ranks = toys.write_text(tmp_path), 1 + len(survivors)
    path, _ = toys.write_plan(tmp_path, stages=ranks, microbatches=4)
    words = [toys.command(path, text, tmp_path / "run", "--timeout", "3")] * ranks
    processes = toys.start_ranks(words, PIPEFIT_FAULT=fault)
    results = toys.finish(processes, survivors, LIMIT_S)
    assert {code for code, _ in results} == {2}, results
    said = "".join(err for _, err in results)
    if fault.startswith("error"):
        assert "Traceback" not in said and said.count("pipefit: ") == 0, "rank 1 spoke itself"
    else:
        assert said.count("Rank 1 died or hangs") == 1 and said.count("pipefit: ") == 1, said
    assert all(toys.group_is_empty(process.pid) for process in processes)
