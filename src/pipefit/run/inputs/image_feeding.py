"""Batches of a multimodal model: samples of an index, with the inputs that each stage's space needs.

The samples of a step, their order and their token counts follow from metadata, so all ranks agree without
communication. Arrays come from `data.preparation`, in this process or made ahead by workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipefit.data.multimodal.broken import BrokenImage, OnBroken, merge_broken
from pipefit.data.multimodal.feeds import ModuleArrays
from pipefit.data.multimodal.fits import check_index, data_inputs
from pipefit.data.multimodal.images import decoder_versions
from pipefit.data.multimodal.sample_rows import LATENTS, PATCHES, SampleRows
from pipefit.data.preparation.ahead import BatchRecipe, HeldStage, PreparedStep, StepPrefetcher, Together
from pipefit.data.preparation.cores import takes_decoded
from pipefit.data.preparation.start import Workers, start_pool
from pipefit.data.sources import STDLIB
from pipefit.data.stepplan import batch_shape
from pipefit.errors import DataError
from pipefit.model.graph import Model
from pipefit.plan.types import Plan
from pipefit.precision import COMPUTE_TYPE
from pipefit.run.config import TrainConfig
from pipefit.run.inputs.feeding import BatchInputs
from pipefit.run.stage_inputs import StageInputs

FIELD_ROLES = ("tokens", "positions", "labels", "documents", "rows")
"""Arrays with a field in `StageInputs`; all others are inputs by name."""


def is_multimodal(model: Model) -> bool:
    """Return True if the model has modules in packed spaces."""
    return any(module.space in (PATCHES, LATENTS) for module in model.modules)


def open_images(
    plan: Plan,
    model: Model,
    config: TrainConfig,
    device: int,
    torch_device: torch.device,
    together: Together = merge_broken,
) -> ImageBatchSource:
    """Return the source of a run's samples; `together`: see `StepPrefetcher`. Raises DataError if `--data` names no
    index."""
    if len(config.data) != 1 or config.data == (STDLIB,):
        raise DataError(
            "A multimodal model is fed from an index of samples.",
            where="--data",
            seen=", ".join(config.data),
            allowed="the folder of one index",
            next_step="make it: pipefit data MANIFEST -o FOLDER",
        )
    recipe = BatchRecipe(
        index=str(Path(config.data[0]).absolute()),  # workers elsewhere have other working directories
        shape=batch_shape(plan),
        held_out=config.held_out,
        pack=config.pack,
        on_long=config.on_long,
    )
    return ImageBatchSource(
        plan, model, recipe, device, torch_device,
        workers=config.workers, prepare=config.worker_backend, steps=config.steps,
        on_broken=config.on_broken, together=together,
    )  # fmt: skip


class ImageBatchSource:
    """The samples of an index for one device."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        recipe: BatchRecipe,
        device: int,
        torch_device: torch.device,
        *,
        workers: int = 0,
        prepare: Workers = "processes",
        steps: int | None = None,
        on_broken: OnBroken = "fail",
        together: Together = merge_broken,
    ) -> None:
        """`workers` of the kind `prepare` make the next steps ahead; 0: each step is made here on demand. `steps` of
        the whole run; `on_broken`, `together`: see `StepPrefetcher`. Raises DataError if the index is invalid or for
        another model."""
        self._plan, self._torch_device = plan, torch_device
        spaces = {module.name: module.space for module in model.modules}
        places = []
        for number, stage in enumerate(plan.stages):
            group = plan.groups[stage.group].to_mesh()
            if device in group.devices:
                replica = group.axis_position(device, "replica")
                places.append(HeldStage(number, stage.space, replica, takes_decoded(model, stage)))
        self._ahead = StepPrefetcher(recipe, tuple(places), None, stop=steps, on_broken=on_broken, together=together)
        index = self._ahead.source.index
        check_index(model, index, self._ahead.source.rows)
        self._losses = {name: space for name, space in spaces.items() if space != PATCHES}
        self._inputs = {module.name: _input_dtypes(model, module.layers) for module in model.modules}
        self.rows = self._ahead.source.rows
        self.rows.require_batch(plan.job.batch)
        self.digest = f"{index.summary.digest}/{recipe.pack}/{recipe.on_long}"
        worker_recipe = replace(recipe, digest=index.summary.digest, versions=decoder_versions())
        self._pool = start_pool(worker_recipe, workers, prepare)
        self._ahead.prepare_by(self._pool)

    def step_inputs(self, step: int) -> BatchInputs:
        """Return the inputs of a training step by stage, divisors by module, counts by space."""
        return self._batch_inputs(self._ahead.take_step(step), step)

    @property
    def evaluation_count(self) -> int:
        """The number of batches that hold all held-out rows."""
        return -(-self.rows.held_out // self._plan.job.batch)

    def evaluation_inputs(self, index: int) -> BatchInputs:
        """Return the inputs of one batch of an evaluation by stage."""
        return self._batch_inputs(self._ahead.evaluation(index), index)

    @property
    def excluded_samples(self) -> list[int]:
        """Skipped samples by their numbers in the index: the same on all devices."""
        return sorted(self._ahead.left_out)

    def exclude_samples(self, samples: Collection[int]) -> None:
        """Skip these samples, as before the checkpoint."""
        self._ahead.skip_samples(samples)

    def take_broken(self) -> list[BrokenImage]:
        """Return the broken images of all devices whose samples were skipped since the last call."""
        broken, self._ahead.found = self._ahead.found, []
        return broken

    def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            self._pool.close()

    def _batch_inputs(self, prepared: PreparedStep, step: int) -> BatchInputs:
        feeds: dict[int, list[list[StageInputs]]] = {}
        for (stage, _), arrays in sorted(prepared.feeds.items(), key=lambda item: item[0]):
            feeds.setdefault(stage, []).append([self._stage_inputs(stage, arrays, step)])
        divisors = {name: prepared.plan.divisors[space] for name, space in self._losses.items()}
        counts = {space: space_counts.tolist() for space, space_counts in prepared.plan.counts.items()}
        return BatchInputs(feeds, divisors, {**counts, **prepared.plan.images})

    def _stage_inputs(self, stage: int, arrays: ModuleArrays, step: int) -> StageInputs:
        """Return a stage's inputs on the device; floating inputs in the type that the graphs expect."""
        job, known = self._plan.job, self._inputs[self._plan.stages[stage].module]
        packed = "tokens" not in arrays.arrays
        tensors = {
            name: _move_array(array, known.get(name), COMPUTE_TYPE[job.precision], self._torch_device)
            for name, array in arrays.arrays.items()
            if name in known or name == "rows" or (name == "documents" and (packed or job.documents == "apart"))
        }
        feed = StageInputs(
            step=step, data={name: tensor for name, tensor in tensors.items() if name not in FIELD_ROLES}
        )
        for name in FIELD_ROLES:
            setattr(feed, name, tensors.get(name))
        if packed:
            feed.image_lengths = arrays.image_lengths
        elif job.documents == "apart":
            documents = arrays.arrays["documents"]
            has_documents = documents.size > 0
            feed.document_bounds = (
                (int(documents[:, 0].min()), int(documents[:, -1].max())) if has_documents else (0, 0)
            )
        return feed


def mean_sizes(rows: SampleRows, batch: int) -> dict[str, dict[str, int]]:
    """Return packed space -> sizes of an average step: tokens, and the sum of images' tokens squared."""
    return {
        space: {
            "B": 1,
            "T": round(float(rows.counts[space].mean()) * batch),
            "squares": round(float(rows.squares[space].mean()) * batch),
        }
        for space in (PATCHES, LATENTS)
    }


def _input_dtypes(model: Model, layers: Iterable[Any]) -> dict[str, str]:
    """Return the number type in the graphs of each input of a module's layers."""
    return {name: tensor.dtype for name, tensor in data_inputs(model, layers).items()}


def _move_array(array: Any, kind: str | None, precision: str, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.is_floating_point():
        compute_dtype: torch.dtype = getattr(torch, precision)
        tensor = tensor.to(torch.promote_types(compute_dtype, torch.float32) if kind == "float32" else compute_dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
