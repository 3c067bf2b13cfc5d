"""Names and configuration of adapters in the files of PEFT (https://github.com/huggingface/peft)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipefit.model.adapters.options import ALL_LINEAR, AdapterConfig
from pipefit.model.adapters.targets import FACTOR_A, FACTOR_B, WEIGHT, StoredWeights, find_linear_modules
from pipefit.model.any_class import FIELDS
from pipefit.model.families import FAMILIES, WeightTensor
from pipefit.model.graph import Model

PREFIX = "base_model.model."
"""The prefix of PEFT before the module paths of the base model."""


def adapter_pairs(model: Model) -> dict[str, tuple[str, str]]:
    """Return the global name of every adapted weight -> the names of its factors A and B."""
    stored = StoredWeights(model)
    pairs = {}
    for layer in model.layers:
        names = set(layer.parameters.values())
        for outer in names:
            if outer.endswith(FACTOR_B):
                weight = outer.removesuffix(FACTOR_B) + WEIGHT
                inner = outer.removesuffix(FACTOR_B) + FACTOR_A
                if inner not in names:  # shared by the parts of a fused module
                    leaf = _module_path(stored, weight).rpartition(".")[2]
                    inner = f"{weight.rsplit('.', 2)[0]}.{leaf}{FACTOR_A}"
                pairs[weight] = (inner, outer)
    return pairs


def adapter_tensors(model: Model) -> dict[str, WeightTensor]:
    """Return the tensor of PEFT's file for every parameter of an adapter. The rows of B are those of the weight: of a
    fused module, or ordered as in the files."""
    stored = StoredWeights(model)
    tensors = {}
    for weight, (inner, outer) in adapter_pairs(model).items():
        block, path = stored.find_tensors(weight)[0], PREFIX + _module_path(stored, weight)
        tensors[inner] = WeightTensor(path + FACTOR_A)
        tensors[outer] = WeightTensor(path + FACTOR_B, heads=block.heads, rows=block.rows)
    return tensors


def peft_config(model: Model, config: AdapterConfig, base: str) -> dict[str, Any]:
    """Return the data of `adapter_config.json`. `base` names the base model, as `from_pretrained` takes it."""
    stored = StoredWeights(model)
    is_language_model = model.family in FAMILIES or FIELDS in model.config
    transposed = {stored.find_tensors(weight)[0].transposed for weight in adapter_pairs(model)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_language_model else None,
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": _target_modules(model, config),
        "fan_in_fan_out": True in transposed,
        "bias": "none",
        "use_rslora": config.rslora,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _target_modules(model: Model, config: AdapterConfig) -> list[str]:
    """Return names of modules that select exactly the adapted ones: the last parts of their paths, or full paths."""
    if config.targets != (ALL_LINEAR,):
        return list(config.targets)
    stored = StoredWeights(model)
    return select_modules(model, {_module_path(stored, weight) for weight in adapter_pairs(model)})


def select_modules(model: Model, adapted: Collection[str]) -> list[str]:
    """Return names that select the linear modules of these paths and no others: the last parts of the paths, or the
    paths themselves if another module ends alike."""
    leaves = {path.rpartition(".")[2] for path in adapted}
    further = {module.leaf for module in find_linear_modules(model) if module.path not in adapted}
    return sorted(adapted if leaves & further else leaves)


def _module_path(stored: StoredWeights, weight: str) -> str:
    return stored.find_tensors(weight)[0].name.removesuffix(WEIGHT)
