"""The image encoder against `transformers`: outputs for every image, at several sizes, weights through files; float64.

Their models see one image at a time, ours all of them packed in one row. Sizes other than the table's are interpolated
by both (bicubic), theirs with `interpolate_pos_encoding`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import modules_toys as toys
from tests.support.in_float64 import AllInFloat64
from tests.support.multimodal_reference import grid_of

from pipefit.errors import FormatError, ModelError
from pipefit.model.registry import build_layers, describe_config, resolve_model, typed_config
from pipefit.model.weights.files import layer_tensors, load_layers, save_weights
from pipefit.model.weights.modules import is_parts_text, module_weights, split_parts
from pipefit.run.session.weights import weights_value
from pipefit.run.stage.initial_values import initial_values

SIZES = [(4, 4), (1, 1), (3, 7), (6, 2), (4, 4), (5, 5)]
"""Rows and columns of patches; the table has 4 x 4."""

PATCH = 4
SMALL = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 16,
         "patch_size": PATCH}  # fmt: skip


CLASSES = {
    "vit": ("ViTConfig", "ViTModel"),
    "vit classifier": ("ViTConfig", "ViTForImageClassification"),
    "siglip_vision_model": ("SiglipVisionConfig", "SiglipVisionModel"),
    "siglip": ("SiglipConfig", "SiglipModel"),
}
"""Directories that an encoder is read from; the classifier puts `vit.` before its names, a SigLIP of both towers
`vision_model.`, and calls the layers of its text tower alike."""


def their_model(kind: str, size: Mapping[str, Any] = SMALL) -> Any:
    import transformers

    config, model = (getattr(transformers, name) for name in CLASSES[kind])
    text = {name: size[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    text |= {"num_hidden_layers": 3, "vocab_size": 9, "bos_token_id": 1, "eos_token_id": 2}
    given = {"vision_config": dict(size), "text_config": text} if kind == "siglip" else size
    torch.manual_seed(3)
    with AllInFloat64():
        theirs = model(config(**given, attn_implementation="eager")).double().eval()
        for parameter in theirs.parameters():
            parameter.data.normal_(0.0, 0.3)
    return theirs


def encoder_in(theirs: Any) -> Any:
    """The image encoder of a model of theirs, which may be all of it."""
    return getattr(theirs, "vit", getattr(theirs, "vision_model", theirs))


def ours(config: dict[str, Any], directory: Path) -> tuple[list[torch.nn.Module], Any]:
    """(the layers of the vision module with the encoder's weights from the directory, the configuration)."""
    described = describe_config(config, "multimodal", "config")
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


@pytest.mark.parametrize("kind", CLASSES)
def test_packed_images_are_what_transformers_makes_of_each(kind: str, tmp_path: Path) -> None:
    theirs = their_model(kind)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    language = resolve_model("tiny").config
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
    assert lengths == [typed.token_count(rows * PATCH, columns * PATCH) for rows, columns in SIZES]
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
            wanted = encoder_in(theirs)(normal.unsqueeze(0), interpolate_pos_encoding=True).last_hidden_state[0]
        assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()


@pytest.mark.parametrize("kind", CLASSES)
def test_any_box_of_a_reshaped_tensor_is_that_of_the_whole_one(kind: str, tmp_path: Path) -> None:
    """What a rank reads of the kernel of the patches (4 dimensions in the files), the table of positions and the start
    token (3 in a ViT's), and of a matrix that stands there as it is; from files with an index."""
    theirs = their_model(kind)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    config = json.loads((tmp_path / "config.json").read_text())
    described = describe_config(
        {"model_type": "multimodal", "vision": config, "language": resolve_model("tiny").config}, "m", "c"
    )
    read = module_weights({"vision": tmp_path}, "multimodal", described.config, lambda *_: pytest.fail("not there"))
    encoder, draw = encoder_in(theirs), random.Random(7)
    embeddings, vit = encoder.embeddings, kind.startswith("vit")
    kernel = (embeddings.patch_embeddings.projection if vit else embeddings.patch_embedding).weight
    table = embeddings.position_embeddings[0] if vit else embeddings.position_embedding.weight
    (fc1,) = [p for name, p in encoder.named_parameters() if name.endswith("layers.1.mlp.fc1.weight")]
    whole = {
        "embed.patch.weight": kernel.flatten(1),
        "embed.positions.table": table,
        **({"embed.positions.start": embeddings.cls_token[0, 0]} if vit else {}),
        "layers.1.mlp.fc1.weight": fc1,
    }
    assert whole["embed.patch.weight"].shape == (24, 48) and table.shape == (16 + vit, 24)
    for name, wanted in whole.items():
        boxes = [tuple(tuple(sorted(draw.choices(range(size + 1), k=2))) for size in wanted.shape) for _ in range(40)]
        for box in (*boxes, tuple((0, size) for size in wanted.shape)):
            found = read(f"vision.{name}", wanted.shape, box)
            assert torch.equal(found, wanted[tuple(slice(*ends) for ends in box)]), (name, box)


def test_a_siglip_directory_of_both_towers_gives_its_vision_model() -> None:
    vision = {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 384, "hidden_size": 1152,
              "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}  # fmt: skip
    language = resolve_model("tiny").config
    whole = {"model_type": "siglip", "text_config": {}, "vision_config": vision}
    found = [
        describe_config({"model_type": "multimodal", "vision": part, "language": language}, "m", "config").config
        for part in (vision, whole)
    ]
    assert found[0] == found[1]
    short = describe_config(
        {"model_type": "multimodal", "vision": {"model_type": "siglip"}, "language": language}, "m", "c"
    )
    assert short.config["vision"]["hidden_size"] == 768


def test_weights_of_the_whole_model_are_saved_and_read_back(tmp_path: Path) -> None:
    config = resolve_model("multimodal-tiny").config
    torch.manual_seed(0)
    layers = build_layers("multimodal", config, device="cpu")
    save_weights(tmp_path, layer_tensors(layers), "multimodal", config)
    again = build_layers("multimodal", config, device="cpu")
    load_layers(again, tmp_path, "multimodal", config)
    found = layer_tensors(again)
    assert all(torch.equal(value, found[name]) for name, value in layer_tensors(layers).items())
    assert resolve_model(str(tmp_path)).config == config


def test_weights_of_another_encoder_are_refused(tmp_path: Path) -> None:
    their_model("vit").save_pretrained(tmp_path)
    config = resolve_model("multimodal-tiny").config
    with pytest.raises(ModelError, match=r"another configuration(.|\n)*hidden_size 24(.|\n)*hidden_size 48"):
        module_weights({"vision": tmp_path}, "multimodal", config, lambda *_: torch.zeros(()))
    with pytest.raises(ModelError, match=r"no such module(.|\n)*vision=(.|\n)*one directory"):
        module_weights({"vision": tmp_path}, "llama", resolve_model("tiny").config, lambda *_: torch.zeros(()))


def test_directories_of_modules_are_named_one_by_one() -> None:
    assert is_parts_text("vision=a,language=b/c") and not is_parts_text("a/vision")
    assert split_parts("vision=a,language=b/c") == {"vision": Path("a"), "language": Path("b/c")}
    for text in ("vision=", "vision=a,audio=b", "vision=a,vision=b", "vision=a,b"):
        with pytest.raises(ModelError, match=r"are written wrongly(.|\n)*--weights(.|\n)*vision=DIR and language=DIR"):
            split_parts(text)


def test_a_configuration_names_directories_of_its_parts(tmp_path: Path) -> None:
    their_model("siglip_vision_model").save_pretrained(tmp_path / "eyes")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "config.json").write_text(json.dumps(resolve_model("tiny").config))
    config = tmp_path / "both.json"
    config.write_text(json.dumps({"model_type": "multimodal", "vision": "eyes", "language": "words"}))
    found = resolve_model(str(config))
    assert found.family == "multimodal" and found.config["vision"]["hidden_size"] == 24
    assert found.config["language"] == resolve_model("tiny").config
    config.write_text(json.dumps({"model_type": "multimodal", "vision": "ears", "language": "words"}))
    with pytest.raises(ModelError, match=r"has no config.json(.|\n)*'vision' of the configuration(.|\n)*ears"):
        resolve_model(str(config))


def toy_plan(names: tuple[str, ...] = toys.ALL) -> tuple[Any, Any]:
    """(plan, captured model) of the small multimodal model of the runs."""
    model = toys.model(names)
    return toys.plan(model, {name: toys.Layout() for name in names}), model


def test_a_run_starts_from_the_directory_of_a_module(tmp_path: Path) -> None:
    """`--weights vision=DIR`: the encoder's numbers are those of the files, all others those of the seed."""
    size = {name: value for name, value in toys.CONFIG["vision"].items() if name != "model_type"}
    their_model("vit", size).save_pretrained(tmp_path)
    plan, model = toy_plan()
    read, seeded = weights_value(plan, model, f"vision={tmp_path}"), initial_values(plan, model)
    layers, _ = ours(toys.CONFIG, tmp_path)
    files = layer_tensors(layers)
    found: dict[str, bool] = {}
    for layer in model.layers:
        for spec in model.layer_graph(layer).parameters:
            name, shape = layer.parameters[spec.name], tuple(int(size) for size in spec.shape)
            half = [(size // 2, size) for size in shape]
            value, part = read(name, shape, half), tuple(slice(*ends) for ends in half)
            found[name] = name.startswith("vision.") and not name.startswith("vision.projector.")
            wanted = files[name][part] if found[name] else seeded(name, shape, half)
            assert torch.equal(value.double(), wanted.double()), name
    assert sum(found.values()) == 4 + 2 * 16 + 2
    assert {name.split(".")[0] for name, of_files in found.items() if not of_files} == {*toys.ALL}


WRONG = {
    "vision=gone": r"no weights here(.|\n)*gone(.|\n)*no such file or directory(.|\n)*check the path",
    "vision=empty": r"no weights here(.|\n)*empty(.|\n)*model.safetensors(.|\n)*save_pretrained",
    "generator=gone": r"no weights here(.|\n)*generator=gone(.|\n)*given as vision=DIR or language=DIR",
    "vision=gone,generator=gone": r"are written wrongly(.|\n)*seen: generator=gone(.|\n)*vision=DIR and language=DIR",
    "vision=other": r"another configuration(.|\n)*other/config.json(.|\n)*hidden_size 24(.|\n)*hidden_size 16",
}


@pytest.mark.parametrize("weights", WRONG)
def test_weights_of_modules_that_are_not_there_are_one_clear_error(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    their_model("vit").save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=WRONG[weights]):
        weights_value(*toy_plan(), weights)


def test_weights_of_a_module_that_the_model_lacks_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such module(.|\n)*seen: vision=(.|\n)*allowed: language"):
        weights_value(*toy_plan(("language", "generator")), f"vision={tmp_path}")


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"model_type": ', r"not valid JSON(.|\n)*line 1"), ("[1, 2]", r"not a configuration(.|\n)*object")],
)
def test_a_damaged_configuration_beside_weights_is_one_clear_error(text: str, words: str, tmp_path: Path) -> None:
    their_model("vit").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FormatError, match=words) as error:
        module_weights({"vision": tmp_path}, "multimodal", resolve_model("multimodal-tiny").config, lambda *_: None)
    assert str(tmp_path / "config.json") in error.value.where


@pytest.mark.parametrize("tower", [None, [], "vit"])
def test_a_siglip_without_a_configuration_of_its_vision_model_is_one_clear_error(tower: Any) -> None:
    config = {
        "model_type": "multimodal",
        "vision": {"model_type": "siglip", "vision_config": tower},
        "language": resolve_model("tiny").config,
    }
    with pytest.raises(ModelError, match=r"'vision_config'(.|\n)*allowed: a JSON object"):
        describe_config(config, "m", "config")
