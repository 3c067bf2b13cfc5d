"""The custom operator that stands for a `Leaf` module while a layer is exported. It is never executed."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("pipefit::leaf", mutates_args=())
def leaf(inputs: list[Tensor], kind: str, attributes: str) -> Tensor:
    """An operator of kind `kind`: its tensor inputs in order, its attributes as JSON. Shaped as the first input."""
    raise AssertionError("pipefit::leaf exists for export only")


@leaf.register_fake
def _(inputs: list[Tensor], kind: str, attributes: str) -> Tensor:
    return torch.empty_like(inputs[0])
