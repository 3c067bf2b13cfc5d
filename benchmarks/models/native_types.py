"""Model types with a family of pipefit beside the library's class: loss, gradients and a training of two processes.

The class has initial values, and its files are read by the family. All values are compared by the family's names, which
gradients and trained parameters of the class get by the same files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support import worker_cases as cases
from tests.support.in_float64 import AllInFloat64
from tests.support.whole_cases import SGD, stock_optimizer
from tests.support.whole_runs import feed_of, run_whole

from benchmarks.models.coverage import (
    LEAST_GRADIENT,
    ROWS,
    STAGES,
    STEPS,
    TOKENS,
    float64_default,
    loss_difference,
    plan_stages,
    relative_difference,
)
from benchmarks.models.tiny_configs import VOCABULARY, tiny_config
from pipefit.cluster import local_cluster
from pipefit.data.stepplan import StepPlan, batch_shape
from pipefit.model.families.build import build_layers, write_family
from pipefit.model.graph import Model
from pipefit.model.registry import ModelDescription, describe_config
from pipefit.model.weights.files import layer_tensors, load_layers
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan
from pipefit.run.checkpoint.gather import gather_full
from pipefit.run.inputs.feeds import make_inputs
from pipefit.run.worker.build import build_worker
from pipefit.run.worker.state import model_pieces

BATCH = 8


class TokenRows:
    """Rows of random tokens: row r is the same everywhere."""

    separator = 0

    def row(self, index: int) -> np.ndarray:
        """Return the tokens of a row, and one more for the last label."""
        return np.random.default_rng(index).integers(0, VOCABULARY, TOKENS + 1)


def measure_native(kind: str) -> tuple[int, float, tuple[Any, ...]]:
    """Return (layers, largest relative difference of the loss or a gradient, training) of a type with a family.

    The training is that of `coverage.class_training`. Raises PipefitError if the type cannot be planned.
    """
    fields = tiny_config(kind, dropout=False)
    described = describe_config(fields, kind, kind)
    model = write_family(described.family, described.config)
    plan_stages(model)
    with tempfile.TemporaryDirectory() as folder:
        files = ClassFiles(described, Path(folder))
        theirs = build_library_class(fields)
        state = files.named_values(theirs)
        difference = largest_difference(theirs, model, state, files)
        return len(model.layers), difference, train_class(theirs, model, state, files)


def build_library_class(fields: Mapping[str, Any]) -> Any:
    """Return the class of a configuration in float64, with eager attention and experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kwargs = {key: value for key, value in fields.items() if key != "model_type"}
    config = AutoConfig.for_model(fields["model_type"], **kwargs)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    with AllInFloat64():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()


class ClassFiles:
    """Values of a class by the names of its family, through the files that the class writes."""

    def __init__(self, described: ModelDescription, folder: Path) -> None:
        self.described, self.folder = described, folder
        self.layers = build_layers(described.family, described.config, device="cpu", dtype=torch.float64)

    def trained_names(self) -> list[str]:
        """Return the family's names of all parameters that are trained."""
        names = [
            layer.parameter_names[local]
            for layer in self.layers
            for local, parameter in layer.named_parameters()
            if parameter.requires_grad
        ]
        return list(dict.fromkeys(names))

    def named_values(self, theirs: Any) -> dict[str, np.ndarray]:
        """Return every parameter of the class by the family's name."""
        theirs.save_pretrained(self.folder)
        load_layers(self.layers, self.folder, self.described.family, self.described.config)
        return {name: tensor.detach().numpy().copy() for name, tensor in layer_tensors(self.layers).items()}


def largest_difference(theirs: Any, model: Model, state: Mapping[str, np.ndarray], files: ClassFiles) -> float:
    """Return the largest difference of the loss or a gradient from those of the class, as `class_difference` does. The
    class has its first values again afterwards."""
    draw = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=draw) for _ in range(2))
    tokens[0, :2] = torch.tensor([0, 1])  # padding tokens of some types
    loss = summed_loss(theirs, tokens, labels) / (ROWS * TOKENS)
    loss.backward()
    before = [parameter.detach().clone() for parameter in theirs.parameters()]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        expected = files.named_values(theirs)
        for parameter, value in zip(theirs.parameters(), before, strict=True):
            parameter.copy_(value)
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS)
    feed = feed_of(model, {"input_ids": tokens, "labels": labels, "position_ids": positions})
    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    with float64_default():
        ours, gradients = run_whole(None, 0, model, (), (), tensors, feed, ROWS * TOKENS)
    differences = [loss_difference(ours, float(loss.detach()))]
    for name in files.trained_names():
        differences.append(relative_difference(gradients[name].numpy(), expected[name], expected[name], LEAST_GRADIENT))
    return max(differences)


def summed_loss(theirs: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropy over all labels."""
    with AllInFloat64():
        logits = theirs(tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def train_class(theirs: Any, model: Model, state: Mapping[str, np.ndarray], files: ClassFiles) -> tuple[Any, ...]:
    """Return (function of the processes, plan, material, losses, parameters) of a training, the last two those of the
    class in one process."""
    job = Job(batch=BATCH, sequence=TOKENS, precision="float64", seed=5, optimizer="sgd")
    plan = build_plan(model, local_cluster(8), job, ParallelConfig(stages=STAGES, microbatches=2), name="native")
    optimizer, rows, losses = stock_optimizer(theirs, "sgd"), TokenRows(), []
    for step in range(STEPS):
        batch = torch.from_numpy(np.stack([rows.row(index) for index in range(step * BATCH, (step + 1) * BATCH)]))
        loss = summed_loss(theirs, batch[:, :-1], batch[:, 1:]) / (BATCH * TOKENS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return train_native, plan, (model, dict(state)), losses, files.named_values(theirs)


def train_native(
    plan: Plan, model: Model, state: Mapping[str, np.ndarray], steps: int
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return (losses, parameters on rank 0) of this rank's training from the given values."""

    def value(name: str, shape: Any, box: Any) -> torch.Tensor:
        return torch.from_numpy(state[name])[tuple(slice(*run) for run in box)]

    worker = build_worker(plan, model, cases.comms(), torch.device("cpu"), SGD, value=value)
    rows, losses = TokenRows(), []
    for step in range(steps):
        numbers = np.arange(step * BATCH, (step + 1) * BATCH)
        step_plan = StepPlan(step=step, rows=numbers, divisor=BATCH * TOKENS, shape=batch_shape(plan))
        feeds = make_inputs(plan, worker.device, rows, step_plan, torch.device("cpu"))
        losses.append(worker.run_step(feeds, step, step_plan.divisor).read_values()[0])
    complete = gather_full(model_pieces(worker, saving=True), group=cases.group_of(worker))
    return losses, {name.partition("/")[2]: tensor.numpy() for name, tensor in complete if tensor is not None}
