"""Random samples for a multimodal plan, with the token counts of the plan's own sampled batch, for `verify`.

Every image is one row of patches. If the plan lists its samples' images, a sample has those. Otherwise it has one image
in each packed space in which its token count is above zero.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from pipefit.data.rows import RowSplit
from pipefit.data.stepplan import batch_shape
from pipefit.errors import PlanError
from pipefit.model.graph import Model, TensorSpec, size_value
from pipefit.plan.assemble.image_split import image_runs
from pipefit.plan.assemble.packed_rows import CONDITIONS
from pipefit.plan.types import Plan
from pipefit.precision import COMPUTE_TYPE
from pipefit.run.inputs.feeding import BatchInputs
from pipefit.run.stage_inputs import StageInputs

PLACE_SPACES = {"image_places": CONDITIONS["I"], "condition_places": CONDITIONS["L"]}
"""Input with the positions of a packed space's tokens in the sequences -> that space."""


class RandomImages:
    """One random batch, returned for every step."""

    digest = "random"

    def __init__(self, plan: Plan, model: Model, vocabulary: int, device: int, torch_device: torch.device) -> None:
        """Raises PlanError for a plan without token counts of its samples in a packed space."""
        self._plan, self._vocabulary, self._torch_device = plan, vocabulary, torch_device
        self._dtype: torch.dtype = getattr(torch, COMPUTE_TYPE[plan.job.precision])
        batch, tokens = plan.job.batch, plan.job.sequence
        self.rows = RowSplit(count=2 * batch, sequence=tokens, last_labels=tokens, held_out=batch)
        spaces = [space for space in plan.spaces if not space.tokens]
        self._images = {
            space.name: list(space.images) or [(count,) if count else () for count in space.counts] for space in spaces
        }
        for name, counts in self._images.items():
            if len(counts) != batch:
                raise PlanError(
                    "The plan does not say how many tokens its samples have, so their memory cannot be measured.",
                    where=f"spaces ({name}).counts",
                    seen=f"{len(counts)} numbers",
                    allowed=f"one for each of the {batch} samples of a batch",
                    next_step="plan with the data: pipefit plan --data INDEX",
                )
        self._inputs = {module.name: _input_tensors(model, module.layers) for module in model.modules}
        self._losses = [module.name for module in model.modules if model.layer_graph(module.layers[-1]).loss_output]
        generator = torch.Generator().manual_seed(plan.job.seed)
        shape, self._feeds = batch_shape(plan), dict[int, list[StageInputs]]()
        for number, stage in enumerate(plan.stages):
            group = plan.groups[stage.group].to_mesh()
            if device in group.devices:
                replica = group.axis_position(device, "replica")
                for microbatch in shape.own_units(number):
                    places = range(*shape.batch_run(number, microbatch, replica))
                    images = (
                        [*chain.from_iterable(self._images[stage.space][sample] for sample in places)]
                        if (stage.space in self._images)
                        else []
                    )
                    if shape.divides_images(number):
                        images = images[slice(*image_runs(images, shape.shares[number])[replica])]
                    feed = self._stage_inputs(number, places, images, generator)
                    self._feeds.setdefault(number, []).append([feed])

    def step_inputs(self, step: int) -> BatchInputs:
        """Return the inputs by stage."""
        return BatchInputs(self._feeds, dict.fromkeys(self._losses, 1), self._images)

    @property
    def evaluation_count(self) -> int:
        """One batch."""
        return 1

    def evaluation_inputs(self, index: int) -> BatchInputs:
        """Return the same batch, for an evaluation."""
        return self.step_inputs(index)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _stage_inputs(self, stage: int, places: range, counts: list[int], generator: torch.Generator) -> StageInputs:
        """Return a stage's inputs for the samples at these positions of the batch; `counts` are the tokens of their
        images."""
        stage_plan, job = self._plan.stages[stage], self._plan.job
        feed, data = StageInputs(), dict[str, torch.Tensor]()
        sizes = (
            {"B": 1, "T": sum(counts)} if stage_plan.space in self._images else {"B": len(places), "T": job.sequence}
        )
        if stage_plan.space in self._images:
            feed.image_lengths = tuple(counts)
        for name, tensor in self._inputs[stage_plan.module].items():
            if name in PLACE_SPACES:
                value = self._leading_places(PLACE_SPACES[name], places)
            elif name == "grid":
                value = torch.tensor(
                    [[0, i, 1, count] for count in counts for i in range(count)], dtype=torch.int64
                ).view(1, -1, 4)
            elif name == "documents" and counts:
                starts = [sum(counts[:i]) for i, count in enumerate(counts) for _ in range(count)]
                value = torch.tensor(starts, dtype=torch.int64).view(1, -1)
            elif name in ("positions", "image_ends"):
                value = torch.arange(job.sequence).expand(len(places), -1).contiguous()
            elif name == "axis_positions":
                value = torch.arange(job.sequence).view(1, -1, 1).repeat(len(places), 1, tensor.shape[-1])
            else:
                value = self._random_tensor(tensor, sizes, generator)
            if tensor.role == "data":
                data[name] = value.to(self._torch_device)
            else:
                setattr(feed, tensor.role, value.to(self._torch_device))
        feed.data = data
        return feed

    def _leading_places(self, space: str, places: range) -> torch.Tensor:
        """Return the flat indices of the first tokens of every row, one per image token of its sample. Those
        behind the row are -1: start tokens without a place in it."""
        images, tokens = self._images[space], self._plan.job.sequence
        indices = [
            row * tokens + i if i < tokens else -1
            for row, sample in enumerate(places)
            for i in range(sum(images[sample]))
        ]
        return torch.tensor(indices, dtype=torch.int64).view(1, -1)

    def _random_tensor(self, tensor: TensorSpec, sizes: dict[str, int], generator: torch.Generator) -> torch.Tensor:
        shape = [size_value(size, sizes) for size in tensor.shape]
        if tensor.dtype == "int64":
            return torch.randint(0, self._vocabulary, shape, generator=generator)
        if tensor.dtype == "uint8":
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        wide = torch.promote_types(self._dtype, torch.float32) if tensor.dtype == "float32" else self._dtype
        return torch.randn(shape, generator=generator).to(wide)


def _input_tensors(model: Model, layers: Any) -> dict[str, TensorSpec]:
    return {
        tensor.name: tensor
        for layer in layers
        for tensor in model.layer_graph(layer).inputs
        if tensor.role != "activation"
    }
