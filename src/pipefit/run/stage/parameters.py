"""The parameters of a stage and their gradient buffers.

Linear layers and embeddings add into `parameter.main_grad` themselves. All other gradients come from autograd's own
accumulation: into the buffer itself if the dtypes agree, else through a hook that adds and drops them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch


def make_parameters(
    layers: Sequence[Any], device: torch.device, dtype: torch.dtype, released: Collection[str] = ()
) -> dict[str, torch.nn.Parameter]:
    """Return one parameter per global name, zero until weights are loaded; layers with the same global name share it.

    A tied parameter is trainable if one of its uses is. The parameters named in `released` have no storage yet.
    """
    parameters: dict[str, torch.nn.Parameter] = {}
    for layer in layers:
        for spec in layer.graph.parameters:
            name = layer.parameters[spec.name]
            if name in parameters:
                assert parameters[name].shape == tuple(spec.shape), f"tied uses of {name} differ in shape"
                if spec.trainable:
                    parameters[name].requires_grad_()
                continue
            value = torch.zeros(spec.shape, dtype=dtype, device=device)
            if name in released:
                value.untyped_storage().resize_(0)
            parameters[name] = torch.nn.Parameter(value, requires_grad=spec.trainable)
    return parameters


def bind_buffer(parameter: Any, buffer: torch.Tensor) -> None:
    """Add every gradient of `parameter` into `buffer`."""
    parameter.main_grad = buffer
    if buffer.dtype == parameter.dtype:
        parameter.grad = buffer
    elif not hasattr(parameter, "gradient_hook"):
        parameter.gradient_hook = parameter.register_post_accumulate_grad_hook(_move_gradient)


def drop_buffer(parameter: Any) -> None:
    """Unbind the buffer of `parameter`: without another one, its next gradient is an error."""
    parameter.main_grad = parameter.grad = None


def _move_gradient(parameter: Any) -> None:
    if parameter.grad is not None:  # autograd also calls this if an operator returned no gradient
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
