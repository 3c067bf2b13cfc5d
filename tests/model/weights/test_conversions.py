"""Weight files of captured classes: as `save_pretrained` writes them, and as `from_pretrained` reads pipefit's."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.models.tiny_configs import tiny_config
from benchmarks.models.weight_files import exported_tensors
from pipefit.errors import ModelError
from pipefit.model.any_class import FIELDS, build_class
from pipefit.model.families.build import USER
from pipefit.model.weights.conversions import TensorGroup, file_tensors
from pipefit.model.weights.files import WeightFiles, save_weights

KINDS = [
    "bert",  # tied weights and biases, written once
    "bigbird_pegasus",
    "camembert",  # the tied name that files hold is not the first of the class
    "deepseek_v4",
    "dory",  # a mapping that the library cannot reverse
    "ernie4_5_moe",
    "fuyu",  # names of the parts of a multimodal class
    "granitemoe",  # a fused tensor of all experts, renamed
    "hrm_text",  # fused projections
    "kimi_linear",  # fused convolutions
    "minimax",  # one tensor per expert, two of them joined
    "nemotron_h",
    "stablelm",  # no conversion
]
"""Types whose files differ from their classes in different ways."""


def random_class(kind: str, **fields: object) -> tuple[torch.nn.Module, dict[str, object]]:
    """Return a tiny class whose tensors all have different values, and the configuration of its user model."""
    config = {**tiny_config(kind, dropout=False), **fields}
    torch.manual_seed(0)
    module = build_class(config)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return module, {FIELDS: config}


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_a_class_are_read(kind, tmp_path):
    module, config = random_class(kind)
    module.save_pretrained(tmp_path)
    with WeightFiles(tmp_path, USER, config) as files:
        for name, parameter in module.named_parameters():
            assert torch.equal(files.read(name, parameter.shape), parameter), name
            box = [(size // 3, size - size // 4) for size in parameter.shape]
            part = parameter[tuple(slice(*edge) for edge in box)]
            assert torch.equal(files.read(name, parameter.shape, box), part), name
        for name, buffer in module.named_buffers():
            if name in module.state_dict():
                assert files.has_tensor(name), name
                assert torch.equal(files.read(name, buffer.shape), buffer), name


@pytest.mark.parametrize("kind", KINDS)
def test_written_files_open_in_the_class(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    module, config = random_class(kind)
    save_weights(tmp_path / "ours", exported_tensors(module), USER, config)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True, dtype="float32")
    assert not any(info.values()), info
    assert again.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in module.state_dict().items())
    module.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("kind", ["stablelm", "gemma3"])
def test_values_are_not_rounded_to_the_type_of_the_first_config(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    module, config = random_class(kind, dtype="bfloat16")
    save_weights(tmp_path, exported_tensors(module), USER, config)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in module.state_dict().items())


def test_a_mapping_without_a_reverse_leaves_the_names_of_the_class(tmp_path):
    from transformers import AutoModelForCausalLM

    module, config = random_class("inkling2_text", unpadded_vocab_size=300)  # padded to 256: save_pretrained fails
    save_weights(tmp_path, exported_tensors(module), USER, config)
    assert set(load_file(tmp_path / "model.safetensors")) == set(module.state_dict())
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in module.state_dict().items())


def test_tensors_are_converted_before_all_have_come(tmp_path):
    module, _ = random_class("minimax")
    taken: list[str] = []

    def export_tensors():
        for name, tensor in exported_tensors(module).items():
            taken.append(name)
            yield name, tensor

    written = file_tensors(module, export_tensors())
    experts = next(name for name, _ in written if ".experts." in name)
    assert experts.split(".experts.")[0].rsplit(".", 1)[0] in taken[-1]
    assert len(taken) < len(exported_tensors(module)) / 2


def test_several_files_have_an_index_of_converted_names(tmp_path):
    module, config = random_class("granitemoe")
    save_weights(tmp_path, exported_tensors(module), USER, config, max_file_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    with WeightFiles(tmp_path, USER, config) as files:
        assert set(files.names) == set(index["weight_map"])
        assert all(torch.equal(files.read(name, p.shape), p) for name, p in module.named_parameters())


def test_files_with_the_names_of_the_class_are_read(tmp_path):
    module, config = random_class("granitemoe")
    save_file({name: p.detach() for name, p in module.named_parameters()}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path, USER, config) as files:
        assert all(torch.equal(files.read(name, p.shape), p) for name, p in module.named_parameters())


def test_files_of_the_inner_model_are_read(tmp_path):
    module, config = random_class("stablelm", tie_word_embeddings=True)
    module.model.save_pretrained(tmp_path)
    with WeightFiles(tmp_path, USER, config) as files:
        assert not any(name.startswith("model.") for name in files.names)
        assert all(torch.equal(files.read(name, p.shape), p) for name, p in module.named_parameters())


def change_files(folder, change) -> None:
    """Change the dictionary of tensors in a folder's file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def read_all(folder, module, config) -> None:
    with WeightFiles(folder, USER, config) as files:
        for name, parameter in module.named_parameters():
            files.read(name, parameter.shape)


def test_different_values_of_a_tied_parameter_are_refused(tmp_path):
    module, config = random_class("stablelm", tie_word_embeddings=True)
    module.save_pretrained(tmp_path)
    change_files(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0}))
    read_all(tmp_path, module, config)
    change_files(tmp_path, lambda tensors: tensors["lm_head.weight"].mul_(2))
    with pytest.raises(ModelError, match="different values of a parameter that this configuration ties") as refusal:
        read_all(tmp_path, module, config)
    assert "lm_head.weight" in str(refusal.value)
    assert "tie_word_embeddings" in str(refusal.value)


def test_quantized_weights_are_refused(tmp_path):
    module, config = random_class("stablelm")
    module.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    change_files(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelError, match="quantized") as refusal:
        read_all(tmp_path, module, config)
    assert f"{name} F8_E4M3" in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "part", "seen"),
    [
        ("kimi_linear", "layers.0.self_attn.v_conv1d.weight", "conv1d"),
        ("minimax", ".experts.3.w2", ".experts.0.w2.weight"),
    ],
)
def test_a_missing_part_of_a_parameter_is_one_error(tmp_path, kind, part, seen):
    module, config = random_class(kind)
    module.save_pretrained(tmp_path)
    change_files(tmp_path, lambda tensors: tensors.pop(next(name for name in tensors if part in name)))
    with pytest.raises(ModelError, match="wrong shape") as refusal:
        read_all(tmp_path, module, config)
    assert seen in str(refusal.value)


def test_a_conversion_that_fails_is_one_error(tmp_path):
    module, config = random_class("kimi_linear")
    module.save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.v_conv1d.weight"
    change_files(tmp_path, lambda tensors: tensors.update({name: torch.zeros(3)}))
    with pytest.raises(ModelError, match="`transformers` cannot convert these tensors") as refusal:
        read_all(tmp_path, module, config)
    assert name in str(refusal.value)


def test_a_parameter_missing_at_writing_is_one_error(tmp_path):
    module, config = random_class("hrm_text")
    tensors = exported_tensors(module)
    del tensors["model.L_module.layers.0.self_attn.v_proj.weight"]
    with pytest.raises(ModelError, match="Parameters that files hold in one tensor are missing") as refusal:
        save_weights(tmp_path, tensors, USER, config)
    assert "model.L_module.layers.0.self_attn.gate_proj.weight" in str(refusal.value)


def test_a_conversion_without_its_parameter_is_one_error(tmp_path, monkeypatch):
    module, config = random_class("hrm_text")
    module.save_pretrained(tmp_path)
    monkeypatch.setattr(TensorGroup, "convert_tensors", lambda group, module, tensors: {"new.name": torch.zeros(2)})
    with pytest.raises(ModelError, match="does not give a parameter of its class") as refusal:
        read_all(tmp_path, module, config)
    assert "new.name from model." in str(refusal.value)


def test_unused_tensors_of_files_are_named(tmp_path):
    module, config = random_class("granitemoe")
    module.save_pretrained(tmp_path)
    further = {"model.layers.2.input_layernorm.weight": torch.ones(32), "model.rotary_emb.inv_freq": torch.ones(4)}
    change_files(tmp_path, lambda tensors: tensors.update(further))
    with WeightFiles(tmp_path, USER, config) as files:
        assert files.unused_names == ("model.layers.2.input_layernorm.weight",)
