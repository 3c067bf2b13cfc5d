"""Adapters in the files of PEFT: `adapter_config.json` and `adapter_model.safetensors`, and merging into weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.model.adapters.options import AdapterConfig
from pipefit.model.adapters.peft import adapter_tensors, peft_config
from pipefit.model.graph import Model
from pipefit.model.weights.files import JoinedTensors, replace_file, stored_piece

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter, as `PeftModel.from_pretrained` reads them."""


def save_adapter(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], model: Model, config: AdapterConfig, base: str
) -> list[Path]:
    """Write the parameters of a model's adapters (by global name) as PEFT does; return the paths of the files.

    `base` names the base model, as `from_pretrained` takes it.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    blocks, joined, written = adapter_tensors(model), JoinedTensors(), {}
    for name, tensor in tensors:
        piece = joined.add_part(blocks[name], stored_piece(blocks[name], tensor.detach()))
        if piece is not None:
            written[blocks[name].name] = piece
    joined.check_complete(directory)
    partial = directory / f".{TENSORS}.partial"
    save_file(written, partial, metadata={"format": "pt"})
    partial.replace(directory / TENSORS)
    replace_file(directory / CONFIG, json.dumps(peft_config(model, config, base), indent=2) + "\n")
    return [directory / CONFIG, directory / TENSORS]


def merge_factors(weight: Tensor, inner: Tensor, outer: Tensor, scale: float) -> Tensor:
    """Return weight + scale B A in the type of the weight, computed in float32 or wider."""
    import torch

    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scale * (outer.to(wide) @ inner.to(wide))).to(weight.dtype)
