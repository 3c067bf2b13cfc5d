"""The image processor beside a model says how pixels are normalised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.vision_language import MODELS

from pipefit.errors import PipefitError
from pipefit.model.registry import builtin_names, resolve_model

MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]


def write_model(folder: Path, name: str, config: Any, **processor: Any) -> Path:
    """A directory with a config.json and the file of an image processor."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / name).write_text(json.dumps(processor), encoding="utf-8")
    return folder


def colours(source: Path) -> tuple[Any, Any]:
    config = resolve_model(str(source)).config
    vision = config["vision" if "vision" in config else "vision_config"]
    return vision["image_mean"], vision["image_std"]


def test_a_joint_config_gets_the_colours_of_its_processor(tmp_path: Path) -> None:
    config = MODELS["llava"]
    mean, std = colours(write_model(tmp_path / "a", "other.json", config))
    assert mean != MEAN
    source = write_model(tmp_path / "b", "preprocessor_config.json", config, image_mean=MEAN, image_std=STD)
    assert colours(source) == (MEAN, STD)
    source = write_model(
        tmp_path / "c", "processor_config.json", config, image_processor={"image_mean": MEAN, "rescale_factor": 1 / 255}
    )
    assert colours(source) == (MEAN, std)
    named = {**config, "vision_config": {**config["vision_config"], "image_mean": [0.0] * 3}}
    source = write_model(tmp_path / "d", "preprocessor_config.json", named, image_mean=MEAN, image_std=STD)
    assert colours(source) == ([0.0] * 3, STD), "the configuration's own fields stay"
    source = write_model(tmp_path / "e", "preprocessor_config.json", config, do_normalize=False)
    assert colours(source) == ([0.0] * 3, [1.0] * 3)


def test_a_part_gets_the_colours_of_the_processor_in_its_directory(tmp_path: Path) -> None:
    assert "multimodal-tiny" in builtin_names()
    config = resolve_model("multimodal-tiny").config
    vision = {name: value for name, value in config["vision"].items() if not name.startswith("image_")}
    write_model(tmp_path / "vit", "preprocessor_config.json", vision, image_mean=MEAN, image_std=STD)
    source = write_model(tmp_path / "model", "other.json", {**config, "vision": "../vit"})
    assert colours(source) == (MEAN, STD)


def test_the_image_encoder_of_two_towers_gets_them(tmp_path: Path) -> None:
    config = resolve_model("multimodal-tiny").config
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    siglip = {"model_type": "siglip", "vision_config": {**tower, "image_size": 32, "patch_size": 8}}
    write_model(tmp_path / "siglip", "preprocessor_config.json", siglip, image_mean=MEAN, image_std=STD)
    source = write_model(tmp_path / "model", "other.json", {**config, "vision": "../siglip"})
    assert colours(source) == (MEAN, STD)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "The image processor's file cannot be read."),
        ("[]", "The image processor's file holds no object."),
        ('{"rescale_factor": 1}', "scales pixels in a way that pipefit does not compute"),
        ('{"do_rescale": false}', "do_rescale false"),
        ('{"do_rescale": false, "do_normalize": false}', "do_rescale false"),
        ('{"rescale_factor": "1/255"}', "'1/255'"),
        ('{"rescale_factor": null}', "None"),
    ],
)
def test_a_processor_that_is_not_understood_is_refused(tmp_path: Path, text: str, words: str) -> None:
    source = write_model(tmp_path / "a", "preprocessor_config.json", MODELS["llava"])
    (source / "preprocessor_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(PipefitError) as refusal:
        resolve_model(str(source))
    assert words in refusal.value.full_text() and "preprocessor_config.json" in refusal.value.full_text()
