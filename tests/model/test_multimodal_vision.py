"""The image encoder against `transformers`: outputs for every image, at several sizes, weights through files; float64.

Their models see one image at a time, ours all of them packed in one row. Sizes other than the table's are interpolated
by both (bicubic), theirs with `interpolate_pos_encoding`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from in_float64 import AllInFloat64
from multimodal_reference import grid_of

from pipefit.errors import ModelError
from pipefit.model.module_weights import module_weights, names_parts, split_parts
from pipefit.model.registry import build_layers, describe, resolve, typed_config
from pipefit.model.weights import layer_tensors, load_layers, save_weights

SIZES = [(4, 4), (1, 1), (3, 7), (6, 2), (4, 4), (5, 5)]
"""Rows and columns of patches; the table has 4 x 4."""

PATCH = 4
SMALL = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 16,
         "patch_size": PATCH}  # fmt: skip


def their_model(kind: str, **more: Any) -> Any:
    import transformers

    names = {"vit": ("ViTConfig", "ViTModel"), "siglip_vision_model": ("SiglipVisionConfig", "SiglipVisionModel")}
    config, model = (getattr(transformers, name) for name in names[kind])
    torch.manual_seed(3)
    with AllInFloat64():
        theirs = model(config(**SMALL, **more, attn_implementation="eager")).double().eval()
        for parameter in theirs.parameters():
            parameter.data.normal_(0.0, 0.3)
    return theirs


def ours(config: dict[str, Any], directory: Path) -> tuple[list[torch.nn.Module], Any]:
    """(the layers of the vision module with the encoder's weights from the directory, the configuration)."""
    described = describe(config, "multimodal", "config")
    layers = build_layers("multimodal", described.config, device="cpu", dtype=torch.float64)
    layers = [layer for layer in layers if layer.module_name == "vision"]
    values = {n: p.detach().clone() for n, p in layer_tensors(layers).items()}
    read = module_weights({"vision": directory}, "multimodal", described.config, lambda name, *_: values[name])
    with torch.no_grad():
        for layer in layers:
            for local, parameter in layer.named_parameters():
                name = layer.parameter_names[local]
                parameter.copy_(read(name, parameter.shape, [(0, size) for size in parameter.shape]))
    return layers, typed_config("multimodal", described.config).vision


def patches_of(image_CHW: torch.Tensor, start: bool) -> torch.Tensor:
    """(tokens, C P P): the patches of an image in order, after zeros for a start token."""
    tiles = image_CHW.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    flat = tiles.permute(1, 2, 0, 3, 4).reshape(-1, image_CHW.shape[0] * PATCH * PATCH)
    return torch.cat((torch.zeros_like(flat[:1]), flat)) if start else flat


@pytest.mark.parametrize("kind", ["vit", "siglip_vision_model"])
def test_packed_images_are_what_transformers_makes_of_each(kind: str, tmp_path: Path) -> None:
    theirs = their_model(kind)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    language = resolve("tiny").config
    layers, typed = ours({"model_type": "multimodal", "vision": config, "language": language}, tmp_path)
    generator = torch.Generator().manual_seed(1)
    images = [
        torch.randint(0, 256, (3, rows * PATCH, columns * PATCH), generator=generator, dtype=torch.uint8)
        for rows, columns in SIZES
    ]
    grids = [grid_of(*size) for size in SIZES]
    if typed.start_token:
        grids = [torch.cat((torch.tensor([[-1, 0, *size]]), g)) for g, size in zip(grids, SIZES, strict=True)]
    lengths = [len(grid) for grid in grids]
    assert lengths == [typed.tokens(rows * PATCH, columns * PATCH) for rows, columns in SIZES]
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
    pixels = torch.cat([patches_of(image, typed.start_token) for image in images]).unsqueeze(0)
    embed, *blocks, projector = layers
    with torch.no_grad():
        x = embed(pixels, torch.cat(grids).unsqueeze(0))
        for block in blocks:
            x = block(x, starts)
        x = projector.norm(x)
    for image, found in zip(images, x[0].split(lengths), strict=True):
        with torch.no_grad(), AllInFloat64():
            normal = (image.double() / 255 - 0.5) / 0.5
            wanted = theirs(normal.unsqueeze(0), interpolate_pos_encoding=True).last_hidden_state[0]
        assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()


def test_a_siglip_directory_of_both_towers_gives_its_vision_model() -> None:
    vision = {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 384, "hidden_size": 1152,
              "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}  # fmt: skip
    language = resolve("tiny").config
    whole = {"model_type": "siglip", "text_config": {}, "vision_config": vision}
    found = [
        describe({"model_type": "multimodal", "vision": part, "language": language}, "m", "config").config
        for part in (vision, whole)
    ]
    assert found[0] == found[1]
    short = describe({"model_type": "multimodal", "vision": {"model_type": "siglip"}, "language": language}, "m", "c")
    assert short.config["vision"]["hidden_size"] == 768


def test_weights_of_the_whole_model_are_saved_and_read_back(tmp_path: Path) -> None:
    config = resolve("multimodal-tiny").config
    torch.manual_seed(0)
    layers = build_layers("multimodal", config, device="cpu")
    save_weights(tmp_path, layer_tensors(layers), "multimodal", config)
    again = build_layers("multimodal", config, device="cpu")
    load_layers(again, tmp_path, "multimodal", config)
    found = layer_tensors(again)
    assert all(torch.equal(value, found[name]) for name, value in layer_tensors(layers).items())
    assert resolve(str(tmp_path)).config == config


def test_weights_of_another_encoder_are_refused(tmp_path: Path) -> None:
    their_model("vit").save_pretrained(tmp_path)
    config = resolve("multimodal-tiny").config
    with pytest.raises(ModelError, match=r"another module(.|\n)*hidden_size 24(.|\n)*hidden_size 48"):
        module_weights({"vision": tmp_path}, "multimodal", config, lambda *_: torch.zeros(()))
    with pytest.raises(ModelError, match=r"no such module(.|\n)*vision=(.|\n)*one directory"):
        module_weights({"vision": tmp_path}, "llama", resolve("tiny").config, lambda *_: torch.zeros(()))


def test_directories_of_modules_are_named_one_by_one() -> None:
    assert names_parts("vision=a,language=b/c") and not names_parts("a/vision")
    assert split_parts("vision=a,language=b/c") == {"vision": Path("a"), "language": Path("b/c")}
    for text in ("vision=", "vision=a,audio=b", "vision=a,vision=b", "vision=a,b"):
        with pytest.raises(ModelError, match=r"named wrongly(.|\n)*--weights(.|\n)*vision=DIR and language=DIR"):
            split_parts(text)


def test_a_configuration_names_directories_of_its_parts(tmp_path: Path) -> None:
    their_model("siglip_vision_model").save_pretrained(tmp_path / "eyes")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "config.json").write_text(json.dumps(resolve("tiny").config))
    config = tmp_path / "both.json"
    config.write_text(json.dumps({"model_type": "multimodal", "vision": "eyes", "language": "words"}))
    found = resolve(str(config))
    assert found.family == "multimodal" and found.config["vision"]["hidden_size"] == 24
    assert found.config["language"] == resolve("tiny").config
    config.write_text(json.dumps({"model_type": "multimodal", "vision": "ears", "language": "words"}))
    with pytest.raises(ModelError, match=r"without a config.json(.|\n)*'vision' of the configuration(.|\n)*ears"):
        resolve(str(config))
