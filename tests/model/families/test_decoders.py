"""The model types of `families/decoder/types` against `transformers`: logits, loss and every gradient in float64, and
directories of weights, through the files that both write."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.decoder_variants import DECODER_VARIANTS
from tests.support.library_parity import check_boxes, library_model, same_outputs

from pipefit.errors import ModelError
from pipefit.model.capture.layers import capture_family
from pipefit.model.registry import build_layers, describe_config, typed_config
from pipefit.model.weights.files import layer_tensors, load_layers, save_weights


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def save_gradients_of_theirs(model: Any, folder: Path) -> None:
    """Write every gradient as `transformers` writes the parameter: by its name in files, experts apart."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)


@pytest.mark.parametrize("name", DECODER_VARIANTS)
def test_logits_loss_and_every_gradient_agree_with_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = DECODER_VARIANTS[name]
    described = describe_config(config, name, name)
    theirs = library_model(config)
    with torch.no_grad():  # the initial norms and biases of transformers are ones and zeros
        correction = "e_score_correction_bias"  # a buffer there
        buffers = [buffer for key, buffer in theirs.named_buffers() if key.endswith(correction)]
        for parameter in (*theirs.parameters(), *buffers):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    layers = same_outputs(theirs, config, name, tmp_path / "theirs")

    save_gradients_of_theirs(theirs, tmp_path / "their gradients")
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                assert not parameter.requires_grad or parameter.grad.abs().max() > 0
    gradients = {
        layer.parameter_names[local]: parameter.grad if parameter.requires_grad else parameter
        for layer in layers
        for local, parameter in layer.named_parameters()
    }
    save_weights(tmp_path / "gradients", gradients, described.family, described.config)
    ours, expected = stored(tmp_path / "gradients"), stored(tmp_path / "their gradients")
    assert set(ours) == set(expected)
    for key, gradient in expected.items():
        torch.testing.assert_close(ours[key], gradient, rtol=1e-9, atol=1e-9 * max(gradient.abs().max().item(), 1.0))


@pytest.mark.parametrize("name", DECODER_VARIANTS)
def test_a_directory_is_read_and_written_to_the_last_bit(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    described = describe_config(DECODER_VARIANTS[name], name, name)
    theirs = library_model(DECODER_VARIANTS[name], torch.float32).to(torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    layers = build_layers(described.family, described.config, device="cpu", dtype=torch.float32)
    load_layers(layers, tmp_path / "theirs", described.family, described.config)
    save_weights(tmp_path / "ours", layer_tensors(layers), described.family, described.config)
    ours, expected = stored(tmp_path / "ours"), stored(tmp_path / "theirs")
    assert set(ours) == set(expected)
    assert all(torch.equal(ours[key], tensor) for key, tensor in expected.items())

    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    tokens = torch.randint(0, 61, (2, 11))
    torch.testing.assert_close(again(tokens).logits, theirs.eval()(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DECODER_VARIANTS)
def test_a_configuration_is_read_again_as_written(name: str) -> None:
    described = describe_config(DECODER_VARIANTS[name], name, name)
    typed = typed_config(described.family, described.config)
    assert typed == typed_config(described.family, typed.to_config())
    assert typed.to_config() == described.config


@pytest.mark.parametrize("name", DECODER_VARIANTS)
def test_a_configuration_that_transformers_writes_gives_the_same_options(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    kwargs = {key: value for key, value in deepcopy(DECODER_VARIANTS[name]).items() if key != "model_type"}
    AutoConfig.for_model(DECODER_VARIANTS[name]["model_type"], **kwargs).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    ours, theirs = (describe_config(config, name, name) for config in (DECODER_VARIANTS[name], written))
    assert typed_config(ours.family, ours.config).decoder == typed_config(theirs.family, theirs.config).decoder


@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "falcon-groups", "glm4"])
def test_any_box_of_a_parameter_in_a_fused_tensor_can_be_read(name: str, tmp_path: Path) -> None:
    check_boxes(DECODER_VARIANTS[name], name, tmp_path)


@pytest.mark.parametrize("name", DECODER_VARIANTS)
def test_every_layer_is_captured_as_operators(name: str) -> None:
    described = describe_config(DECODER_VARIANTS[name], name, name)
    model = capture_family(described.family, described.config)
    kinds = {operator.kind for graph in model.graphs.values() for operator in graph.operators}
    assert "opaque" not in kinds and "aten" not in kinds, kinds
    assert ("rotary" in kinds) == (name not in ("opt", "bloom"))
    assert not kinds & {"strided_slice", "cos", "sin"}


REFUSED = [
    ("gemma", {"use_bidirectional_attention": True}, "'use_bidirectional_attention'", "seen: True", "allowed: False"),
    ("phi3", {"rope_scaling": {"type": "longrope"}}, "rotary scaling is unknown", "seen: 'longrope'", "llama3, yarn"),
    ("olmo2", {"partial_rotary_factor": 0.5}, "rotary positions in part", "partial_rotary_factor 0.5", "allowed: 1"),
    ("granite", {"logits_scaling": 0.0}, "'logits_scaling'", "seen: 0.0", "a number above zero"),
    ("granite", {"num_attention_heads": 5, "num_key_value_heads": 5}, "no multiple", "hidden_size 48", "head_dim"),
    ("cohere2", {"use_qk_norm": True}, "'use_qk_norm'", "seen: True", "allowed: False"),
    (
        "cohere2",
        {"layer_types": ["chunked"] * 4},
        "'layer_types'",
        "chunked",
        "4 of sliding_attention and full_attention",
    ),
    ("smollm3", {"no_rope_layers": [0, 2]}, "'no_rope_layers'", "[0, 2]", "2 numbers"),
    ("starcoder2", {"hidden_act": "mish"}, "'hidden_act'", "'mish'", "silu, swish, gelu"),
    ("gpt_neox", {"num_key_value_heads": 2}, "no grouped heads", "num_key_value_heads 2", "num_attention_heads, 6"),
    ("falcon", {"hidden_dropout": 0.1}, "'hidden_dropout'", "seen: 0.1", "allowed: 0.0"),
    ("opt", {"do_layer_norm_before": False}, "'do_layer_norm_before'", "seen: False", "allowed: True"),
    ("opt", {"word_embed_proj_dim": 16}, "'word_embed_proj_dim'", "seen: 16", "allowed: 48"),
    ("gemma2", {"use_bidirectional_attention": True}, "'use_bidirectional_attention'", "seen: True", "allowed: False"),
    (
        "gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "'rope_parameters.sliding_attention'", "linear", "rope_type default",
    ),
    ("opt", {"activation_function": "mish"}, "'activation_function'", "'mish'", "silu, swish, gelu"),
    ("falcon", {"activation": "mish"}, "'activation'", "'mish'", "silu, swish, gelu"),
    ("gemma2", {"hidden_activation": "mish"}, "'hidden_activation'", "'mish'", "silu, swish, gelu"),
    ("deepseek_v3", {"qk_rope_head_dim": 5}, "pairs of features", "5 features", "an even number"),
    (
        "deepseek_v3", {"n_routed_experts": 8, "n_group": 8, "topk_group": 1},
        "are too small", "n_group 8", "groups of at least 2",
    ),
    ("gpt_oss", {"hidden_act": "gelu"}, "'hidden_act'", "seen: 'gelu'", "allowed: 'silu'"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "'scoring_func'", "seen: 'softmax'", "allowed: 'sigmoid'"),
    ("deepseek_v3", {"n_group": 4}, "do not divide the experts", "experts 6, n_group 4", "divides the experts"),
    ("deepseek_v3", {"v_head_dim": 12}, "more features than keys", "v_head_dim 12", "at most as many"),
    ("deepseek_v2", {"norm_topk_prob": True}, "'norm_topk_prob'", "seen: True", "allowed: False"),
    ("glm4_moe", {"moe_layer_freq": 2}, "'moe_layer_freq'", "seen: 2", "allowed: 1"),
    (
        "bloom", {"apply_residual_connection_post_layernorm": True}, "'apply_residual_connection_post_layernorm'",
        "seen: True", "allowed: False",
    ),
    ("qwen2_moe", {"num_experts_per_tok": 9}, "More experts", "num_experts_per_tok 9, experts 6", "at most as many"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "parts"), [(name, change, parts) for name, change, *parts in REFUSED])
def test_an_unsupported_field_is_refused_by_name(name: str, change: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ModelError) as refusal:
        describe_config(DECODER_VARIANTS[name] | change, name, "config.json")
    assert all(part in str(refusal.value) for part in parts), str(refusal.value)


def test_dropout_of_attention_is_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="attention_dropout is ignored"):
        describe_config(DECODER_VARIANTS["phi3"] | {"attention_dropout": 0.1}, "phi3", "config.json")


def test_a_fused_tensor_is_saved_with_all_of_its_parameters(tmp_path: Path) -> None:
    described = describe_config(DECODER_VARIANTS["phi3"], "phi3", "phi3")
    tensors = layer_tensors(build_layers(described.family, described.config, device="cpu"))
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ModelError, match="Parameters that files hold in one tensor are missing") as refusal:
        save_weights(tmp_path, tensors, described.family, described.config)
    assert "model.layers.1.self_attn.qkv_proj.weight" in str(refusal.value)
