"""The custom operator that stands for a `Leaf` module while a layer is exported. It is never executed."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from pipefit.model.ops import KINDS


@torch.library.custom_op("pipefit::leaf", mutates_args=())
def call_operator(inputs: list[Tensor], kind: str, attributes: str) -> Tensor:
    """An operator of kind `kind`: its tensor inputs in order (absent ones last, left out), its attributes as JSON. Its
    value has the shape and type that the kind says."""
    raise AssertionError("pipefit::leaf exists for export only")


@call_operator.register_fake
def _(inputs: list[Tensor], kind: str, attributes: str) -> Tensor:
    known = KINDS[kind]
    absent = [None] * (len(known.inputs) - len(inputs))
    (shape,) = known.shapes((*(tuple(each.shape) for each in inputs), *absent), json.loads(attributes))
    dtype = inputs[0].dtype if known.output_dtype is None else getattr(torch, known.output_dtype)
    return inputs[0].new_empty(shape, dtype=dtype)
