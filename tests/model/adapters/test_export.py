"""Adapters in PEFT's files, and merged into a model: both give the logits of PEFT's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import adapter_cases as adapters
from tests.support import worker_plans as plans
from tests.support.decoder_variants import DECODER_VARIANTS
from tests.support.in_float64 import AllInFloat64

from pipefit.model.adapters.adapt import FACTOR_A, FACTOR_B
from pipefit.model.adapters.options import AdapterConfig
from pipefit.model.adapters.peft import adapter_pairs, adapter_tensors
from pipefit.model.weights.files import WeightFiles, save_weights
from pipefit.model.weights.peft import merge_factors, save_adapter

CONFIGS: dict[str, dict[str, Any]] = {"llama": plans.LLAMA, "gpt2": plans.GPT2, **DECODER_VARIANTS}
NAMES = ("llama", "gpt2", "phi3", "gpt_neox", "qwen2_moe")


@pytest.mark.parametrize("name", NAMES)
def test_peft_reads_the_adapters_and_the_merged_model_equals_them(name: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    options = AdapterConfig(rank=3, alpha=4.5, rslora=name == "llama")
    model = adapters.adapted_model(CONFIGS[name], options)
    shapes = {
        layer.parameters[spec.name]: spec.shape
        for layer in model.layers
        for spec in model.layer_graph(layer).parameters
    }
    base = tmp_path / "base"
    theirs = adapters.library_model(CONFIGS[name])
    theirs.save_pretrained(base)
    torch.manual_seed(3)
    factors = {key: torch.randn(shapes[key], dtype=torch.float64) * 0.3 for key in adapter_tensors(model)}
    assert {key.rpartition("lora_")[2] for key in factors} == {"A.weight", "B.weight"} and FACTOR_A != FACTOR_B
    save_adapter(tmp_path / "adapter", factors.items(), model, options, str(base))

    files, pairs = WeightFiles(base, model.family, model.config), adapter_pairs(model)
    merged = {}
    for key in shapes.keys() - factors.keys():
        weight = files.read(key, shapes[key])
        pair = [factors[factor] for factor in pairs.get(key, ())]
        merged[key] = merge_factors(weight, *pair, options.scale) if pair else weight
    save_weights(tmp_path / "merged", merged, model.family, model.config)

    tokens = torch.randint(0, 61, (2, 9))
    with AllInFloat64():
        plain = theirs.eval()(tokens).logits
        adapted = PeftModel.from_pretrained(theirs, tmp_path / "adapter", autocast_adapter_dtype=False).eval()
        logits = adapted(tokens).logits
        again = AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        merged_logits = again.eval()(tokens).logits
    assert (logits - plain).abs().max() > 1e-3, "the adapters change the model"
    torch.testing.assert_close(logits, merged_logits, rtol=1e-9, atol=1e-9)
    assert {*adapters.peft_tensors(adapted)} == {block.name for block in adapter_tensors(model).values()}
