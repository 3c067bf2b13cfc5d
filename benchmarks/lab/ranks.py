"""One rank of a lab run of a benchmark: measures the cluster as `pipefit profile` does, or takes steps of many plans.

`python ranks.py FOLDER profile|plans`, started on every device by `runs.py`, which writes what is
needed into FOLDER and reads what rank 0 leaves there. All plans of one start are on the same devices, one after the
other, in the same processes.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipefit.data.preparation.ahead import BatchRecipe
from pipefit.data.stepplan import StepPlan, batch_shape
from pipefit.lab import pace
from pipefit.model.graph import Model
from pipefit.model.registry import open_model
from pipefit.plan.check.rules import load_plan
from pipefit.plan.types import Plan
from pipefit.profile.config import ProfileConfig
from pipefit.profile.session import run_profile as profile
from pipefit.run.inputs.feeding import BatchInputs
from pipefit.run.inputs.feeds import make_inputs
from pipefit.run.inputs.image_feeding import ImageBatchSource
from pipefit.run.session.process_exit import exit_process
from pipefit.run.session.rendezvous import World
from pipefit.run.transfers.comms import CommGroups
from pipefit.run.update.optimizer import OptimizerConfig
from pipefit.run.verify.verify import count_on_cpu, work_phases
from pipefit.run.worker.build import build_worker
from pipefit.run.worker.worker import Worker

OPTIMIZER = OptimizerConfig(lr=1e-3, max_norm=0.0, steps=0, weight_decay=0.0)


class RandomRows:
    """Rows of random tokens: row r is the same on every rank."""

    def __init__(self, sequence: int, vocabulary: int) -> None:
        self.sequence, self.vocabulary = sequence, vocabulary

    def row(self, index: int) -> Any:
        return np.random.default_rng(index).integers(0, self.vocabulary, self.sequence + 1).astype(np.int64)


def main() -> None:
    """What the command line names."""
    torch.set_num_threads(1)
    folder, what = Path(sys.argv[1]), sys.argv[2]
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    if what == "profile":
        sizes = tuple(task.pop("sizes_bytes"))
        names = ("model.json", *task.pop("also"))
        models = tuple(str(folder / name) for name in names) if task.pop("layers") else ()
        config = ProfileConfig(output=folder / "cluster.json", models=models, sizes_bytes=sizes, **task)
        profile(config, lambda phase, done, total: None)
        return
    world = World(torch.device("cpu"))
    world.open_store()
    world.start_group(300.0, 300.0)
    model, comms = open_model(str(folder / "model.json")), CommGroups(world.device)
    found = []
    for index in range(task["plans"]):
        plan = load_plan(folder / f"plan-{index}.json")
        mine = steps_of(plan, model, comms, task, task["bucket_bytes"][index])
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, mine)
        found.append(everyone)
    if world.rank == 0:
        (folder / "measured.json").write_text(json.dumps(found), encoding="utf-8")
    world.stop_group()


def steps_of(plan: Plan, model: Model, comms: CommGroups, task: dict[str, Any], bucket_bytes: int) -> dict[str, Any]:
    """When this rank began and ended each step, by the machine's clock; its paced actions; its last step's trace; the
    most bytes that it had alive, in a run of its own, as `pipefit verify` counts them."""
    warm, steps, trace = task["warm"], task["steps"], task["trace"]
    worker = build_worker(plan, model, comms, torch.device("cpu"), OPTIMIZER, bucket_bytes=bucket_bytes)
    elements = sum(bucket.owned[1] - bucket.owned[0] for bucket in worker.buckets)
    worker.pace = pace.step_pacer(elements, worker.optimizer)
    feeding = feeding_of(plan, model, worker.device, task["index"])
    times = []
    before: dict[str, Any] = {}
    for step in range(warm + steps):
        fed = feeding(step)
        worker.tracing = trace and step == warm + steps - 1
        if step == warm:
            before = counts()
        dist.barrier()
        began = time.perf_counter()
        worker.run_step(fed.feeds, step, fed.divisor, fed.counts).read_values()
        if step >= warm:
            times.append((began, time.perf_counter()))
    dist.barrier()
    after = counts()
    paced = {key: after[key] - before[key] for key in after if key != "worst_s"} | {"worst_s": after.get("worst_s", 0)}
    found = {"times": times, "paced": paced if after else {}, "trace": spans(worker) if trace else [], "bytes": 0}
    if task["count_bytes"]:
        del worker
        found["bytes"] = count_on_cpu(work_phases(plan, model, torch.device("cpu"), 1, comms)).largest_bytes
    return found


def feeding_of(plan: Plan, model: Model, device: int, index: str) -> Callable[[int], BatchInputs]:
    """What a step is fed with: random rows, or the samples of an index."""
    cpu, shape = torch.device("cpu"), batch_shape(plan)
    if index:
        return ImageBatchSource(plan, model, BatchRecipe(index=index, shape=shape), device, cpu).step_inputs
    rows = RandomRows(plan.job.sequence, int(plan.model.config["vocab_size"]))

    def fed(step: int) -> BatchInputs:
        numbers = np.arange(step * plan.job.batch, (step + 1) * plan.job.batch)
        batch = StepPlan(step=step, rows=numbers, divisor=plan.job.batch * plan.job.sequence, shape=shape)
        return BatchInputs(make_inputs(plan, device, rows, batch, cpu), batch.divisor)

    return fed


def spans(worker: Worker) -> list[tuple[str, float, float, float]]:
    """The last traced step: (action, start, stop, seconds at its beginning that it waited for messages)."""
    columns = zip(worker.trace, worker.trace_waits_s, strict=True)
    found = [(str(span.action), span.start_s, span.stop_s, wait_s) for span, wait_s in columns]
    gc.collect()
    return found


def counts() -> dict[str, Any]:
    """What the emulated device of this process has done so far; empty where there is none."""
    device = pace.emulated_device()
    return {} if device is None else asdict(device.counts)


if __name__ == "__main__":
    main()
    exit_process(0)
