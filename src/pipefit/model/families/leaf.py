"""The custom operator that replaces an `OperatorModule` while a layer is exported. It is never executed."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from pipefit.model.ops import KINDS
from pipefit.model.ops.table import PLUGINS
from pipefit.plugins import call_plugin, plugin_errors


@torch.library.custom_op("pipefit::leaf", mutates_args=())
def call_operator(inputs: list[Tensor], kind: str, attributes: str) -> Tensor:
    """An operator of kind `kind` with its tensor inputs in order (absent ones last, left out) and its attributes as
    JSON. The kind gives the shape and dtype of the result."""
    raise AssertionError("pipefit::leaf exists for export only")


@call_operator.register_fake
def _(inputs: list[Tensor], kind: str, attributes: str) -> Tensor:
    known = KINDS[kind]
    absent = [None] * (len(known.inputs) - len(inputs))
    sizes = (*(tuple(tensor.shape) for tensor in inputs), *absent)
    subject = PLUGINS.describe_entry(kind)
    with plugin_errors(subject, known.shapes):
        (shape,) = call_plugin(subject, known.shapes, sizes, json.loads(attributes), returns=tuple)
    dtype = inputs[0].dtype if known.output_dtype is None else getattr(torch, known.output_dtype)
    return inputs[0].new_empty(shape, dtype=dtype)
