"""Build the chain of layers as plain modules from a family and its configuration. No torch at import."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipefit.errors import ModelError
from pipefit.model.families import FAMILIES, ModelConfig

if TYPE_CHECKING:
    import torch

USER = "user"
"The family of models that a user's function builds; the only field of its configuration is `source`."


def typed_config(family: str, config: Mapping[str, Any], where: str = "config") -> ModelConfig:
    """The typed configuration of a family. Raises ModelError for an unknown family or bad fields."""
    if family not in FAMILIES:
        raise ModelError("The model family is not known.", where=where, seen=family, allowed=", ".join(FAMILIES))
    return FAMILIES[family].read(config, where)


def find_builder(family: str) -> Callable[[ModelConfig], list[torch.nn.Module]]:
    """Return the function that builds the layers of a family. Imports its module, and with it torch."""
    builder: Callable[[ModelConfig], list[torch.nn.Module]] = importlib.import_module(FAMILIES[family].builder).build
    return builder


def build_layers(
    family: str, config: Mapping[str, Any], device: str = "meta", dtype: torch.dtype | None = None
) -> list[torch.nn.Module]:
    """Return the chain of layers as plain modules, each with `.layer_name` and `.parameter_names` (local -> global).

    `dtype` None is torch's default. On a real device the parameters have their initial values (torch's generator). Tied
    parameters are one nn.Parameter in two layers.
    """
    import torch

    from pipefit.model.families.finish import finish_layers

    if family == USER:
        from pipefit.model.user import make_user_model

        source = str(config.get("source", ""))
        user_model = make_user_model(source)
        if not isinstance(user_model, list):
            raise ModelError(
                "This command needs a list of layers, but the function returns a complete model.",
                where=source,
                seen=type(user_model.module).__name__,
                next_step="plan and search it with `pipefit shard`, or return its parts as a list of nn.Modules",
            )
        return finish_layers(user_model, device, dtype)
    typed = typed_config(family, config)
    with torch.device(device):
        layers = find_builder(family)(typed)
    return finish_layers(layers, device, dtype, typed)
