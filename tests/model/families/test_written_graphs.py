"""Graphs that are written without torch against those that capture makes of the layers, and commands without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.support.decoder_variants import DECODER_VARIANTS
from tests.support.published_models import PUBLISHED_MODELS

from pipefit.errors import ModelError
from pipefit.extras import is_installed, missing_package
from pipefit.model.capture.layers import capture_family
from pipefit.model.families import FAMILIES
from pipefit.model.families.build import write_family
from pipefit.model.graph import Model, Operator
from pipefit.model.registry import builtin_names, describe_config, resolve_model

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 256,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    **DECODER_VARIANTS,
    "gpt2": GPT2,
    "gpt2-dropout": GPT2 | {"resid_pdrop": 0.1, "embd_pdrop": 0.2},
    "gpt2-untied": GPT2 | {"tie_word_embeddings": False, "activation_function": "relu"},
    "gpt2-scaled": GPT2 | {"scale_attn_by_inverse_layer_idx": True},
    "gpt_neox-dropout": DECODER_VARIANTS["gpt_neox"] | {"hidden_dropout": 0.1},
}

CAPTURED = (
    "bloom-176b", "command-r-plus", "deepseek-v2-lite", "deepseek-v3", "falcon-180b", "gpt-neox-20b", "gemma-2-27b",
    "glm-4-32b", "glm-4.5-air", "gpt-oss-120b", "gpt2-xl", "granite-3-8b", "llama-3-70b", "llama-3.2-1b", "minimax-m2",
    "mistral-7b", "mixtral-8x7b", "olmo-2-32b", "opt-30b", "phi-4", "qwen2-7b", "qwen3-30b-a3b", "qwen3-8b",
    "smollm3-3b", "starcoder2-15b", "tiny-gpt2", "tiny-qwen3-moe", "google/gemma-2b",
    "CohereForAI/c4ai-command-r-v01", "CohereForAI/c4ai-command-r7b-12-2024", "tiiuae/falcon-7b",
    "Qwen/Qwen1.5-MoE-A2.7B", "google/gemma-3-1b-pt", "deepseek-ai/DeepSeek-V2", "zai-org/GLM-4.5",
    "microsoft/Phi-3-mini-4k-instruct", "google/gemma-3-27b-pt",
)  # fmt: skip
"""Built-in and published models, at least one of every form: the others of a form differ in sizes only."""

WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors", "transformers", "tokenizers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
sys.meta_path.insert(0, Missing())
from pipefit.cli import main
sys.argv = ["pipefit", *sys.argv[1:]]
main()
"""
"""The command line where these packages are not installed."""


def pipefit_without(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PIPEFIT_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *words], capture_output=True, text=True, timeout=200, env=environment
    )


def same_model(family: str, config: Any) -> None:
    """Assert that both models of a configuration are equal to the last character."""
    captured, written = capture_family(family, config), write_family(family, config)
    assert written.hash == captured.hash and written == captured


@pytest.mark.every_parameter
@pytest.mark.parametrize("name", VARIANTS)
def test_written_graphs_are_the_captured_ones(name: str) -> None:
    described = describe_config(VARIANTS[name], name, name)
    same_model(described.family, described.config)


def test_dropout_follows_the_embedding_and_both_branches() -> None:
    described = describe_config(VARIANTS["gpt_neox-dropout"], "gpt_neox", "here")
    model = capture_family(described.family, described.config)
    counts = [[op.kind for op in model.layer_graph(layer).operators].count("dropout") for layer in model.layers[:2]]
    assert counts == [1, 2]


def open_config(name: str) -> Any:
    """The family and the configuration of a built-in name or of a published model."""
    if name in PUBLISHED_MODELS:
        return describe_config(PUBLISHED_MODELS[name]["config"], name, name)
    return resolve_model(name)


def graph_forms(model: Model) -> frozenset[Any]:
    """The operators of every graph with their attributes, without sizes: models of equal forms differ in sizes only."""
    return frozenset(tuple(_operator_form(operator) for operator in graph.operators) for graph in model.graphs.values())


def _operator_form(operator: Operator) -> tuple[Any, ...]:
    attributes = sorted(operator.attributes.items())
    return operator.kind, *((key, value if isinstance(value, str | bool) else type(value)) for key, value in attributes)


def test_a_model_of_every_form_is_captured() -> None:
    named = [name for name in (*builtin_names(), *PUBLISHED_MODELS) if open_config(name).family != "multimodal"]
    forms = {name: graph_forms(write_family(*_family_of(name))) for name in named}
    assert len(named) > 80 and {forms[name] for name in CAPTURED} == set(forms.values())


def _family_of(name: str) -> tuple[str, Any]:
    described = open_config(name)
    return described.family, described.config


@pytest.mark.every_parameter
@pytest.mark.parametrize("name", CAPTURED)
def test_models_are_written_as_captured(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_model(*_family_of(name))


def test_every_family_of_language_models_can_be_written() -> None:
    assert {name for name, family in FAMILIES.items() if not family.graphs} == {"multimodal"}


def test_models_that_need_torch_are_answered_without_it() -> None:
    for family in ("multimodal", "user"):
        with pytest.raises(
            ModelError, match=r"captured by PyTorch[\s\S]*deepseek_v3[\s\S]*pip install 'pipefit\[run\]'"
        ):
            write_family(family, resolve_model("multimodal-tiny").config if family == "multimodal" else {"source": "a"})


def test_plans_are_made_without_torch(tmp_path: Path) -> None:
    from pipefit.plan.check.rules import load_plan

    config, plan = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps(DECODER_VARIANTS["gemma2"] | {"vocab_size": 256}))
    request = ("--cluster", "2xH100", "--batch", "8", "--seq", "64", "--quiet", "-o", str(plan))
    done = pipefit_without(tmp_path, "plan", "--model", str(config), *request)
    assert done.returncode == 0, done.stderr
    described = resolve_model(str(config))
    assert load_plan(plan).hashes.model == capture_family(described.family, described.config).hash
    for words in (("simulate", str(plan)), ("report", str(plan), "-o", str(tmp_path / "report.html"))):
        done = pipefit_without(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    done = pipefit_without(tmp_path, "train", str(plan), "--steps", "1", "-o", str(tmp_path / "run"))
    assert done.returncode == 2
    assert done.stderr.startswith("pipefit: This needs PyTorch, which is not installed.")
    assert "pip install 'pipefit[run]'" in done.stderr and len(done.stderr.splitlines()) <= 4


def test_only_optional_packages_are_answered() -> None:
    assert missing_package(ModuleNotFoundError("no", name="numpy")) is None
    answered = missing_package(ModuleNotFoundError("no", name="PIL.Image"))
    assert answered is not None and "pipefit[images]" in answered.full_text()
    assert is_installed("torch") and not is_installed("no_such_module_here")
