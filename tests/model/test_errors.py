"""Every mistake a user can make with a model or its weights, by the text of its message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.variants import VARIANTS

from pipefit.errors import FormatError, ModelError
from pipefit.model.capture.layers import capture_layers
from pipefit.model.registry import build_layers, describe_config, open_model, resolve_model, typed_config
from pipefit.model.weights.files import INDEX, WeightFiles, layer_tensors, load_layers, save_weights

LLAMA = VARIANTS["llama2"]


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as error:
        describe_config(config, "config.json", "config.json")
    return str(error.value)


def test_an_unknown_model_type_lists_the_known_ones() -> None:
    text = refused({**LLAMA, "model_type": "no_such_type"})
    assert "The model type is not known." in text and "'no_such_type'" in text
    for known in ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt2"):
        assert known in text
    assert "FILE.py:FUNCTION" in text


def test_a_missing_model_type() -> None:
    assert "lacks the field 'model_type'" in refused({"hidden_size": 8})


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
def test_a_missing_field_is_named(field: str) -> None:
    text = refused({key: value for key, value in LLAMA.items() if key != field})
    assert f"lacks the field '{field}'" in text and "config.json" in text


@pytest.mark.parametrize(
    "change,parts",
    [
        ({"num_key_value_heads": 4}, ["no multiple of the key/value heads", "num_attention_heads 6"]),
        ({"hidden_size": 50}, ["no multiple of the attention heads", "hidden_size 50", "head_dim"]),
        ({"hidden_size": -48}, ["'hidden_size'", "-48", "a positive integer"]),
        ({"hidden_size": 48.5}, ["'hidden_size'", "48.5", "a positive integer"]),
        ({"rms_norm_eps": "small"}, ["'rms_norm_eps'", "'small'", "a number"]),
        ({"tie_word_embeddings": "yes"}, ["'tie_word_embeddings'", "'yes'", "true or false"]),
        ({"hidden_act": "mish"}, ["'hidden_act'", "'mish'", "silu, swish, gelu"]),
        ({"rope_parameters": {"rope_theta": 5.0}}, ["two values of rope_theta", "10000.0", "5.0"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rotary scaling is unknown", "'longrope'", "llama3, yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rotary scaling needs the field 'factor'"]),
    ],
)
def test_wrong_and_contradictory_fields(change: dict[str, Any], parts: list[str]) -> None:
    text = refused({**LLAMA, **change})
    for part in parts:
        assert part in text, text


def test_more_experts_per_token_than_experts() -> None:
    text = refused({**VARIANTS["mixtral"], "num_experts_per_tok": 9})
    assert "More experts per token" in text and "experts 4" in text


def test_layer_types_of_another_length() -> None:
    text = refused({**VARIANTS["qwen2-window"], "layer_types": ["full_attention"]})
    assert "layer_types has another length" in text and "1 types, 2 layers" in text


def test_gpt2_heads_that_do_not_divide() -> None:
    assert "n_embd 48, n_head 5" in refused({**VARIANTS["gpt2"], "n_head": 5})


def test_dropout_of_attention_is_said_to_be_left_out() -> None:
    with pytest.warns(UserWarning, match="attn_pdrop is ignored"):
        describe_config({**VARIANTS["gpt2"], "attn_pdrop": 0.1}, "gpt2", "gpt2")
    with pytest.warns(UserWarning, match="attention_dropout is ignored"):
        describe_config({**LLAMA, "attention_dropout": 0.1}, "llama", "llama")


def test_spellings_of_transformers_4_and_5_give_one_configuration() -> None:
    scaling = VARIANTS["llama3"]["rope_scaling"]
    old = describe_config({**VARIANTS["llama3"], "torch_dtype": "bfloat16"}, "a", "a").config
    new = {key: value for key, value in VARIANTS["llama3"].items() if key not in ("rope_theta", "rope_scaling")}
    new = describe_config(
        {**new, "dtype": "bfloat16", "rope_parameters": {**scaling, "rope_theta": 500000.0}}, "b", "b"
    ).config
    assert old == new and old["rope_scaling"] == scaling


def test_an_unknown_name_suggests_a_near_one() -> None:
    with pytest.raises(ModelError) as error:
        resolve_model("llama-3-80b")
    assert "did you mean 'llama-3-" in str(error.value) and "gpt2-xl" in str(error.value)


def test_an_unknown_family() -> None:
    with pytest.raises(ModelError, match="family is not known") as error:
        typed_config("bert", {})
    assert "gpt2, llama" in str(error.value)


def test_directories_and_files_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama",')
    with pytest.raises(FormatError, match="not valid JSON") as error:
        resolve_model(str(tmp_path))
    assert "line 1" in str(error.value)
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(FormatError, match="not a configuration"):
        resolve_model(str(tmp_path / "list.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="cannot be read"):
        resolve_model(str(tmp_path / "binary.json"))


def test_a_config_file_and_a_directory_describe_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    a, b = resolve_model(str(tmp_path)), resolve_model(str(tmp_path / "config.json"))
    assert (a.family, a.config) == (b.family, b.config)


def test_a_cut_saved_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"graphs": {}, "modules": [], "family": "llama"}')
    with pytest.raises(FormatError, match="'config' is missing"):
        open_model(str(tmp_path / "model.json"))


def test_two_layers_of_one_name() -> None:
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    layers[1].layer_name = "layers.0"  # type: ignore[assignment]
    with pytest.raises(ModelError, match="Two layers have the same name") as error:
        capture_layers(layers, x_features=2)
    assert "layers.0" in str(error.value)


# -- weights --


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    described = describe_config(LLAMA, "llama", "llama")
    layers = build_layers("llama", described.config, device="cpu")
    save_weights(tmp_path, layer_tensors(layers), "llama", described.config)
    return tmp_path


def load(source: Path) -> str:
    described = describe_config(LLAMA, "llama", "llama")
    with pytest.raises(ModelError) as error:
        load_layers(build_layers("llama", described.config, device="cpu"), source, "llama", described.config)
    return str(error.value)


def change(source: Path, change: Any) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")


def test_a_missing_tensor_is_named(saved: Path) -> None:
    change(saved, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    text = load(saved)
    assert "lack the tensor 'model.layers.1.mlp.up_proj.weight'" in text
    assert "the nearest 'model.layers.0.mlp.up_proj.weight'" in text and str(saved) in text


def test_a_tensor_of_a_wrong_shape_is_named(saved: Path) -> None:
    change(saved, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}))
    text = load(saved)
    assert "'model.norm.weight' of the weights has a wrong shape" in text and "[47]" in text and "[48]" in text


def test_a_missing_expert_names_the_parameter_it_is_part_of(tmp_path: Path) -> None:
    described = describe_config(VARIANTS["mixtral"], "mixtral", "mixtral")
    layers = build_layers(described.family, described.config, device="cpu")
    save_weights(tmp_path, layer_tensors(layers), described.family, described.config)
    name = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
    change(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError) as error:
        load_layers(layers, tmp_path, described.family, described.config)
    assert f"lack the tensor '{name}' (part of model.layers.0.mlp.experts.gate_up_proj)" in str(error.value)


def test_no_weights_at_all(tmp_path: Path) -> None:
    assert "There are no weights here." in load(tmp_path)


def test_a_damaged_file(saved: Path) -> None:
    data = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "damaged or no safetensors file" in load(saved)


def test_an_index_that_names_absent_files(saved: Path) -> None:
    (saved / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert "Files of the weights are missing." in load(saved)
    (saved / INDEX).write_text("{")
    assert "index of the weights cannot be read" in load(saved)


def test_a_failed_save_leaves_the_old_weights(saved: Path) -> None:
    described = describe_config(LLAMA, "llama", "llama")
    before = (saved / "model.safetensors").read_bytes()

    def failing() -> Any:
        yield "model.norm.weight", torch.zeros(48)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        save_weights(saved, failing(), "llama", described.config)
    assert (saved / "model.safetensors").read_bytes() == before
    with WeightFiles(saved, "llama", described.config) as files:
        assert "lm_head.weight" in files.names
