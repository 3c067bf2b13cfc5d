"""A model of `transformers` and ours with the same weights: logits, loss and gradients side by side, boxes of files."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tests.support.in_float64 import AllInFloat64

from pipefit.model.registry import build_layers, describe_config
from pipefit.model.weights.files import WeightFiles, layer_tensors, load_layers, save_weights

ROWS, TOKENS = 3, 13


def library_model(config: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    """Return the model of `transformers` for a config.json, with eager attention and experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # transformers writes into the mappings it is given
    kwargs = {key: value for key, value in deepcopy(config).items() if key not in ("model_type", "architectures")}
    theirs = AutoConfig.for_model(config["model_type"], **kwargs)
    theirs._attn_implementation = "eager"
    theirs._experts_implementation = "eager"
    with AllInFloat64():
        return AutoModelForCausalLM.from_config(theirs, dtype=dtype).train()


def run_layers(layers: list[torch.nn.Module], tokens: torch.Tensor, labels: torch.Tensor) -> tuple[Any, Any]:
    """Return the logits and the summed loss of our layers."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    feed = {"tokens": tokens, "positions": positions, "labels": labels}
    x, logits = None, None
    for layer in layers:
        names = layer.forward.__code__.co_varnames[1 : layer.forward.__code__.co_argcount]
        logits = x
        x = layer(*[feed.get(name, x) for name in names])
    return logits, x


def same_outputs(theirs: Any, config: dict[str, Any], name: str, folder: Path) -> list[Any]:
    """Load the weights of a float64 model into our layers, and check that logits and loss agree.

    Returns our layers. Both models hold the gradients of the summed loss afterwards.
    """
    described = describe_config(config, name, name)
    theirs.save_pretrained(folder)
    layers = build_layers(described.family, described.config, device="cpu", dtype=torch.float64)
    load_layers(layers, folder, described.family, described.config)

    tokens = torch.randint(0, 61, (ROWS, TOKENS))
    labels = torch.randint(0, 61, (ROWS, TOKENS))
    labels[0, 3:6] = -100
    logits, loss = run_layers(layers, tokens, labels)
    loss.backward()
    with AllInFloat64():
        their_logits = theirs(tokens).logits
        their_loss = torch.nn.functional.cross_entropy(
            their_logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        their_loss.backward()
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, their_logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, their_loss, rtol=1e-9, atol=1e-9)
    return layers


def check_boxes(config: dict[str, Any], name: str, folder: Path) -> None:
    """Save a model, and check that thirds of each parameter can be read."""
    described = describe_config(config, name, name)
    tensors = layer_tensors(build_layers(described.family, described.config, device="cpu"))
    save_weights(folder, tensors, described.family, described.config)
    with WeightFiles(folder, described.family, described.config) as files:
        for key, tensor in tensors.items():
            for part in (0, 1, 2):
                box = [(size * part // 3, size * (part + 1) // 3) for size in tensor.shape]
                expected = tensor[tuple(slice(*edge) for edge in box)]
                assert torch.equal(files.read(key, tensor.shape, box), expected), key
