"""Adapters in the files of PEFT: reading and writing `adapter_config.json` and `adapter_model.safetensors`, and
merging into weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipefit.errors import ModelError
from pipefit.model.adapters.options import AdapterConfig
from pipefit.model.adapters.peft import PREFIX, adapter_tensors, peft_config, select_modules
from pipefit.model.families import WeightTensor
from pipefit.model.graph import Model
from pipefit.model.weights.files import JoinedTensors, WeightFiles, replace_file, stored_piece

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter, as `PeftModel.from_pretrained` reads them."""


_OTHER_KINDS = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "alora_invocation_tokens": "activated LoRA",
    "rank_pattern": "ranks by module",
    "alpha_pattern": "alphas by module",
    "lora_bias": "biases of adapters",
    "modules_to_save": "complete modules",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "adapters of parameters",
    "layer_replication": "repeated layers",
}
"""Fields of `adapter_config.json` that the runtime does not compute, in words."""

_PLAIN_STARTS = ("True", "False", "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model as it is; the others subtract the first adapters from it."""


class AdapterNames:
    """The names of a model's adapters in the files of PEFT, for `WeightFiles`."""

    def __init__(self, model: Model) -> None:
        self._tensors = adapter_tensors(model)

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        """Return the tensor of PEFT's file that holds a parameter of an adapter."""
        return (self._tensors[name],)


def open_adapter(directory: Path, model: Model, config: AdapterConfig) -> WeightFiles:
    """Open the adapters in a directory of PEFT under the names of the model's parameters.

    Raises ModelError if its files are missing, or if the adapters have other sizes, scales or modules than the plan's.
    """
    for name in (CONFIG, TENSORS):
        if not (directory / name).is_file():
            raise ModelError(
                "There are no adapters here.",
                where=str(directory),
                seen=f"no {name}",
                allowed=f"{CONFIG} and {TENSORS}, as PEFT's save_pretrained writes them",
            )
    try:
        fields = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        _check_fields(fields, config, directory / CONFIG)
    except (ValueError, AttributeError) as error:
        raise ModelError("The adapters' options cannot be read.", where=str(directory / CONFIG), seen=error) from None
    files = WeightFiles(directory / TENSORS, model.family, model.config, AdapterNames(model))
    planned, stored = {tensor.name for tensor in adapter_tensors(model).values()}, set(files.names)
    if planned != stored:
        unknown, missing = sorted(stored - planned), sorted(planned - stored)
        paths = {name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for name in stored}
        raise ModelError(
            "The adapters belong to other modules than the plan's.",
            where=str(directory / TENSORS),
            seen=f"without a use: {', '.join(unknown[:2]) or 'none'}; missing: {', '.join(missing[:2]) or 'none'}",
            allowed=f"the {len(planned)} tensors of the plan's adapters",
            next_step=f"plan with --lora-targets {','.join(select_modules(model, paths))}",
        )
    return files


def _check_fields(fields: Mapping[str, Any], config: AdapterConfig, path: Path) -> None:
    """Raise ModelError if the adapters are of a kind that the runtime lacks, or differ from the plan's."""
    further = [words for name, words in _OTHER_KINDS.items() if fields.get(name)]
    if fields.get("bias", "none") != "none":
        further.append(f"bias {fields['bias']!r}")
    if str(fields.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        further.append(f"init_lora_weights {fields['init_lora_weights']!r}, which changes the base model")
    if fields.get("peft_type", "LORA") != "LORA" or further:
        raise ModelError(
            "These adapters are of a kind that pipefit does not train.",
            where=str(path),
            seen=", ".join([str(fields.get("peft_type", "LORA")), *further]),
            allowed="LoRA with one rank and one alpha, on an unchanged base model",
            next_step="merge them with PEFT's merge_and_unload(), and give the result as --weights",
        )
    planned = {"r": config.rank, "lora_alpha": config.alpha, "use_rslora": config.rslora}
    stored = {name: fields.get(name, False if name == "use_rslora" else None) for name in planned}
    if planned != stored:
        options = f"--lora {stored['r']} --lora-alpha {stored['lora_alpha']}"
        raise ModelError(
            "The adapters have another scale or rank than the plan's.",
            where=str(path),
            seen=", ".join(f"{name} {value}" for name, value in stored.items()),
            allowed=", ".join(f"{name} {value}" for name, value in planned.items()),
            next_step=f"plan with {options}{' --rslora' if stored['use_rslora'] else ''}",
        )


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
