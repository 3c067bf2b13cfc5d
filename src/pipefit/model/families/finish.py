"""Finishing layers after they are built: names, device, dtype and initial values. Imports torch.

A layer is called as `layer(x, <role inputs>)`. The names of forward's arguments give their roles: `x` is the hidden
state; `tokens`, `positions`, `labels` and `documents` come from the step plan. Nothing here knows of pipelines or
shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from pipefit.errors import ModelError
from pipefit.model.families import InitialValue, ModelConfig


def finish_layers(
    layers: Sequence[nn.Module], device: str, dtype: torch.dtype | None, config: ModelConfig | None = None
) -> list[nn.Module]:
    """Name layers and parameters, move them, and give parameters of a family their initial values.

    A user's layers keep their values. A layer without `.layer_name` is called `layers.I`; one without
    `.parameter_names` gets `LAYER.LOCAL`. A parameter object that an earlier layer also has keeps the name from that
    layer. Raises ModelError for equal names of layers, or of parameters that are not one object.
    """
    globals_: dict[int, str] = {}
    owners: dict[str, tuple[int, str]] = {}
    used: set[str] = set()
    for index, layer in enumerate(layers):
        name = str(getattr(layer, "layer_name", f"layers.{index}"))
        if name in used:
            raise ModelError(
                "Two layers have the same name.", where=f"layer {index}", seen=name, allowed="unique layer_name"
            )
        used.add(name)
        layer.layer_name = name  # type: ignore[assignment]
        parameter_names = getattr(layer, "parameter_names", None)
        names = {}
        for local, parameter in layer.named_parameters():
            names[local] = globals_.setdefault(
                id(parameter), parameter_names[local] if parameter_names else f"{name}.{local}"
            )
            owner = owners.setdefault(names[local], (id(parameter), f"{name}, {local}"))
            if owner[0] != id(parameter):
                raise ModelError(
                    "Two parameters have one name.",
                    where=f"layers {owner[1]} and {name}, {local}",
                    seen=names[local],
                    allowed="a prefix of its own for every layer; a tied parameter is one nn.Parameter in both layers",
                )
        layer.parameter_names = names  # type: ignore[assignment]
    for layer in layers:
        if config is None or device != "meta":
            layer.to(device=device)
        if dtype is not None:
            layer.to(dtype=dtype)
    if config is not None and device != "meta":
        initialize_parameters(layers, lambda name: config.initial(name))
    return list(layers)


@torch.no_grad()
def initialize_parameters(layers: Sequence[nn.Module], rule: Callable[[str], InitialValue]) -> None:
    """Set initial values of all parameters by their global names, from torch's default generator."""
    seen: set[str] = set()
    for layer in layers:
        for local, parameter in layer.named_parameters():
            name = layer.parameter_names[local]  # type: ignore[index]
            if name in seen:
                continue
            seen.add(name)
            initial = rule(name)
            if initial.fixed_number is not None:
                parameter.fill_(initial.fixed_number)
            elif initial.kind == "normal":
                parameter.normal_(0.0, initial.std)
            else:
                bound = math.sqrt(3.0) * initial.std
                parameter.uniform_(-bound, bound)
