"""Fields of vision-language configurations: sizes of published models, defaults, frozen parts, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.vision_language import (
    CLIP,
    GEMMA3,
    INTERNVIT,
    MODELS,
    QWEN2_VISION,
    QWEN3_VISION,
    QWEN_VISION,
    SIGLIP,
    TEXT,
    VISION,
)  # fmt: skip

from pipefit.data.multimodal.fits import sample_requirements
from pipefit.errors import ModelError, UnsupportedModelError
from pipefit.model.capture.layers import capture_family
from pipefit.model.registry import build_layers, describe_config, resolve_model, typed_config

PUBLISHED: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "support" / "published_vision_language.json").read_text(encoding="utf-8")
)
"""The fields of config.json that shapes depend on, by the id on huggingface.co."""

BEHIND = ("post_layernorm", "encoder.layers.23.")
"""Parameters of a CLIP behind its features in a LLaVA, which are not part of the model."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_parameters_of_its_class(name: str) -> None:
    import transformers

    fields = dict(PUBLISHED[name])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(config)
    clip = fields["vision_config"].get("model_type") == "clip_vision_model"
    named = {id(parameter): (key, parameter.numel()) for key, parameter in theirs.named_parameters()}
    expected = sum(size for key, size in named.values() if not (clip and any(part in key for part in BEHIND)))
    described = describe_config(PUBLISHED[name], name, name)
    ours = {
        layer.parameter_names[local]: parameter.numel()
        for layer in build_layers(described.family, described.config)
        for local, parameter in layer.named_parameters()
    }
    # All that is absent here: layer norms behind the last layer of an encoder whose features are taken before it.
    assert abs(sum(ours.values()) - expected) <= 1e-6 * expected and expected > 7e9


@pytest.mark.parametrize("name", ["llava_onevision", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_it_is_captured_as_two_modules(name: str) -> None:
    described = describe_config(MODELS[name], "m", "config")
    model = capture_family(described.family, described.config)
    assert [(module.name, module.space) for module in model.modules] == [
        ("vision", "patches"),
        ("language", "samples"),
    ]
    kinds = {operator.kind for graph in model.graphs.values() for operator in graph.operators}
    assert "opaque" not in kinds and {"packed_attention", "put_tokens", "attention"} <= kinds


@pytest.mark.parametrize(
    ("name", "tokens", "patch"),
    [("llava", 17, 4), ("llava_onevision", 17, 4), ("internvl", 5, 8), ("gemma3", 4, 8)],
)
def test_images_have_the_size_of_the_encoder(name: str, tokens: int, patch: int) -> None:
    """A start token, an end token, squares of 2 x 2 patches."""
    typed: Any = typed_config("multimodal", describe_config(MODELS[name], "m", "config").config)
    rule = sample_requirements(typed).images
    assert rule is not None and (rule.token_count(1000, 20), rule.patch, rule.side) == (tokens, patch, 16)


@pytest.mark.parametrize(
    ("name", "window", "most"), [("qwen2_vl", 0, 1024), ("qwen2_5_vl", 2, 1024), ("qwen3_vl", 0, 4)]
)
def test_images_of_qwen_have_any_size_and_are_ordered_by_windows(name: str, window: int, most: int) -> None:
    """With a table of positions they are at most as large as the table."""
    typed: Any = typed_config("multimodal", describe_config(MODELS[name], "m", "config").config)
    rule = sample_requirements(typed).images
    assert rule is not None and (rule.patch, rule.side, rule.window, rule.max_patches) == (8, 0, window, most)
    rule = replace(rule, max_patches=1024)
    assert rule.patch_grid(24, 17) == (2, 3)
    assert rule.patch_order(24, 17).tolist() == ([0, 1, 3, 4, 2, 5] if window else [*range(6)])


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_qwen_leaves_out_what_is_as_in_transformers(name: str) -> None:
    """The language model beside the encoder, or in a part of its own; its base of frequencies and the encoder's
    sizes."""
    text = {**TEXT, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
    older = describe_config({"model_type": name, **text, "vision_config": {}}, "m", "config").config
    assert older == describe_config({"model_type": name, "text_config": text}, "m", "config").config
    typed: Any = typed_config("multimodal", older)
    vision, rotary = typed.vision, typed.language.decoder.rotary[0]
    assert (vision.num_hidden_layers, vision.merge, vision.frames, vision.patch_size) == (32, 2, 2, 14)
    assert (vision.window, vision.full_layers) == ((4, (7, 15, 23, 31)) if name == "qwen2_5_vl" else (0, ()))
    assert rotary["theta"] == 1e6 and rotary["axes"] == [0] * 16 + [1] * 24 + [2] * 24
    assert typed.language.decoder.norm.eps == 1e-5


def is_tied(model_type: str) -> bool:
    """Whether a model whose text_config alone ties its tables has tied tables."""
    tied = {**MODELS[model_type], "text_config": {**MODELS[model_type]["text_config"], "tie_word_embeddings": True}}
    tied.pop("tie_word_embeddings", None)
    return bool(describe_config(tied, "m", "config").config["tie_word_embeddings"])


def test_a_qwen3_leaves_out_what_is_as_in_transformers() -> None:
    text = {**TEXT, "hidden_size": 3584, "num_hidden_layers": 3}
    config = describe_config({"model_type": "qwen3_vl", "text_config": text}, "m", "config").config
    typed: Any = typed_config("multimodal", config)
    vision, decoder = typed.vision, typed.language.decoder
    assert (vision.num_hidden_layers, vision.image_size, vision.stacked, decoder.stacked) == (27, 768, (8, 16, 24), 3)
    axes = decoder.rotary[0]["axes"]
    assert [is_tied(name) for name in ("qwen2_5_vl", "qwen3_vl")] == [True, False], "by the flag of text_config"
    assert decoder.rotary[0]["theta"] == 5e5 and axes == [0, 1, 2] * 20 + [0] * 4 and decoder.head_dim == 128


def test_projectors_to_layers_of_the_language_model_are_not_frozen_with_the_encoder() -> None:
    config = describe_config({**MODELS["qwen3_vl"], "frozen": ["vision.encoder"]}, "m", "config").config
    trained = {
        name
        for layer in build_layers("multimodal", config)
        for name, parameter in zip(layer.parameter_names.values(), layer.parameters(), strict=True)
        if parameter.requires_grad and name.startswith("vision.")
    }
    assert {name.rsplit(".", 2)[0] for name in trained} == {
        "vision.projector", "vision.layers.0.stacked", "vision.layers.2.stacked",
    }  # fmt: skip


def test_frozen_parts_and_loss_weights_may_stand_beside_the_words_of_transformers() -> None:
    ours = {"frozen": ["vision.encoder"], "loss_weights": {"language": 2}}
    config = describe_config({**MODELS["llava"], **ours}, "m", "config").config
    assert config["frozen"] == ["vision.encoder"] and config["loss_weights"] == {"language": 2.0}
    with pytest.raises(ModelError, match="Every module is frozen"):
        describe_config({**MODELS["llava"], "frozen": ["vision", "language"]}, "m", "config")


def test_a_text_config_leaves_out_what_is_as_in_transformers() -> None:
    for name, text_type, sizes in (
        ("llava", "llama", [32064, 4096, 11008, 32, 32]),
        ("llava_onevision", "qwen2", [32064, 4096, 22016, 32, 32]),
        ("gemma3", "gemma3_text", [32064, 2304, 9216, 26, 8]),
    ):
        given = {**MODELS[name], "text_config": {"model_type": text_type, "vocab_size": 32064}}
        config = describe_config(given, "multimodal", "config").config["text_config"]
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        assert [config[name] for name in names] == sizes


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("llava", {"vision_config": {**VISION, "model_type": "pixtral"}}, "'model_type' of the configuration", "pixtral"),
    ("llava", {"vision_config": SIGLIP}, "this encoder gives it no start token", "siglip_vision_model"),
    ("llava", {"vision_feature_select_strategy": "patch"}, "'vision_feature_select_strategy'", "'patch'"),
    ("llava", {"vision_feature_layer": [-2, -1]}, "'vision_feature_layer' of the configuration", "[-2, -1]"),
    ("llava", {"vision_feature_layer": 0}, "'vision_feature_layer' of the configuration", "0"),
    ("llava", {"vision_feature_layer": -4}, "'vision_feature_layer' of the configuration", "-4"),
    ("llava", {"vision_config": "clip"}, "'vision_config' of the configuration has a wrong value", "'clip'"),
    ("llava", {"text_config": {**TEXT, "model_type": "bert"}}, "type of the language model is not known", "'bert'"),
    ("llava", {"text_config": {**TEXT, "model_type": "opt", "ffn_dim": 48}}, "table of positions", "opt"),
    (
        "llava",
        {"text_config": {**TEXT, "model_type": "gpt_neox", "num_key_value_heads": 4}},
        "no names for the layers",
        "gpt_neox",
    ),
    ("llava", {"projector_hidden_act": "mish"}, "'projector_hidden_act'", "'mish'"),
    ("internvl", {"downsample_ratio": 0.3}, "'downsample_ratio'", "0.3"),
    ("internvl", {"downsample_ratio": 0.125}, "'downsample_ratio'", "0.125"),
    ("internvl", {"vision_feature_select_strategy": "full"}, "cannot join squares of patches", "'full'"),
    ("internvl", {"vision_config": {**INTERNVIT, "use_mask_token": True}}, "'use_mask_token'", "True"),
    (
        "internvl",
        {"vision_config": {**INTERNVIT, "use_absolute_position_embeddings": False}},
        "'use_absolute_position_embeddings'",
        "False",
    ),
    ("internvl", {"vision_config": {**INTERNVIT, "image_size": [16, 32]}}, "'image_size'", "[16, 32]"),
    ("internvl", {"vision_config": {**INTERNVIT, "layer_scale_init_value": 0}}, "scale begins with zero", "0"),
    (
        "internvl, norm",
        {"vision_feature_layer": -2},
        "takes the features of the last layer",
        "vision_feature_layer -2, use_mean_pooling false",
    ),
    ("gemma3", {"mm_tokens_per_image": 5}, "'mm_tokens_per_image'", "5"),
    ("gemma3", {"mm_tokens_per_image": 9}, "'mm_tokens_per_image'", "9"),
    ("gemma3", {"vision_config": CLIP}, "has no start token", "clip_vision_model"),
    ("gemma3", {"text_config": {**TEXT, "model_type": "llama"}}, "language model of a Gemma 3", "'llama'"),
    (
        "gemma3",
        {"text_config": {**GEMMA3, "use_bidirectional_attention": True}},
        "'use_bidirectional_attention'",
        "True",
    ),
    ("qwen2_vl", {"vision_config": SIGLIP}, "A part of a Qwen-VL is of another type", "siglip_vision_model"),
    (
        "qwen2_5_vl",
        {"text_config": {**TEXT, "model_type": "llama"}},
        "is of another type",
        "text_config, model_type 'llama'",
    ),
    ("qwen2_5_vl", {"text_config": "qwen2"}, "'text_config' of the configuration has a wrong value", "'qwen2'"),
    ("qwen2_vl", {"vision_config": {**QWEN2_VISION, "hidden_size": 48}}, "another width than the language model", "48"),
    ("qwen2_5_vl", {"vision_config": {**QWEN_VISION, "num_heads": 4}}, "turn pairs of a head's features", "6 features"),
    ("qwen2_5_vl", {"vision_config": {**QWEN_VISION, "window_size": 7}}, "'window_size'", "7"),
    (
        "qwen2_5_vl",
        {"vision_config": {**QWEN_VISION, "fullatt_block_indexes": [-1]}},
        "'fullatt_block_indexes'",
        "[-1]",
    ),
    ("qwen2_vl", {"text_config": {**TEXT, "rope_scaling": "mrope"}}, "'rope_scaling' of the configuration", "'mrope'"),
    ("qwen2_vl", {"vision_config": {**QWEN2_VISION, "rope_parameters": [1]}}, "'rope_parameters'", "[1]"),
    ("qwen2_vl", {"vision_config": {**QWEN2_VISION, "rope_parameters": {"rope_type": "yarn"}}}, "'rope_par", "yarn"),
    ("qwen3_vl", {"vision_config": {**QWEN3_VISION, "num_position_embeddings": 15}}, "'num_position_embeddings'", "15"),
    ("qwen3_vl", {"vision_config": {**QWEN3_VISION, "deepstack_visual_indexes": [4]}}, "'deepstack_visual", "[4]"),
    (
        "qwen3_vl",
        {"vision_config": {**QWEN3_VISION, "deepstack_visual_indexes": [1, 1]}},
        "'deepstack_visual",
        "[1, 1]",
    ),
    ("qwen3_vl", {"text_config": {**TEXT, "num_hidden_layers": 1}}, "than it has layers", "[0, 2], text_config"),
    (
        "qwen3_vl",
        {"text_config": {**TEXT, "rope_scaling": {"mrope_section": [0, 2, 2]}}},
        "'mrope_section'",
        "[0, 2, 2]",
    ),
    ("qwen2_vl", {"text_config": {**TEXT, "rope_scaling": {"mrope_section": [1, 3]}}}, "'mrope_section'", "[1, 3]"),
    (
        "qwen2_vl",
        {"text_config": {**TEXT, "rope_scaling": {"mrope_section": [1, 1, 1]}}},
        "'mrope_section'",
        "[1, 1, 1]",
    ),
]


@pytest.mark.parametrize(("name", "changes", "what", "seen"), REFUSED)
def test_a_configuration_that_is_not_read_is_one_clear_error(
    name: str, changes: dict[str, Any], what: str, seen: str, tmp_path: Path
) -> None:
    """And no class of the library takes its place: it would have no modules."""
    config = {**MODELS[name], **changes}
    with pytest.raises(ModelError) as error:
        describe_config(config, "multimodal", "config")
    assert not isinstance(error.value, UnsupportedModelError)
    assert what in error.value.what and seen in str(error.value.seen)
    assert error.value.where and error.value.allowed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_the_encoder_of_a_qwen_may_have_another_language_model_but_not_enter_its_layers() -> None:
    config = {
        "model_type": "multimodal",
        "vision": {**QWEN3_VISION, "model_type": "qwen3_vl_vision"},
        "language": {**TEXT, "model_type": "llama"},
    }
    with pytest.raises(ModelError, match="enter the language model of a qwen3_vl only") as error:
        describe_config(config, "m", "config")
    assert error.value.seen == "vision.deepstack_visual_indexes [0, 2]"
    config["vision"] |= {"deepstack_visual_indexes": []}
    model = capture_family("multimodal", describe_config(config, "m", "config").config)
    kinds = {operator.kind for graph in model.graphs.values() for operator in graph.operators}
    assert "opaque" not in kinds and {"image_positions", "rotary", "packed_attention"} <= kinds
