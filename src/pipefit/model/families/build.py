"""Build the chain of layers as plain modules from a family and its configuration. No torch at import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipefit.errors import ModelError, PluginError
from pipefit.extras import install_command
from pipefit.model.families import FAMILIES, ModelConfig, read_family_config, without_tuning
from pipefit.plugins import call_name, call_plugin, import_function, missing_plugin_advice

if TYPE_CHECKING:
    import torch

    from pipefit.model.graph import Model

USER = "user"
"The family of models that a user's function builds; the only field of its configuration is `source`."


def typed_config(family: str, config: Mapping[str, Any], where: str = "config") -> ModelConfig:
    """The typed configuration of a family, without adapters. Raises ModelError for an unknown family or bad fields."""
    if family not in FAMILIES:
        raise ModelError(
            "The model family is not known.",
            where=where,
            seen=family,
            allowed=", ".join(FAMILIES),
            next_step=missing_plugin_advice(),
        )
    return read_family_config(FAMILIES[family], without_tuning(config), where)


def has_written_graphs(family: str) -> bool:
    """Return whether pipefit itself writes the operator graphs of a family. Tests hold them equal to captured ones; a
    plug-in's are used only without torch."""
    return family in FAMILIES and FAMILIES[family].graphs.startswith("pipefit.")


def write_family(family: str, config: Mapping[str, Any]) -> Model:
    """Return the model of a family as operator graphs, without torch. Raises ModelError for bad fields, and for a
    family that needs torch."""
    if family != USER:
        typed = typed_config(family, config)
        writer = FAMILIES[family].graphs
        if writer:
            model: Model = import_function(FAMILIES.describe_entry(family), writer, "write_model")(
                family, config, typed
            )
            return model
    written = [name for name, entry in FAMILIES.items() if entry.graphs]
    raise ModelError(
        "This model is captured by PyTorch, which is not installed.",
        where="--model",
        seen="your own layers" if family == USER else f"the family {family}",
        allowed=f"without PyTorch: a saved model, or one of the families {', '.join(sorted(written))}",
        next_step=install_command("torch"),
    )


def find_builder(family: str) -> Callable[[ModelConfig], list[torch.nn.Module]]:
    """Return the function that builds the layers of a family. Imports its module, and with it torch. Raises PluginError
    if a plug-in lacks it."""
    return import_function(FAMILIES.describe_entry(family), FAMILIES[family].builder, "build")


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
        from pipefit.model.user import open_user_model

        source = str(config.get("source", ""))
        user_model = open_user_model(config)
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
        layers = _build_chain(family, typed)
    return finish_layers(layers, device, dtype, typed)


def _build_chain(family: str, typed: ModelConfig) -> list[torch.nn.Module]:
    """Return the layers of a family. Raises PluginError if a plug-in's builder fails or returns another type."""
    from torch import nn

    subject, builder = FAMILIES.describe_entry(family), find_builder(family)
    layers = call_plugin(subject, builder, typed, returns=(list, tuple))
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise PluginError(
                f"The {subject} built a layer of a wrong type.",
                where=f"{call_name(builder)}, layer {index}",
                seen=repr(layer)[:200],
                allowed="torch.nn.Module",
            )
    return list(layers)
