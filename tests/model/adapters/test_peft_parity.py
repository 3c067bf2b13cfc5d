"""Adapters in our graphs equal PEFT's on the classes of `transformers`: loss and every gradient, in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support import adapter_cases as adapters
from tests.support import worker_plans as plans
from tests.support.decoder_variants import DECODER_VARIANTS

from pipefit.model.adapters.options import AdapterConfig
from pipefit.model.adapters.peft import adapter_tensors, peft_config

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": plans.LLAMA, "gpt2": plans.GPT2, "qwen3-moe": plans.QWEN3_MOE, **DECODER_VARIANTS,
}  # fmt: skip
QUICK = ("llama", "gpt2", "phi3", "gpt_neox", "glm4")
"""Plain layers, transposed ones ordered by heads, and three kinds of fused projections."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS]
)
def test_loss_and_gradients_are_those_of_peft(name: str, tmp_path: Path) -> None:
    options = AdapterConfig(rank=3, alpha=5.0)
    model = adapters.adapted_model(CONFIGS[name], options)
    has_experts = any(len(spec.shape) == 3 for graph in model.graphs.values() for spec in graph.parameters)
    names = peft_config(model, options, "")["target_modules"] if has_experts else options.targets
    theirs = adapters.peft_model(CONFIGS[name], replace(options, targets=tuple(names)), tmp_path / "base")
    vocabulary = int(CONFIGS[name].get("vocab_size", 96))
    plan = adapters.plan_of(model, microbatches=2)
    values = adapters.adapter_files(adapters.peft_tensors(theirs), model, tmp_path / "values.safetensors")
    assert {*values.names} == {tensor.name for tensor in adapter_tensors(model).values()}, "the same modules"
    loss, gradients = adapters.one_step(plan, model, tmp_path / "base", values, vocabulary)
    assert loss == pytest.approx(adapters.peft_step(theirs, plan, vocabulary), rel=1e-10)
    wanted = adapters.adapter_files(adapters.peft_tensors(theirs, True), model, tmp_path / "gradients.safetensors")
    assert {*gradients} == {*adapter_tensors(model)}, "gradients of adapters, and of nothing else"
    for key, gradient in gradients.items():
        expected = wanted.read(key, gradient.shape)
        assert (gradient - expected).abs().max() <= 1e-9 * max(float(expected.abs().max()), 1e-3), key
