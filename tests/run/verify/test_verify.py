"""`pipefit verify`: which ranks it runs, what it says of them, its exit codes, and every mistake."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipefit.cluster import local_cluster
from pipefit.cluster.spec import uniform_rail
from pipefit.cost.memory.correction_file import load_memory
from pipefit.cost.memory.step_end import RUN_ELEMENTS
from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.errors import RunError
from pipefit.model.capture.whole import capture_whole
from pipefit.model.example import Example
from pipefit.model.graph import Model
from pipefit.model.registry import open_model
from pipefit.optimizers import update_elements
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.check.rules import save_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.risk import attach_risk
from pipefit.plan.types import InputHashes, Job, Plan
from pipefit.run.transfers.comms import CommGroups, all_gather, reduce_scatter
from pipefit.run.verify import verify
from pipefit.run.verify.alone import RECEIVED_STD, alone_world
from pipefit.run.verify.record import check_kind
from pipefit.show.figures import limits_by_device

MODEL = "tiny-llama"


@lru_cache
def opened() -> Model:
    return open_model(MODEL)


def plan_of(predicted: bool = True, **decisions: Any) -> Plan:
    """A plan for four processes of this machine."""
    model, cluster = opened(), local_cluster(4)
    job = Job(batch=8, sequence=32, precision="float32", seed=5)
    choice = ParallelConfig(**{"stages": 4, "microbatches": 4, "schedule": "1f1b"} | decisions)
    made = replace(build_plan(model, cluster, job, choice, name=MODEL), cluster="local:4")
    return add_prediction(made, model, simulate_plan(made, model, cluster)) if predicted else made


def with_lanes(plan: Plan, *lanes: tuple[float, float]) -> Plan:
    """The plan with these (predicted, limit) of its lanes."""
    assert plan.prediction is not None
    changed = tuple(
        replace(lane, peak_bytes=peak, limit_bytes=limit)
        for lane, (peak, limit) in zip(plan.prediction.lanes, lanes, strict=True)
    )
    return replace(plan, prediction=replace(plan.prediction, lanes=changed))


@pytest.fixture
def command(tmp_path: Path, pipefit, monkeypatch):  # type: ignore[no-untyped-def]
    """Run `pipefit verify` on a plan in this process, ranks included: (exit code, output, errors)."""
    model = opened()
    monkeypatch.setattr("pipefit.model.capture.layers.capture_family", lambda family, config: model)
    monkeypatch.setattr(verify, "in_fresh_process", lambda work, *arguments, rank: work(*arguments))

    def run(plan: Plan | None, *words: str) -> tuple[int, str, str]:
        path = tmp_path / "plan.json"
        if plan is not None:
            save_plan(plan, path)
        return pipefit("verify", str(path), *words)

    return run


def test_the_ranks_that_matter_are_run_and_fit(command) -> None:
    code, out, _ = command(plan_of(), "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["fits"] and sorted(one["rank"] for one in facts["ranks"]) == [0, 1, 2, 3]
    for one in facts["ranks"]:
        peak = max(one["measured"][name] for name in ("build", "train", "evaluate"))
        assert one["predicted_bytes"] - 64 * 2**20 == pytest.approx(peak, rel=0.01), "without what is only assumed"
    code, out, _ = command(plan_of())
    assert code == 0 and "the plan fits" in out and "counted by the allocator's record" in out


def test_a_rank_over_its_limit_is_found_whatever_was_predicted(command) -> None:
    plan = with_lanes(plan_of(), (1e6, 1e9), (1e6, 1e9), (1e6, 1e6), (1e6, 1e9))
    code, out, _ = command(plan)
    assert code == 1
    assert "the plan does not fit: rank 2 needs" in out and "NO" in out
    code, out, _ = command(plan, "--rank", "1", "--rank", "3")
    assert (
        code == 0
        and "the ranks that were run fit" in out
        and "not run: the fullest device of lane 2; predicted at most" in out
    )


def test_running_out_of_memory_is_not_fitting(command, monkeypatch) -> None:
    def out_of_memory(*arguments: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(verify, "measure_rank", out_of_memory)
    code, out, _ = command(with_lanes(plan_of(), *[(1e6, 1e6)] * 4))
    assert code == 1 and "rank 0 ran out of memory" in out
    code, _, err = command(with_lanes(plan_of(), *[(1e6, 1e15)] * 4))
    assert code == 2 and "on a device that is smaller than the plan's" in err


def test_a_killed_process_is_reported() -> None:
    with pytest.raises(RunError, match="was killed before it was done"):
        verify.in_fresh_process(os._exit, 9, rank=3)


@pytest.mark.slow
def test_a_rank_runs_in_a_process_of_its_own() -> None:
    plan, model = plan_of(), opened()
    found = verify.verify_rank(plan, model, 2, torch.device("cpu"), 1)
    assert found.measured == verify.measure_rank(plan, model, 2, torch.device("cpu"), 1) and found.fits_limit


def test_critical_ranks() -> None:
    """The fullest for their limit first, lanes that are alike once, and of a lane the device with most rows."""
    plan = plan_of()
    assert verify.critical_ranks(with_lanes(plan, (1, 10), (3, 10), (3, 10), (2, 4))) == (3, 1, 0)
    assert verify.critical_ranks(with_lanes(plan, (1, 10), (3, 10), (4, 10), (2, 4)), most=2) == (3, 2)
    uneven = plan_of(stages=2, replicas=(1, 3), microbatches=2)
    assert verify.critical_ranks(uneven) == (1, 3) or verify.critical_ranks(uneven) == (3, 1)


def test_what_was_measured_is_recorded_and_learned_from(command, tmp_path: Path) -> None:
    """Six plans teach a correction; the same plan again changes nothing; then plans carry a risk."""
    path = tmp_path / "memory.json"
    choices = [
        {}, {"schedule": "gpipe"}, {"recompute": ("full",)}, {"schedule": "zb-h1"}, {"microbatches": 2}, {"stages": 2},
    ]  # fmt: skip
    for count, choice in enumerate(choices, 1):
        code, out, _ = command(plan_of(**choice), "--rank", "0", "--steps", "1", "--record", str(path))
        assert code == 0 and f"{count} plan{'s' if count > 1 else ''} measured on cpu" in out
        assert ("6 are needed for a correction" in out) == (count < 6)
    facts = load_memory(path)
    command(plan_of(), "--rank", "0", "--steps", "1", "--record", str(path))
    assert len(load_memory(path).runs) == len(facts.runs) == 6 and facts.runs[0].environment["torch"]
    estimate = facts.corrections["cpu"].estimate_rank(facts.runs[0].parts)
    assert estimate.expected_bytes == pytest.approx(facts.runs[0].measured_bytes, rel=0.01)
    plan = attach_risk(plan_of(), opened(), local_cluster(4), facts)
    assert plan.prediction is not None and plan.prediction.risk is not None and plan.prediction.risk < 0.001


def test_what_cannot_be_recorded_is_refused_before_anything_is_run(command, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "memory.json"

    def never(*arguments: Any, rank: int) -> None:
        raise AssertionError("a rank was run")

    monkeypatch.setattr(verify, "in_fresh_process", never)
    uneven = plan_of(stages=2, replicas=(1, 3), microbatches=2)
    code, _, err = command(uneven, "--rank", "0", "--record", str(path))
    assert code == 2 and "The memory of rank 0 cannot be recorded" in err and "of lane 0: 1" in err
    monkeypatch.setattr("pipefit.run.verify.record.check_kind", raise_mistake)
    code, _, err = command(plan_of(), "--record", str(path))
    assert code == 2 and "another kind" in err
    path.write_text("{")
    code, _, err = command(plan_of(), "--record", str(path))
    assert code == 2 and "not valid JSON" in err
    code, _, err = command(plan_of(), "--record", str(tmp_path))
    assert code == 2 and "The memory file cannot be written." in err


def raise_mistake(*arguments: Any) -> None:
    raise RunError("another kind")


def test_a_lighter_rank_says_nothing_of_its_lane(command) -> None:
    """Of replicas with one and three parts of the rows the first needs less: that it fits is not that the plan does."""
    uneven = plan_of(stages=1, replicas=(1, 3), microbatches=2)
    code, out, _ = command(uneven, "--rank", "0", "--steps", "1")
    assert code == 0 and "not run: the fullest device of lane 0; predicted" in out
    assert "the ranks that were run fit" in out and "the plan fits" not in out
    code, out, _ = command(uneven, "--rank", "1", "--steps", "1")
    assert code == 0 and "the plan fits" in out


KINDS = {
    ("cpu", "cpu", ""): True, ("cpu-2", "cpu", ""): True, ("H100", "cpu", ""): False,
    ("cpu", "cuda", "NVIDIA H100"): False,
    ("H100", "cuda", "NVIDIA H100 80GB HBM3"): True, ("A100-80", "cuda", "NVIDIA A100-SXM4-80GB"): True,
    ("H100", "cuda", "NVIDIA H200"): False, ("RTX-4090", "cuda", "NVIDIA GeForce RTX 4090"): True,
}  # fmt: skip


@pytest.mark.parametrize("case", KINDS)
def test_only_the_plans_own_kind_of_device_is_recorded(case: tuple[str, str, str]) -> None:
    if KINDS[case]:
        check_kind(*case)
        return
    with pytest.raises(RunError, match="cannot be recorded for the plan's devices") as error:
        check_kind(*case)
    assert f"a device of kind {case[0]}" in str(error.value)


MISTAKES = {
    "rank": (("--rank", "4"), "The plan has no such rank.", "0 to 3: the plan has 4 devices"),
    "negative rank": (("--rank=-1",), "The plan has no such rank.", "0 to 3"),
    "steps": (("--steps", "0"), "The number of steps is too small.", "1 or more"),
    "device": (("--device", "tpu"), "A rank cannot run there.", "auto, cpu or cuda"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(command, name: str) -> None:
    words, what, allowed = MISTAKES[name]
    code, _, err = command(plan_of(), *words)
    assert code == 2 and what in err and allowed in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(command) -> None:
    code, _, err = command(plan_of(), "--device", "cuda")
    assert code == 2 and "No CUDA device can be used here." in err


def test_a_plan_that_is_not_there(command, tmp_path: Path) -> None:
    code, _, err = command(None)
    assert code == 2 and "The file cannot be read." in err
    (tmp_path / "plan.json").write_text("{")
    code, _, err = command(None)
    assert code == 2 and "not valid JSON" in err


def test_a_plan_without_a_prediction(command) -> None:
    plan = plan_of(predicted=False)
    code, out, _ = command(plan)
    assert code == 0 and "the plan fits" in out, "its cluster is known, so the simulator predicts it"
    code, _, err = command(replace(plan, cluster=""))
    assert code == 2 and "has no prediction to compare" in err and "--cluster FILE.json or --local N" in err


def test_a_plan_for_another_model(command) -> None:
    plan = plan_of()
    code, _, err = command(replace(plan, hashes=InputHashes(model="0" * 16, cluster=plan.hashes.cluster)))
    assert code == 2 and "The plan was made for a different version of this model." in err


def test_a_cluster_that_is_named_must_be_the_plans(command, tmp_path: Path) -> None:
    code, _, err = command(plan_of(), "--cluster", str(tmp_path / "none.json"))
    assert code == 2 and "The file cannot be read." in err
    code, _, err = command(plan_of(), "--local", "2")
    assert code == 2 and "cluster" in err and "changed" in err


def test_a_machine_that_is_too_small(command) -> None:
    code, _, err = command(with_lanes(plan_of(), *[(1e15, 2e15)] * 4))
    assert code == 2 and "This machine has too little memory to run a rank of the plan." in err


def test_runs_of_the_update_are_what_the_cost_model_counts() -> None:
    assert RUN_ELEMENTS["cpu"] == update_elements(torch.device("cpu"))
    assert RUN_ELEMENTS["gpu"] == update_elements(torch.device("cuda"))


def test_alone_in_a_world() -> None:
    """Receives are filled, gathers and reductions give numbers, and nothing is left of the world afterwards."""
    with alone_world(2, 8):
        comms = CommGroups()
        comms.create_groups([[0, 1, 2, 3], [2, 6]])
        group = comms.find_group([0, 1, 2, 3])
        channel, peer, tag = comms.open_channel(5, 2, 7)
        buffer = torch.full((4096,), float("nan"))
        channel.recv([buffer], peer, tag).wait()
        assert float(buffer.std()) == pytest.approx(RECEIVED_STD, rel=0.1)
        whole, part = torch.empty(16), torch.arange(4.0)
        all_gather(whole, part, group).wait()
        assert torch.equal(whole, part.repeat(4))
        reduce_scatter(part, torch.arange(16.0), group).wait()
        assert part.tolist() == [8, 9, 10, 11], "the part of the third of four"
        dist.all_reduce(part, group=group)
        assert part.tolist() == [8, 9, 10, 11]
    assert not dist.is_initialized()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def test_inputs_of_a_whole_model_may_be_called_as_hidden_states_are() -> None:
    inputs = {"x": torch.zeros(2, 6), "labels": torch.zeros(2, dtype=torch.int64)}
    model = capture_whole(Example(module=Small(), inputs=inputs, loss=nn.functional.cross_entropy))
    assert [tensor.name for tensor in model.layer_graph(model.layers[1]).inputs] == ["x", "labels"]
    plan = build_plan(
        model, local_cluster(1), Job(batch=4, sequence=1, precision="float32"), ParallelConfig(), name="small"
    )
    [[feed]], count = verify.random_batch_source(plan, model, 0, torch.device("cpu")).step_inputs(0)[:2]
    assert (feed.data["x"].shape, count) == ((4, 6), 4)


def test_kinds_that_hold_different_amounts_are_each_told_what_they_need() -> None:
    """Replicas of two kinds with three rows and one: of every rank what it really takes, and the one that decides is
    the one that is fullest for its own memory."""
    made, model = local_cluster(4), opened()
    [cpu] = made.kinds.values()
    kinds = {"cpu": cpu, "cpu-small": replace(cpu, name="cpu-small", memory_bytes=cpu.memory_bytes // 8)}
    hosts = tuple(replace(made.hosts[0], name=f"h{n}", kind=name, devices=2) for n, name in enumerate(kinds))
    rail = uniform_rail("net", 2, 1e-6, 1e9)
    cluster = replace(made, kinds=kinds, hosts=hosts, rails=(rail,))
    job = Job(batch=8, sequence=128, precision="float32", seed=5)
    choice = ParallelConfig(stages=2, replicas=(3, 1), microbatches=2, schedule="1f1b", devices=(0, 2, 1, 3))
    plan = build_plan(model, cluster, job, choice, name=MODEL)
    plan = add_prediction(plan, model, simulate_plan(plan, model, cluster))
    assert plan.prediction is not None
    assert [lane.kind for lane in plan.prediction.lanes] == ["cpu-small", "cpu-small"]
    small = [plan.used_devices.index(device) for device in (2, 3)]
    assert sorted(verify.critical_ranks(plan)) == sorted(small)
    found = {rank: verify.measure_rank(plan, model, rank, torch.device("cpu"), 1).train for rank in range(4)}
    for lane, said in enumerate(plan.prediction.lanes):
        for device in plan.lane_mesh(lane).devices:
            assert verify.is_fullest(plan, device), "of its kind"
            peak = said.for_device(device).peak_bytes - WORKSPACE_BYTES
            assert peak == pytest.approx(found[plan.used_devices.index(device)], rel=0.01)
            assert limits_by_device(plan)[device] == cluster.kinds["cpu" if device < 2 else "cpu-small"].memory_bytes
    assert found[small[0]] < 0.8 * max(found.values())
