"""Our families against `transformers`: logits and every gradient, float64, weights exchanged through files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.library_parity import check_boxes, library_model, same_outputs
from tests.support.variants import VARIANTS

from pipefit.model.families import InitialValue
from pipefit.model.families.finish import initialize_parameters
from pipefit.model.registry import build_layers, describe_config
from pipefit.model.weights.files import WeightFiles, layer_tensors, load_layers, save_weights


def as_ours(key: str, theirs: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """A tensor of transformers' as ours: Conv1D weights transposed, fused projections with their rows head by head."""
    if key.startswith("transformer.h.") and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        theirs = theirs.t()
    if ".c_attn." not in key:
        return theirs
    heads = config["n_head"]
    size = len(theirs) // (3 * heads)
    rows = [(part * heads + head) * size for head in range(heads) for part in range(3)]
    return torch.cat([theirs[row : row + size] for row in rows])


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_every_gradient_agree_with_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = library_model(VARIANTS[name])
    layers = same_outputs(theirs, VARIANTS[name], name, tmp_path / "theirs")
    their_gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    compared = 0
    for layer in layers:
        for local, parameter in layer.named_parameters():
            gradient, theirs_gradient = parameter.grad, their_gradients[layer.parameter_names[local]]
            theirs_gradient = as_ours(layer.parameter_names[local], theirs_gradient, VARIANTS[name])
            assert gradient.abs().max() > 0, local
            scale = theirs_gradient.abs().max().item()
            torch.testing.assert_close(gradient, theirs_gradient, rtol=1e-9, atol=1e-9 * max(scale, 1.0))
            compared += 1
    assert set(layer_tensors(layers)) == set(their_gradients)
    assert compared >= len(their_gradients)


SEVERAL_FILES = [(name, 20_000) for name in ("llama-tied", "mixtral", "gpt2")]


@pytest.mark.parametrize("name,max_file_bytes", [*((name, 10**9) for name in VARIANTS), *SEVERAL_FILES])
def test_transformers_reads_what_we_save(name: str, max_file_bytes: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    described = describe_config(VARIANTS[name], name, name)
    layers = build_layers(described.family, described.config, device="cpu", dtype=torch.float32)
    paths = save_weights(tmp_path, layer_tensors(layers), described.family, described.config, max_file_bytes)
    assert (tmp_path / "model.safetensors.index.json" in paths) == (max_file_bytes == 20_000)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    theirs_state = dict(theirs.named_parameters())
    for key, tensor in layer_tensors(layers).items():
        assert torch.equal(tensor, as_ours(key, theirs_state[key].detach(), VARIANTS[name])), key
    again = build_layers(described.family, described.config, device="cpu", dtype=torch.float32)
    load_layers(again, tmp_path, described.family, described.config)
    for key, tensor in layer_tensors(again).items():
        assert torch.equal(tensor, layer_tensors(layers)[key]), key


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "llama2"])
def test_any_box_of_a_parameter_can_be_read(name: str, tmp_path: Path) -> None:
    check_boxes(VARIANTS[name], name, tmp_path)


def test_files_of_the_bare_model_without_prefix_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    described = describe_config(VARIANTS["gpt2"], "gpt2", "gpt2")
    layers = build_layers(described.family, described.config, device="cpu")
    tensors = layer_tensors(layers)
    save_weights(tmp_path, tensors, described.family, described.config)
    stored = load_file(tmp_path / "model.safetensors")
    plain = {key.removeprefix("transformer."): tensor for key, tensor in stored.items()}
    save_file(plain, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path, described.family, described.config) as files:
        for key, tensor in tensors.items():
            assert torch.equal(files.read(key, tensor.shape), tensor)


def test_files_with_fused_experts_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    described = describe_config(VARIANTS["mixtral"], "mixtral", "mixtral")
    layers = build_layers(described.family, described.config, device="cpu")
    tensors = layer_tensors(layers)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path, described.family, described.config) as files:
        for key in tensors:
            if "experts" in key:
                assert torch.equal(files.read(key, tensors[key].shape), tensors[key])


def test_initial_values_are_fixed_or_drawn_by_their_kind() -> None:
    layer = torch.nn.Linear(200, 100)
    layer.parameter_names = {"weight": "w", "bias": "b"}
    kinds = {"w": InitialValue("uniform", 0.5), "b": InitialValue("constant", number=0.1)}
    initialize_parameters([layer], kinds.__getitem__)
    assert torch.equal(layer.bias, torch.full((100,), 0.1))
    assert float(layer.weight.std()) == pytest.approx(0.5, rel=0.02) and float(layer.weight.abs().max()) < 0.87
