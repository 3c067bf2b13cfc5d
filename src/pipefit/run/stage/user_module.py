"""Parts of a captured user module outside of its graphs: initial values, data set, and untrained state.

The untrained state (buffers, parameters that the loss does not reach) lets final weights load into the module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipefit.data.samples import UserSamples, field_of
from pipefit.data.sources import STDLIB
from pipefit.errors import DataError
from pipefit.model.any_class import FIELDS
from pipefit.model.capture.whole import input_tensors
from pipefit.model.example import Example
from pipefit.model.families.build import USER
from pipefit.model.graph import TensorSpec
from pipefit.model.user import load_function, open_user_model, seeded_generators
from pipefit.plan.types import Plan
from pipefit.run.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModel:
    """A user's module captured as one model, without its parameters."""

    source: str
    dataset: Any
    fed: Mapping[str, TensorSpec]
    "Input name of the user -> its tensor in the graphs."
    untrained: Mapping[str, torch.Tensor]
    "Tensors of the module's state dict that are not parameters of the plan."
    is_library: bool
    "A class of `transformers` that a config.json names."
    aliases: Mapping[str, str]
    "Other names of tied parameters -> the name in the plan."
    unused_weights: tuple[str, ...] = ()
    "Tensors of the initial weight files without a use in a class of `transformers`."


def load_user_model(plan: Plan) -> UserModel | None:
    """Return the user's model, made under the plan's seed; None if the plan is not for a captured module."""
    if plan.model.family != USER:
        return None
    example = whole_example(plan.model.config, plan.job.seed)
    if example is None:
        return None
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in example.module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    planned = {parameter.name for parameter in plan.parameters}
    return UserModel(
        source=str(plan.model.config.get("source", "")),
        dataset=example.dataset,
        is_library=FIELDS in plan.model.config,
        fed=input_tensors(example),
        untrained={
            name: tensor.detach().clone()
            for name, tensor in example.module.state_dict().items()
            if name not in planned and aliases.get(name) not in planned
        },
        aliases={name: known for name, known in aliases.items() if known in planned},
    )


def whole_example(config: Mapping[str, Any], seed: int) -> Example | None:
    """Return the user's example, its module initialised with the seed; None for a model given as layers."""
    with seeded_generators(seed):
        example = open_user_model(config)
    return example if isinstance(example, Example) else None


def reads_text(found: UserModel, config: TrainConfig) -> bool:
    """Return whether the model is trained on text: tokens and labels are its only inputs, and no data set is given."""
    inputs = sorted(tensor.role for tensor in found.fed.values())
    return found.is_library and inputs == ["labels", "tokens"] and not any(map(_names_function, config.data))


def user_samples(found: UserModel, plan: Plan, config: TrainConfig) -> UserSamples:
    """Return the data set: the example's, or that of `--data FILE.py:FUNCTION`. Raises DataError if there is none."""
    dataset, where = found.dataset, f"the data set of {found.source}"
    if config.data != (STDLIB,):
        if len(config.data) > 1 or not _names_function(config.data[0]):
            raise DataError(
                "A model that was captured whole is fed from a data set, not from text.",
                where="--data",
                seen=", ".join(config.data),
                allowed="FILE.py:FUNCTION, which gives a data set with items by number",
                next_step="see docs/reference/models.md",
            )
        where = config.data[0]
        dataset = load_function(where)
    if dataset is None:
        raise DataError(
            "The model names no data set to train on.",
            where=found.source,
            seen="Example(dataset=None)",
            allowed="Example(..., dataset=...), or --data FILE.py:FUNCTION: a data set with items by number",
            next_step="see docs/reference/models.md",
        )
    fields = {name: field_of(tensor) for name, tensor in found.fed.items()}
    return UserSamples(dataset, fields, where=where, batch=plan.job.batch, held_out=config.held_out)


def first_values(found: UserModel, weights: str, config: Mapping[str, Any]) -> UserModel:
    """Return the model with untrained tensors read from the initial weight files, if these contain them.

    `config` is the configuration of the plan's model.
    """
    from pipefit.model.weights.files import WeightFiles

    files = WeightFiles(Path(weights), USER, config)
    read = {
        name: files.read(name, tensor.shape).to(tensor.dtype) if files.has_tensor(name) else tensor
        for name, tensor in found.untrained.items()
    }
    return replace(found, untrained=read, unused_weights=files.unused_names)


def _names_function(source: str) -> bool:
    file, _, name = source.rpartition(":")
    return file.endswith(".py") and name.isidentifier()
