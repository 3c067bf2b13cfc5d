"""What the worker refuses, by the text of its messages; and that reductions start while the backward still runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.run.update.test_buckets import entry, grid
from tests.support import worker_plans as plans
from tests.support.worker_plans import plan

from pipefit.errors import PlanError, RunError, StalePlanError
from pipefit.model.capture.layers import capture_family
from pipefit.model.registry import describe_config
from pipefit.run.session.launch import launch_run, run_rank
from pipefit.run.session.metrics import open_board
from pipefit.run.session.rendezvous import choose_device
from pipefit.run.transfers.comms import CommGroups
from pipefit.run.update.buckets import make_buckets
from pipefit.run.update.optimizer import OptimizerConfig
from pipefit.run.update.reduce import GradientReducer
from pipefit.run.worker.build import build_worker, stage_programs
from pipefit.run.worker.runnable import check_runnable
from pipefit.run.worker.worker import device_lane

CPU = torch.device("cpu")


def refused(error: type[Exception], make, *words: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert all(word in caught.value.full_text() for word in words), caught.value.full_text()


def with_stage(one, index, **fields):
    stages = list(one.stages)
    stages[index] = replace(stages[index], **fields)
    return replace(one, stages=tuple(stages))


def test_plans_that_can_be_simulated_but_not_run():
    one = plan("llama", stages=2, microbatches=4)
    refused(
        PlanError, lambda: check_runnable(with_stage(one, 1, microbatch_multiple=2)),
        "Only stages of packed images", "stages[1].microbatch_multiple", "seen: 2 in the space 'samples'",
    )  # fmt: skip
    turned = replace(one.groups[0], axes=one.groups[0].axes[::-1], devices=one.groups[0].devices)
    both = replace(one, groups=(one.groups[0], turned), order=replace(one.order, placement=(0, 0)))
    refused(
        PlanError, lambda: check_runnable(both), "must use the same mesh", "stages[1].group",
        "seen: shard 1, replica 1 on 0, beside replica 1, shard 1 on 0",
    )  # fmt: skip
    single = plan("llama", microbatches=2)
    free = replace(single.order, lanes=(single.order.lanes[0] + " 0FREE",))
    refused(
        PlanError,
        lambda: build_worker(replace(single, order=free), plans.model("llama"), CommGroups(), CPU, OptimizerConfig()),
        "This action is not supported yet", "lane 0", "seen: 0FREE",
    )  # fmt: skip


def test_a_sequence_beyond_the_table_of_positions_does_not_start():
    described = describe_config(plans.GPT2 | {"n_positions": 8}, "short", "short")
    short = capture_family(described.family, described.config)
    refused(
        PlanError,
        lambda: build_worker(plan("gpt2", microbatches=2), short, CommGroups(), CPU, OptimizerConfig()),
        "longer than the model's table of positions", "transformer.wpe.weight", "seen: 12 tokens", "at most 8",
    )  # fmt: skip


def test_shard_axes_must_rise():
    one = plan("llama", microbatches=2, shards=(1, 1), sharding="megatron")
    turned = replace(one, groups=(replace(one.groups[0], devices=(1, 0)),))
    refused(PlanError, lambda: check_runnable(turned), "must be in rising order", "groups[0].devices")


def test_a_program_that_changed_is_stale():
    one = with_stage(plan("llama", stages=2, microbatches=4), 1, program="0123")
    refused(
        StalePlanError, lambda: stage_programs(one, plans.model("llama")),
        "made for another program of this stage", "stages[1].program", "0123 in the plan", "make the plan again",
    )  # fmt: skip
    beyond = with_stage(plan("llama", stages=2, microbatches=4), 1, layers=(3, 99), program="")
    refused(StalePlanError, lambda: stage_programs(beyond, plans.model("llama")), "go beyond the model's layers")
    other = with_stage(plan("llama", stages=2, microbatches=4), 1, module="vision", program="")
    refused(
        StalePlanError, lambda: stage_programs(other, plans.model("llama")), "a module that the model does not have"
    )


def test_parameters_in_other_forms_than_the_program_are_stale():
    """A plan from before the vocabulary was split, whose stages have no hash of their programs."""
    one = plan("llama", microbatches=2, shards=(1, 1), sharding="megatron")
    whole = [replace(p, stored=("I", "I")) if "embed_tokens" in p.name else p for p in one.parameters]
    old = with_stage(replace(one, parameters=tuple(whole)), 0, program="")
    refused(
        StalePlanError, lambda: stage_programs(old, plans.model("llama")),
        "another form than its program", "model.embed_tokens.weight", "seen: I along the shards", "allowed: G0",
        "make the plan again",
    )  # fmt: skip


def test_a_device_without_a_stage():
    refused(PlanError, lambda: device_lane(plan("llama", microbatches=2), 7), "holds no stage", "device 7")


def test_a_launcher_with_another_number_of_ranks(monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    from pipefit.run.config import TrainConfig

    one = plan("llama", stages=2, microbatches=4)
    config = TrainConfig(plan="p", run_dir="r", steps=1, device="cpu")
    assert run_rank(one, config) == 2
    err = capsys.readouterr().err
    assert "for another number of ranks" in err and "seen: 3" in err and "allowed: 2" in err
    monkeypatch.delenv("RANK")
    refused(RunError, lambda: launch_run(one, config, 5, []), "another number of processes", "seen: 5")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_cuda_in_vain():
    refused(RunError, lambda: choose_device("cuda", 0), "No CUDA device can be used here", "--device")
    assert choose_device("auto", 0) == CPU


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refused(RunError, lambda: choose_device("auto", 2), "more ranks on this host than GPUs", "seen: 2 GPUs")


def test_tensorboard_that_is_not_installed(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refused(
        RunError, lambda: open_board(tmp_path), "TensorBoard is not installed", "pip install 'pipefit[tensorboard]'"
    )


def test_reductions_start_as_layers_finish():
    """Layers report from last to first; a bucket starts with its first layer, and never twice."""
    entries = [entry(f"{layer}", (8, 8), layer) for layer in range(6)] + [entry("other", (8, 8), 0, stage=1)]
    buckets = make_buckets(entries, torch.float32, 2 * 64 * 4, {})
    reducer = GradientReducer(buckets, CommGroups(), dict.fromkeys((0, 1), grid((1,), (1,))), 0, {0: 0}, {})
    started: list[str] = []
    for job in reducer._jobs:
        names = "+".join(e.name for e in job.bucket.entries)
        job.start_reduction = lambda job=job, names=names: (started.append(names), setattr(job, "started", True))
    ready = reducer.layer_callback(0)
    seen = []
    for layer in (5, 4, 3, 2, 1, 0):
        ready(layer)
        seen.append(list(started))
    assert seen[0] == [] and seen[1] == seen[2] == ["5+4"] and seen[3] == ["5+4", "3+2"]
    assert seen[5] == ["5+4", "3+2", "1+0"]
    reducer.start_rest(0)
    assert started == seen[5]
    reducer.finish_reductions()
    assert started == [*seen[5], "other"]
