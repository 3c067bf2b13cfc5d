"""Batches of a run, step by step: text from a corpus, or the rows of a user's data set.

Both are functions of (plan, step): every rank makes its own inputs. For text the divisor of the loss is known. For a
data set the ranks with labels count them, and one sum over all ranks, on the CPU before the step, gives the divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from pipefit.data.feed_arrays import RowReader, take_part
from pipefit.data.prepared import Corpus
from pipefit.data.rows import RowSplit
from pipefit.data.samples import HELD_OUT, UserSamples
from pipefit.data.stepplan import StepPlan, batch_shape, evaluation_batches, evaluation_plan, step_plan
from pipefit.model.capture.counted import loss_divisor
from pipefit.model.graph import Model, TensorSpec
from pipefit.plan.types import Plan
from pipefit.precision import COMPUTE_TYPE
from pipefit.run.inputs.feeds import device_place, make_inputs, row_part
from pipefit.run.inputs.label_count import LabelCount
from pipefit.run.stage_inputs import StageInputs
from pipefit.run.transfers.packed import Counts
from pipefit.run.worker.worker import Divisors, last_stage


class BatchInputs(NamedTuple):
    """One step, or one batch of an evaluation, as `Worker.run_step` and `LaneEvaluation.run_batch` take it."""

    feeds: Any
    "[microbatch][slice] for all stages of the device, or one such list per stage."
    divisor: Divisors
    counts: Counts | None = None


class BatchSource(Protocol):
    """The data of a run for one device."""

    rows: RowSplit
    digest: str

    def step_inputs(self, step: int) -> BatchInputs:
        """Return the inputs of a training step and the divisor of its loss."""
        ...

    @property
    def evaluation_count(self) -> int:
        """The number of batches in an evaluation."""
        ...

    def evaluation_inputs(self, index: int) -> BatchInputs:
        """Return the inputs of one batch of an evaluation and the divisor of its loss."""
        ...

    def close(self) -> None:
        """Release workers and files; no step follows."""
        ...


class TextRows(RowReader, Protocol):
    """Rows of tokens: a Corpus or a substitute."""

    rows: RowSplit
    digest: str


class TextBatchSource:
    """Rows of tokens. `notes` are lines about the corpus for the log of the run."""

    def __init__(self, plan: Plan, corpus: TextRows, device: int, torch_device: torch.device) -> None:
        self._plan, self._corpus, self._device, self._torch_device = plan, corpus, device, torch_device
        self._shape = batch_shape(plan)
        self.rows, self.digest = corpus.rows, corpus.digest
        self.notes = corpus.run_notes(plan.job.documents) if isinstance(corpus, Corpus) else ()
        self.rows.require_batch(plan.job.batch)

    def step_inputs(self, step: int) -> BatchInputs:
        batch = step_plan(self._shape, self.rows, step)
        return BatchInputs(
            make_inputs(self._plan, self._device, self._corpus, batch, self._torch_device), batch.divisor
        )

    @property
    def evaluation_count(self) -> int:
        return evaluation_batches(self._shape, self.rows)

    def evaluation_inputs(self, index: int) -> BatchInputs:
        batch = evaluation_plan(self._shape, self.rows, index)
        return BatchInputs(
            make_inputs(self._plan, self._device, self._corpus, batch, self._torch_device), batch.divisor
        )

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class SampleBatchSource:
    """Rows of a user's data set. A device reads only the inputs of its stages: a middle stage reads no rows at all."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        samples: UserSamples,
        fed: Mapping[str, TensorSpec],
        device: int,
        torch_device: torch.device,
        total: Callable[[int], int],
    ) -> None:
        """`fed`: input name of the user -> its tensor in the graphs; `total` sums a number over all ranks."""
        self._plan, self._samples, self._torch_device, self._total = plan, samples, torch_device, total
        self._dtype = getattr(torch, COMPUTE_TYPE[plan.job.precision])
        self._stage, self._replica = device_place(plan, device)
        self._part = row_part(plan, device)
        self._shape = batch_shape(plan)
        self.rows = replace(samples.rows, sequence=plan.job.sequence, last_labels=plan.job.sequence)
        self.digest = samples.digest
        self._counted = loss_divisor(model)
        group = plan.groups[plan.stages[last_stage(plan)].group].to_mesh()
        reads_labels = device in group.devices and group.axis_position(device, "shard") == 0
        self._labels = LabelCount(self._counted) if reads_labels and self._counted.labels is not None else None
        wanted = _input_names(plan, model, device)
        if self._labels is not None and self._counted.labels is not None:
            wanted |= {tensor.name for tensor in self._counted.labels.inputs}
        self._fed = {name: tensor for name, tensor in fed.items() if tensor.name in wanted}

    def step_inputs(self, step: int) -> BatchInputs:
        batch = step_plan(self._shape, self.rows, step)
        return BatchInputs(*self._slice_inputs(batch, step))

    @property
    def evaluation_count(self) -> int:
        return self.rows.held_out // self._plan.job.batch

    def evaluation_inputs(self, index: int) -> BatchInputs:
        return BatchInputs(*self._slice_inputs(evaluation_plan(self._shape, self.rows, index), HELD_OUT))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _slice_inputs(self, batch: StepPlan, step: int) -> tuple[list[list[StageInputs]], int]:
        feeds = [
            self._microbatch_inputs(batch, microbatch, step) for microbatch in range(self._plan.order.microbatches)
        ]
        if self._counted.per_row:
            count = self._counted.per_row * self._plan.job.batch
        else:
            count = self._total(0 if self._labels is None else sum(map(self._labels, feeds)))
        return [[self._move_inputs(feed)] for feed in feeds], max(1, count)

    def _microbatch_inputs(self, batch: StepPlan, microbatch: int, step: int) -> StageInputs:
        """Return the inputs of one microbatch on the CPU."""
        start, stop = take_part(batch.batch_run(self._stage, microbatch, self._replica), *self._part)
        arrays = self._samples.take_rows(batch.rows[start:stop], list(self._fed), self._plan.job.seed, step)
        feed = StageInputs(rows=torch.arange(start, stop), step=max(0, step))
        data = {}
        for name, tensor in self._fed.items():
            value = torch.from_numpy(np.ascontiguousarray(arrays[name]))
            value = value.to(self._dtype) if value.is_floating_point() else value
            if tensor.role == "data":
                data[tensor.name] = value
            else:
                setattr(feed, tensor.role, value)
        feed.data = data
        return feed

    def _move_inputs(self, feed: StageInputs) -> StageInputs:
        """Return the inputs on the device, copied without waiting."""
        if self._torch_device.type == "cpu":
            return feed

        def move_tensor(value: torch.Tensor | None) -> Any:
            return None if value is None else value.pin_memory().to(self._torch_device, non_blocking=True)

        return replace(
            feed,
            tokens=move_tensor(feed.tokens),
            positions=move_tensor(feed.positions),
            labels=move_tensor(feed.labels),
            rows=move_tensor(feed.rows),
            data={name: move_tensor(value) for name, value in feed.data.items()},
        )


def _input_names(plan: Plan, model: Model, device: int) -> set[str]:
    """Return the names of the inputs that the stages of a device read."""
    modules = {module.name: module for module in model.modules}
    return {
        tensor.name
        for stage in plan.stages
        if device in plan.groups[stage.group].devices
        for layer in modules[stage.module].layers[slice(*stage.layers)]
        for tensor in model.layer_graph(layer).inputs
        if tensor.role != "activation"
    }
