"""What the pool's processes run for tests of whole models: a user's module, captured and cut, fed from a data set."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.support import worker_cases as cases
from tests.support.in_float64 import AllInFloat64

from pipefit.cluster import local_cluster
from pipefit.data.samples import UserSamples, field_of
from pipefit.model.capture.whole import capture_whole, input_tensors
from pipefit.model.example import Example
from pipefit.model.graph import Model
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan
from pipefit.run.checkpoint.gather import gather_full
from pipefit.run.inputs.feeding import SampleBatchSource
from pipefit.run.update.optimizer import OptimizerConfig
from pipefit.run.worker.build import build_worker
from pipefit.run.worker.evaluation import LaneEvaluation
from pipefit.run.worker.state import model_pieces

SGD = OptimizerConfig(lr=1e-2, weight_decay=0.0, max_norm=0.0, options={"momentum": 0.8})
"""Changes of parameters that are sums of gradients."""


class RandomRows:
    """Rows of random numbers for an example: row r is the same everywhere. Of labels of tokens some do not count."""

    def __init__(self, example: Example, classes: int, rows: int = 40) -> None:
        self.shapes = {name: tuple(value.shape[1:]) for name, value in example.inputs.items()}
        self.floats = {name for name, value in example.inputs.items() if value.is_floating_point()}
        self.classes, self.rows = classes, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        draw = np.random.default_rng(row)
        item = {}
        for name, shape in self.shapes.items():
            item[name] = draw.normal(size=shape) if name in self.floats else draw.integers(0, self.classes, shape)
        if self.shapes["labels"]:
            item["labels"][: row % 3] = -100
        return item


class Whole:
    """A user's model, captured, with a data set; what ranks get of it is in `material`."""

    def __init__(
        self, example: Example, classes: int = 8, sequence: int = 1, optimizer: str = "adamw", model: Any = None
    ) -> None:
        self.example = example
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = model or capture_whole(example)
        self.job = Job(batch=8, sequence=sequence, precision="float64", seed=5, optimizer=optimizer)
        self.fed = input_tensors(example)
        fields = {name: field_of(one) for name, one in self.fed.items()}
        self.samples = UserSamples(RandomRows(example, classes), fields, where="rows", batch=8, held_out=8)
        self.state = {name: p.detach().double().numpy().copy() for name, p in example.module.named_parameters()}

    @property
    def material(self) -> tuple[Any, ...]:
        return self.model, self.state, self.samples, self.fed

    def plan(self, **decisions: Any) -> Plan:
        return build_plan(self.model, local_cluster(8), self.job, ParallelConfig(**decisions), name="whole")

    def reference(self, plan: Plan, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
        """(mean losses, parameters afterwards) of plain PyTorch: the user's module and loss, torch's own optimizer."""
        module = self.example.module.double().train()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(torch.from_numpy(self.state[name]))
        optimizer = stock_optimizer(module, self.job.optimizer)
        rows, losses = self.samples.rows, []
        for step in range(steps):
            numbers = rows.training_rows(np.arange(step * 8, step * 8 + 8), plan.job.seed)
            given = {
                n: torch.from_numpy(v) for n, v in self.samples.take_rows(numbers, list(self.fed), 0, step).items()
            }
            loss = self._loss(module, given)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses, {name: p.detach().numpy() for name, p in module.named_parameters()}

    def _loss(self, module: Any, given: dict[str, torch.Tensor]) -> Any:
        with AllInFloat64():
            if self.example.loss is not None:
                labels = given.pop(self.example.labels)
                return self.example.loss(module(**given), labels)
            result = module(**given)
        return getattr(result, "loss", result)


def stock_optimizer(module: Any, name: str) -> torch.optim.Optimizer:
    """PyTorch's optimizer with the options of the runs."""
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=SGD.lr, momentum=SGD.options["momentum"])
    own = cases.ADAMW_OPTIONS
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": own.weight_decay},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=own.lr, betas=(own.beta1, own.beta2), eps=own.eps)


def train_whole(
    plan: Plan, model: Model, state: Any, samples: UserSamples, fed: Any, steps: int
) -> tuple[list[float], dict[str, np.ndarray], float]:
    """(losses, parameters on rank 0, mean loss over the held-out rows) of this rank."""

    def value(name: str, shape: Any, box: Any) -> torch.Tensor:
        return torch.from_numpy(state[name])[tuple(slice(*run) for run in box)]

    options = SGD if plan.job.optimizer == "sgd" else cases.OPTIMIZER
    worker = build_worker(plan, model, cases.comms(), torch.device("cpu"), options, value=value)

    def total(number: int) -> int:
        added = torch.tensor([number])
        dist.all_reduce(added, group=cases.group_of(worker))
        return int(added)

    feeding = SampleBatchSource(plan, model, samples, fed, worker.device, torch.device("cpu"), total)
    losses = []
    for step in range(steps):
        feeds, divisor, _ = feeding.step_inputs(step)
        losses.append(worker.run_step(feeds, step, divisor).read_values()[0])
    feeds, divisor, _ = feeding.evaluation_inputs(0)
    held_out = float(LaneEvaluation(worker).run_batch(feeds)) / divisor
    whole = gather_full(model_pieces(worker, saving=True), group=cases.group_of(worker))
    return losses, {name.partition("/")[2]: t.numpy() for name, t in whole if t is not None}, held_out
