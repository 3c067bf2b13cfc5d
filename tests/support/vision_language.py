"""Tiny vision-language models of `transformers` with random weights: their loss and gradients, from the samples of
`multimodal_reference`, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tests.support.in_float64 import AllInFloat64
from tests.support.multimodal_reference import Batch, batch_of, make_sample
from torch import Tensor

from pipefit.model.families.multimodal.config import MultimodalConfig

PATCH, SIDE = 4, 4
IMAGE_TOKEN = 63
VISION = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
          "image_size": PATCH * SIDE, "patch_size": PATCH}  # fmt: skip
TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
CLIP = {**VISION, "model_type": "clip_vision_model"}
INTERNVIT = {**VISION, "model_type": "internvl_vision", "image_size": [PATCH * SIDE] * 2, "patch_size": [PATCH] * 2}
QWEN2 = {**TEXT, "model_type": "qwen2"}
GEMMA = {**TEXT, "hidden_size": 16, "head_dim": 8, "query_pre_attn_scalar": 8}
"The root of the hidden size is a number of float32: the class keeps it as such."
GEMMA3 = {**GEMMA, "model_type": "gemma3_text", "sliding_window": 7, "num_hidden_layers": 3,
          "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}  # fmt: skip
QWEN_VISION = {"depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 3, "patch_size": PATCH,
               "window_size": 4 * PATCH, "fullatt_block_indexes": [1], "out_hidden_size": 32}  # fmt: skip
QWEN2_VISION = {"depth": 2, "embed_dim": 24, "mlp_ratio": 2, "num_heads": 3, "patch_size": PATCH,
                "hidden_size": 32}  # fmt: skip
QWEN3_VISION = {"depth": 4, "hidden_size": 24, "intermediate_size": 40, "num_heads": 3, "patch_size": PATCH,
                "num_position_embeddings": SIDE**2, "deepstack_visual_indexes": [0, 2],
                "out_hidden_size": 32}  # fmt: skip
QWEN_SIZES = [[(2, 3)], [(3, 3), (2, 1)], []]
"Rows and columns of tokens: images of other sizes, with windows of 2 x 2 tokens that they do not fill."

MODELS: Mapping[str, dict[str, Any]] = {
    "llava": {"model_type": "llava", "vision_config": CLIP, "text_config": {**TEXT, "model_type": "llama"},
              "image_token_index": IMAGE_TOKEN},
    "llava, siglip, qwen3": {"model_type": "llava", "vision_config": SIGLIP, "image_token_index": IMAGE_TOKEN,
                             "text_config": {**TEXT, "model_type": "qwen3", "head_dim": 8},
                             "vision_feature_select_strategy": "full", "multimodal_projector_bias": False,
                             "vision_feature_layer": 1, "projector_hidden_act": "gelu_pytorch_tanh"},
    "llava, vit, gemma2": {"model_type": "llava", "vision_config": {**VISION, "model_type": "vit"},
                           "text_config": {**GEMMA, "model_type": "gemma2", "sliding_window": 9},
                           "image_token_index": IMAGE_TOKEN, "vision_feature_layer": -1},
    "llava_onevision": {"model_type": "llava_onevision", "vision_config": SIGLIP, "text_config": QWEN2,
                        "image_token_index": IMAGE_TOKEN},
    "internvl": {"model_type": "internvl", "vision_config": INTERNVIT, "text_config": QWEN2,
                 "image_token_id": IMAGE_TOKEN, "tie_word_embeddings": False},
    "internvl, rms": {"model_type": "internvl", "image_token_id": IMAGE_TOKEN, "vision_feature_layer": -2,
                      "vision_config": {**INTERNVIT, "use_qk_norm": True, "norm_type": "rms_norm",
                                        "attention_bias": True},
                      "text_config": QWEN2 | {"tie_word_embeddings": True}},
    "internvl, norm": {"model_type": "internvl", "vision_config": {**INTERNVIT, "use_mean_pooling": False},
                       "text_config": {**TEXT, "model_type": "llama"}, "image_token_id": IMAGE_TOKEN},
    "gemma3": {"model_type": "gemma3", "vision_config": SIGLIP, "text_config": GEMMA3,
               "image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": 4},
    "qwen2_vl": {"model_type": "qwen2_vl", "vision_config": QWEN2_VISION, "image_token_id": IMAGE_TOKEN,
                 "text_config": {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}},
    "qwen3_vl": {"model_type": "qwen3_vl", "vision_config": QWEN3_VISION, "image_token_id": IMAGE_TOKEN,
                 "text_config": {**TEXT, "num_hidden_layers": 3, "head_dim": 12,
                                 "rope_scaling": {"rope_type": "default", "mrope_section": [3, 2, 1]}}},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "vision_config": QWEN_VISION, "image_token_id": IMAGE_TOKEN,
                   "text_config": {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}}},
}  # fmt: skip


def save_model(name: str, directory: Path) -> Any:
    """Return a model of `transformers` with random numbers, after it wrote itself to the directory."""
    import transformers

    torch.manual_seed(3)
    fields = dict(MODELS[name])
    with AllInFloat64():
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
        model = model.double().eval()
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    return model


def sample_batch(typed: MultimodalConfig, first: int = 0, count: int = 2) -> Batch:
    """Return samples with one, two and no images of the size of the table, from number `first` on."""
    assert typed.vision is not None
    side = typed.vision.grid_side // typed.vision.merge
    images = [[(side, side)], [(side, side)] * 2, []] if not typed.model_type.startswith("qwen") else QWEN_SIZES
    samples = [make_sample(typed, 44, images[seed % 3], [], seed) for seed in range(first, first + count)]
    batch = batch_of(typed, samples)
    tokens = batch["language"]["tokens"]
    tokens[tokens == IMAGE_TOKEN] = 0
    return batch


def loss_of_theirs(model: Any, typed: MultimodalConfig, batch: Batch) -> Tensor:
    """Return the sum of the cross-entropy of their model over the labels of a batch."""
    language = batch["language"]
    tokens, places = language["tokens"].clone(), language["image_places"][0]
    tokens.view(-1)[places[places >= 0]] = IMAGE_TOKEN
    images = pixel_values(typed, batch["vision"]) if not typed.model_type.startswith("qwen") else torch.empty(0)
    inputs: dict[str, Any] = {"input_ids": tokens, "pixel_values": images}
    if typed.model_type.startswith("qwen"):
        inputs |= qwen_inputs(typed, batch["vision"])
        inputs["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).int()
    if typed.model_type == "llava_onevision":
        # As the images of a sample that has several: at the base resolution, without tiles.
        side = images.shape[-1]
        inputs["pixel_values"] = images.unsqueeze(1)
        inputs |= {"image_sizes": torch.tensor([[side, side]] * len(images)), "batch_num_images": [len(images)]}
    if typed.model_type == "gemma3":
        inputs["token_type_ids"] = (tokens == IMAGE_TOKEN).long()
    with AllInFloat64():
        logits = model(**inputs).logits
    labels = language["labels"].flatten()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")


def pixel_values(typed: MultimodalConfig, fed: Mapping[str, Tensor]) -> Tensor:
    """Return (images, C, side, side) of packed squares, normalised."""
    vision = typed.vision
    assert vision is not None
    count, square = vision.grid_side // vision.merge, vision.cell_side
    squares = fed["pixels"][0][fed["grid"][0, :, 0] >= 0]
    tiles = squares.view(-1, count, count, vision.num_channels, square, square).permute(0, 3, 1, 4, 2, 5)
    side = count * square
    return (tiles.reshape(-1, vision.num_channels, side, side).double() - 127.5) / 127.5


def qwen_inputs(typed: MultimodalConfig, fed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the normalised patches of packed squares, square by square and twice each, and the sizes of images in
    patches."""
    vision = typed.vision
    assert vision is not None
    patches, sizes = [torch.zeros(0, vision.patch_features, dtype=torch.float64)], list[list[int]]()
    for start in fed["documents"][0].unique().tolist():
        grid = fed["grid"][0][fed["documents"][0] == start]
        order = sorted(range(len(grid)), key=lambda i: grid[i, :2].tolist())
        squares = fed["pixels"][0, start : start + len(grid)][order].double()
        side, patch = vision.merge, vision.patch_size
        squares = squares.view(-1, vision.num_channels, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5) / 255
        mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (vision.image_mean, vision.image_std))
        normalised = ((squares - mean) / std).unsqueeze(4).expand(-1, -1, -1, -1, vision.frames, -1, -1)
        patches.append(normalised.reshape(-1, vision.patch_features))
        sizes.append([1, int(grid[0, 2]) * side, int(grid[0, 3]) * side])
    return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(sizes).view(-1, 3)}


def save_gradients(model: Any, directory: Path) -> None:
    """Write the gradients of their parameters as their parameters are written; zeros where there is none."""
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.data = gradient.detach().clone()
    model.save_pretrained(directory)
