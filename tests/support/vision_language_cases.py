"""One step of a vision-language model on processes of the pool, from the weights of a directory."""

from __future__ import annotations

from typing import Any

import torch
from tests.support import modules_toys as toys
from tests.support.modules_toys import Layout
from tests.support.multimodal_reference import divisors_of
from tests.support.vision_language import sample_batch
from tests.support.worker_cases import OPTIMIZER, comms, group_of

from pipefit.data.stepplan import batch_shape
from pipefit.model.registry import open_model, typed_config
from pipefit.plan.types import Job, Plan
from pipefit.run.checkpoint.gather import gather_full
from pipefit.run.session.weights import weights_value
from pipefit.run.stage_inputs import StageInputs
from pipefit.run.worker.build import build_worker
from pipefit.run.worker.state import gradient_pieces

JOB = Job(batch=4, sequence=44, precision="float64", seed=3)
ROLES = ("tokens", "positions", "labels", "documents")


LAYOUTS: dict[str, dict[str, Any]] = {
    "one device each": {},
    "one device each, recomputed": {"recompute": "full"},
    "two shards each, split tokens": {"shards": (1, 1), "sharding": "megatron-sp"},
    "two replicas of vision": {"replicas": (1, 1)},
    "two stages each": {"cuts": (2,)},
}
"""Layouts of both modules; replicas are of the encoder."""


def planned(directory: str, case: str) -> tuple[Plan, Any]:
    """Return (plan, captured model): vision on the first devices and the language model on the others, two
    microbatches."""
    model, words = open_model(directory), LAYOUTS[case]
    shards = {name: words[name] for name in ("shards", "sharding", "cuts") if name in words}
    each = {"vision": Layout(words.get("replicas", (1,)), **shards), "language": Layout(**shards)}
    return toys.plan(model, each, microbatches=2, job=JOB, recompute=words.get("recompute", "none")), model


def step_on_processes(plan: Plan, model: Any, directory: str) -> dict[str, Any]:
    """Return the loss (a mean), and the gradients on rank 0, of one step over the samples 0 to 3, from the weights of a
    directory."""
    worker = build_worker(
        plan, model, comms(), torch.device("cpu"), OPTIMIZER, value=weights_value(plan, model, directory)
    )
    typed: Any = typed_config(plan.model.family, plan.model.config)
    shape, feeds = batch_shape(plan), {}
    for index, stage in enumerate(plan.stages):
        group = plan.groups[stage.group].to_mesh()
        if worker.device in group.devices:
            replica = group.axis_position(worker.device, "replica")
            runs = [shape.batch_run(index, unit, replica) for unit in shape.own_units(index)]
            batches = [sample_batch(typed, start, stop - start) for start, stop in runs]
            feeds[index] = [[stage_inputs(batch[stage.module])] for batch in batches]
    samples = [sample_batch(typed, number, 1) for number in range(JOB.batch)]
    images = {"patches": [image_lengths(sample["vision"]["documents"][0]) for sample in samples]}
    divisors = divisors_of(sample_batch(typed, 0, JOB.batch))
    loss, _ = worker.run_step(feeds, 0, divisors, images).read_values()
    gathered = gather_full(gradient_pieces(worker), group=group_of(worker))
    gradients = {name.rpartition("/")[2]: value.numpy() for name, value in gathered if value is not None}
    return {"loss": loss, "gradients": gradients, "divisor": divisors["language"]}


def image_lengths(starts: torch.Tensor) -> tuple[int, ...]:
    """Return the tokens of every image."""
    return tuple(starts.unique_consecutive(return_counts=True)[1].tolist())


def stage_inputs(inputs: Any) -> StageInputs:
    """Return the inputs of a stage of one microbatch."""
    roles = {name: inputs.get(name) for name in ROLES}
    lengths = image_lengths(inputs["documents"][0]) if "documents" in inputs else None
    data = {name: value for name, value in inputs.items() if name not in ROLES}
    return StageInputs(**roles, data=data, image_lengths=lengths)
