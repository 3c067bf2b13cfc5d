"""The custom operator that stands for a `Leaf` module while a layer is exported. It is never executed."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("pipefit::leaf", mutates_args=())
def leaf(inputs: list[Tensor], kind: str, attributes: str, like: int = 0, features: int = -1) -> Tensor:
    """An operator of kind `kind`: its tensor inputs in order, its attributes as JSON.

    Its value has the shape of input `like`; with `features` > 0 a last dimension of that many behind it, with 0 no
    dimension at all (a loss, float32). Its type is that of the first input.
    """
    raise AssertionError("pipefit::leaf exists for export only")


@leaf.register_fake
def _(inputs: list[Tensor], kind: str, attributes: str, like: int = 0, features: int = -1) -> Tensor:
    if features < 0:
        return torch.empty_like(inputs[like])
    if features == 0:
        return inputs[0].new_empty((), dtype=torch.float32)
    return inputs[0].new_empty((*inputs[like].shape, features))
