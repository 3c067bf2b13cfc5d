"""A LLaVA's config.json as a multimodal model, against `transformers`: loss and every gradient in float64; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.in_float64 import AllInFloat64
from tests.support.multimodal_reference import batch_of, make_sample, run

from pipefit.errors import ModelError
from pipefit.model.capture.layers import capture_family
from pipefit.model.registry import build_layers, describe_config, resolve_model, typed_config

PATCH, SIDE = 4, 3
VISION = {"model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
          "num_attention_heads": 3, "image_size": PATCH * SIDE, "patch_size": PATCH, "num_channels": 3}  # fmt: skip
TEXT = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
LLAVA: dict[str, Any] = {
    "model_type": "llava", "vision_config": VISION, "text_config": TEXT, "image_token_index": 63,
    "vision_feature_layer": -2, "vision_feature_select_strategy": "full",
}  # fmt: skip


IN_MEMORY = {
    "encoder.layer.": "layers.", "attention.attention.query": "attention.q_proj", "attention.output.dense":
    "attention.o_proj", "attention.attention.key": "attention.k_proj", "attention.attention.value": "attention.v_proj",
    "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2",
}  # fmt: skip
"""What transformers 5 calls a ViT's parameters that its files call otherwise."""


def their_model(**changes: Any) -> Any:
    import transformers

    given = {name: value for name, value in {**LLAVA, **changes}.items() if name != "model_type"}
    torch.manual_seed(3)
    with AllInFloat64():
        config = transformers.LlavaConfig(**given, attn_implementation="eager")
        theirs = transformers.LlavaForConditionalGeneration(config).double().eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0.0, 0.3)
    return theirs


def their_name(name: str, typed: Any) -> str:
    """How a parameter of ours is called in their state dict."""
    module, inner = name.split(".", 1)
    if module == "language":
        (stored,) = typed.language.stored_tensors(inner)
        front, _, rest = stored.name.partition(".")
        return stored.name if front == "lm_head" else f"model.language_model.{rest}"
    if inner.startswith("projector."):
        return f"model.multi_modal_{inner}"
    (stored,) = typed.vision.stored_tensors(inner)
    name = stored.name
    for file, memory in IN_MEMORY.items():
        name = name.replace(file, memory)
    return f"model.vision_tower.{name}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vision_feature_layer": 1},
        {"vision_feature_layer": -1, "text_config": {**TEXT, "model_type": "qwen2"}},
        {"vision_config": {**VISION, "model_type": "vit"}, "projector_hidden_act": "gelu_pytorch_tanh"},
        {"vision_config": {**VISION, "model_type": "vit"}, "vision_feature_layer": -1},
    ],
    ids=["siglip", "first layer", "last layer, qwen2", "vit", "vit, last layer"],
)
def test_loss_and_gradients_are_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    """Two samples, an image of the size of the table in each."""
    theirs = their_model(**changes)
    theirs.config.save_pretrained(tmp_path)
    described = resolve_model(str(tmp_path))
    typed: Any = typed_config("multimodal", described.config)
    assert typed_config("multimodal", json.loads(json.dumps(described.config))) == typed, "canonical words say the same"
    layers = build_layers("multimodal", described.config, device="cpu", dtype=torch.float64)
    values = dict(theirs.named_parameters())
    pairs = {}
    for layer in layers:
        for local, parameter in layer.named_parameters():
            other = values[their_name(layer.parameter_names[local], typed)]
            pairs[layer.parameter_names[local]] = parameter, other
            parameter.data.copy_(other.detach().reshape(parameter.shape))
    batch = batch_of(typed, [make_sample(typed, 32, [(SIDE, SIDE)], [], seed) for seed in range(2)])
    loss = run(layers, batch)["language"]
    loss.backward()

    tokens, labels = batch["language"]["tokens"].clone(), batch["language"]["labels"]
    tokens[tokens == LLAVA["image_token_index"]] = 0
    tokens.view(-1)[batch["language"]["image_places"][0]] = LLAVA["image_token_index"]
    words = batch["language"]["tokens"]
    assert (tokens != words).sum() >= 2 * SIDE**2 - 4
    pixels = batch["vision"]["pixels"][0].view(2, -1, 3, PATCH, PATCH)[:, typed.vision.start_token :]
    tiles = pixels.view(2, SIDE, SIDE, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    images = (tiles.reshape(2, 3, SIDE * PATCH, SIDE * PATCH).double() - 127.5) / 127.5
    with AllInFloat64():
        logits = theirs(input_ids=tokens, pixel_values=images).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-11)
    for name, (mine, other) in pairs.items():
        wanted = other.grad.reshape(mine.shape)
        assert mine.grad is not None
        # Keys' biases have no gradient, but for rounding.
        assert float((mine.grad - wanted).abs().max()) <= 1e-9 * max(1e-3, float(wanted.abs().max())), name


def test_it_is_captured_as_two_modules_without_a_norm_between() -> None:
    described = describe_config(LLAVA, "multimodal", "config")
    assert described.config["vision"]["num_hidden_layers"] == 2 and described.config["projector_norm"] is False
    model = capture_family(described.family, described.config)
    assert [module.name for module in model.modules] == ["vision", "language"]
    projector = model.layer_graph(model.modules[0].layers[-1])
    assert "layer_norm" not in {operator.kind for operator in projector.operators}


def test_what_is_frozen_may_stand_beside_the_words_of_transformers() -> None:
    config = describe_config(
        {**LLAVA, "frozen": ["vision.encoder"], "loss_weights": {"language": 2}}, "m", "config"
    ).config
    assert config["frozen"] == ["vision.encoder"] and config["loss_weights"] == {"language": 2.0}
    with pytest.raises(ModelError, match="Every module is frozen"):
        describe_config({**LLAVA, "frozen": ["vision", "language"]}, "m", "config")


def test_a_text_config_of_llama_leaves_out_what_is_as_in_transformers() -> None:
    config = describe_config({**LLAVA, "text_config": {"vocab_size": 32064}}, "multimodal", "config").config["language"]
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    assert [config[name] for name in names] == [32064, 4096, 11008, 32, 32]


@pytest.mark.parametrize(
    ("changes", "what", "seen"),
    [
        ({"vision_config": {**VISION, "model_type": "clip_vision_model"}}, "encoder is not known", "clip_vision_model"),
        ({"vision_feature_select_strategy": "default"}, "drops the first token of every image", "'default'"),
        ({"vision_feature_layer": [-2, -1]}, "'vision_feature_layer' of the configuration", "[-2, -1]"),
        ({"vision_feature_layer": 0}, "'vision_feature_layer' of the configuration", "0"),
        ({"vision_feature_layer": -4}, "'vision_feature_layer' of the configuration", "-4"),
        ({"multimodal_projector_bias": False}, "has no biases", "multimodal_projector_bias false"),
        ({"vision_config": "siglip"}, "'vision_config' of the configuration has a wrong value", "'siglip'"),
        ({"text_config": {**TEXT, "model_type": "gemma"}}, "The type of the language model is not known", "'gemma'"),
    ],
)  # fmt: skip
def test_a_llava_that_is_no_model_of_this_family(changes: dict[str, Any], what: str, seen: str) -> None:
    with pytest.raises(ModelError) as error:
        describe_config({**LLAVA, **changes}, "multimodal", "config")
    assert what in error.value.what and seen in str(error.value.seen)
