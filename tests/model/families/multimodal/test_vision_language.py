"""Vision-language models by a config.json of `transformers`, against its classes: loss and every gradient in float64,
files read and written by their names, counts of published models, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.in_float64 import AllInFloat64
from tests.support.multimodal_reference import run
from tests.support.vision_language import MODELS, loss_of_theirs, sample_batch, save_gradients, save_model

from pipefit.model.registry import build_layers, resolve_model, typed_config
from pipefit.model.weights.files import WeightFiles, layer_tensors, load_layers, save_weights


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = save_model(name, tmp_path / "model")
    described = resolve_model(str(tmp_path / "model"))
    typed: Any = typed_config("multimodal", described.config)
    assert typed_config("multimodal", json.loads(json.dumps(described.config))) == typed, "canonical words say the same"
    layers = build_layers("multimodal", described.config, device="cpu", dtype=torch.float64)
    load_layers(layers, tmp_path / "model", "multimodal", described.config)
    batch = sample_batch(typed)
    loss = run(layers, batch)["language"]
    loss.backward()
    expected = loss_of_theirs(theirs, typed, batch)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-11)
    save_gradients(theirs, tmp_path / "gradients")
    wanted = WeightFiles(tmp_path / "gradients", "multimodal", described.config)
    for layer in layers:
        for local, parameter in layer.named_parameters():
            gradient = wanted.read(layer.parameter_names[local], parameter.shape)
            assert parameter.grad is not None
            # Keys' biases have no gradient, but for rounding.
            bound = 1e-9 * max(1e-3, float(gradient.abs().max()))
            assert float((parameter.grad - gradient).abs().max()) <= bound, layer.parameter_names[local]


@pytest.mark.parametrize("name", MODELS)
def test_files_are_written_by_their_names_and_to_the_last_bit(name: str, tmp_path: Path) -> None:
    """What the class reads again, and computes the same loss with. Layers behind the features are not written."""
    import transformers

    theirs = save_model(name, tmp_path / "model")
    config = resolve_model(str(tmp_path / "model")).config
    layers = build_layers("multimodal", config, device="cpu", dtype=torch.float64)
    load_layers(layers, tmp_path / "model", "multimodal", config)
    save_weights(tmp_path / "written", layer_tensors(layers), "multimodal", config)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "written"))
    assert set(after) <= set(before) and all(torch.equal(value, before[key]) for key, value in after.items())
    behind = (".head.", ".pooler.", ".post_layernorm.", "vision_tower.layernorm.", ".layers.1.", ".layer.1.")
    unused = set(before) - set(after)
    assert all(key.startswith("vision_tower.") and any(part in key for part in behind) for key in unused)
    assert resolve_model(str(tmp_path / "written")).config == config
    typed: Any = typed_config("multimodal", config)
    with AllInFloat64():
        again = transformers.AutoModelForImageTextToText.from_pretrained(
            tmp_path / "written", attn_implementation="eager", dtype=torch.float64
        ).eval()
    batch = sample_batch(typed, first=1, count=1)
    with torch.no_grad():
        wanted, found = (float(loss_of_theirs(model, typed, batch)) for model in (theirs, again))
    assert found == pytest.approx(wanted, rel=1e-12)
