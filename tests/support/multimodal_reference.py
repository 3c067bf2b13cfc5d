"""One training step of a multimodal model on one device, in plain PyTorch: what everything else is compared with.

Samples become a batch (`batch_of`): sequences by row, images packed one behind the other. The layers of the family are
called one after the other (`run`), the losses of the modules added with their weights and divisors, and autograd does
the rest (`step`). Any run of samples makes a batch, so that microbatches and replicas are batches, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.model.families.multimodal.config import MultimodalConfig

Batch = Mapping[str, Mapping[str, Tensor]]
"""Module -> the inputs of its layers by name."""


@dataclass(frozen=True)
class Sample:
    """One row: its sequence, and the images that it looks at and generates, each an (inputs by name) of its tokens."""

    tokens: Tensor
    labels: Tensor
    image_places: Tensor
    image_ends: Tensor
    axis_positions: Tensor
    condition_places: Tensor
    seen: Sequence[Mapping[str, Tensor]]
    generated: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class Step:
    """What a step gives."""

    losses: Mapping[str, Tensor]
    "Module -> the sum over its tokens or elements."
    divisors: Mapping[str, int]
    gradients: Mapping[str, Tensor]
    "Global name of a trainable parameter -> of the weighted sum of the losses over their divisors."


def make_sample(
    config: MultimodalConfig,
    length: int,
    seen: Sequence[tuple[int, int]],
    generated: Sequence[tuple[int, int]],
    seed: int,
) -> Sample:
    """Text around images of (rows, columns) patches, `seen` ones, then `generated` ones. All numbers are random."""
    generator = torch.Generator().manual_seed(seed)
    looked = [_seen(config, size, generator) for size in seen]
    drawn = [_generated(config, size, generator) for size in generated]
    counts = [len(image["grid"]) for image in (*looked, *drawn)]
    dropped = int(bool(config.vision and config.vision.drops_start))
    counts = [count - dropped * (number < len(looked)) for number, count in enumerate(counts)]
    spare = length - sum(counts)
    assert spare > len(counts), "no room for text"
    places, at = [], 0
    for number, count in enumerate(counts):
        at += 1 + (spare - len(counts)) // (len(counts) + 1) * (number == 0)
        places.append(torch.arange(at, at + count))
        at += count
    tokens = torch.randint(0, config.language.decoder.vocab_size, (length,), generator=generator)
    labels = tokens.roll(-1)
    labels[-1] = -100
    for run in places:
        labels[run] = -100
    empty = torch.zeros(0, dtype=torch.int64)
    ends = torch.arange(length)
    for run in places[: len(looked)]:
        ends[run] = run[-1]
    absent = torch.full((dropped,), -1)
    ordered = places[: len(looked)]
    if config.vision is not None and config.vision.window:  # the encoder gets the patches of an image by windows
        grids = [image["grid"].unbind(1) for image in looked]
        ordered = [run[row * columns + column] for run, (row, column, _, columns) in zip(places, grids, strict=False)]
    return Sample(
        tokens=tokens,
        labels=labels,
        image_places=torch.cat([empty, *(part for run in ordered for part in (absent, run))]),
        image_ends=ends,
        axis_positions=_axis_positions(length, {int(run[0]): size for run, size in zip(places, seen, strict=False)}),
        condition_places=torch.cat([empty, *places[len(looked) :]]),
        seen=looked,
        generated=drawn,
    )


def _seen(config: MultimodalConfig, size: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    vision = config.vision
    assert vision is not None
    grid = grid_of(*size)
    if vision.window:
        grid = torch.tensor(sorted(grid.tolist(), key=lambda g: [g[0] // vision.window, g[1] // vision.window, *g]))
    pixels = torch.randint(0, 256, (len(grid), vision.cell_features), generator=generator, dtype=torch.uint8)
    if vision.start_token:
        grid = torch.cat((torch.tensor([[-1, 0, *size]]), grid))
        pixels = torch.cat((torch.zeros_like(pixels[:1]), pixels))
    if vision.end_token:
        grid = torch.cat((grid, torch.tensor([[-2, 0, *size]])))
        pixels = torch.cat((pixels, torch.zeros_like(pixels[:1])))
    return {"pixels": pixels, "grid": grid}


def _axis_positions(length: int, images: Mapping[int, tuple[int, int]]) -> Tensor:
    """Token by token: the positions of M-RoPE of a sequence with images of (rows, columns) at these places."""
    positions, behind = list[list[int]](), 0
    while len(positions) < length:
        rows, columns = images.get(len(positions), (1, 1))
        positions += [[behind, behind + row, behind + column] for row in range(rows) for column in range(columns)]
        behind += max(rows, columns)
    return torch.tensor(positions)


def _generated(config: MultimodalConfig, size: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    assert config.generator is not None
    grid = grid_of(*size)
    data, noise = (
        torch.randn(len(grid), config.generator.latent_size, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    time = torch.rand(1, generator=generator, dtype=torch.float64)
    noisy = (1 - time) * noise + time * data
    return {"noisy": noisy, "target": data - noise, "time": time.expand(len(grid)), "grid": grid}


def grid_of(rows: int, columns: int) -> Tensor:
    """(rows x columns, 4): row, column, rows, columns of every patch, row by row."""
    return torch.tensor([[row, column, rows, columns] for row in range(rows) for column in range(columns)])


def batch_of(config: MultimodalConfig, samples: Sequence[Sample], dtype: torch.dtype = torch.float64) -> Batch:
    """The inputs of all modules for these samples, in their order; floating ones in `dtype`."""
    length = len(samples[0].tokens)
    language = {
        "tokens": torch.stack([sample.tokens for sample in samples]),
        "labels": torch.stack([sample.labels for sample in samples]),
        "positions": torch.arange(length).expand(len(samples), -1).contiguous(),
        "image_ends": torch.stack([sample.image_ends for sample in samples]),
        "axis_positions": torch.stack([sample.axis_positions for sample in samples]),
    }
    for name in ("image_places", "condition_places"):
        places = [getattr(sample, name) for sample in samples]
        places = [torch.where(place < 0, place, place + row * length) for row, place in enumerate(places)]
        language[name] = torch.cat(places).unsqueeze(0)
    batch: dict[str, Mapping[str, Tensor]] = {"language": language}
    if config.vision is not None:
        features = {"pixels": (config.vision.cell_features,), "grid": (4,)}
        batch["vision"] = _packed([image for sample in samples for image in sample.seen], features, dtype)
    if config.generator is not None:
        latent = (config.generator.latent_size,)
        features = {"noisy": latent, "target": latent, "time": (), "grid": (4,)}
        batch["generator"] = _packed([image for sample in samples for image in sample.generated], features, dtype)
    return batch


def _packed(
    images: Sequence[Mapping[str, Tensor]], features: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The images one behind the other in one row, and where each of them starts."""
    integers = {"pixels": torch.uint8, "grid": torch.int64}
    packed = {
        name: torch.cat(
            [torch.zeros((0, *shape), dtype=integers.get(name, dtype)), *(i[name] for i in images)]
        ).unsqueeze(0)
        for name, shape in features.items()
    }
    starts, at = [torch.zeros(0, dtype=torch.int64)], 0
    for image in images:
        starts.append(torch.full((len(image["grid"]),), at))
        at += len(image["grid"])
    floating = {name: x.to(dtype) if x.is_floating_point() else x for name, x in packed.items()}
    return {**floating, "documents": torch.cat(starts).unsqueeze(0)}


def run(layers: Sequence[nn.Module], batch: Batch) -> dict[str, Tensor]:
    """The losses of the modules, sums."""
    import inspect

    x: Any = None
    losses = {}
    for layer in layers:
        fed = batch[str(layer.module_name)]
        names = list(inspect.signature(layer.forward).parameters)
        arguments = {name: fed[name] for name in names if name in fed}
        found = layer(**arguments) if len(arguments) == len(names) else layer(x, **arguments)
        x, loss = found if isinstance(found, tuple) else (found, found if found.dim() == 0 else None)
        if loss is not None:
            losses[str(layer.module_name)] = loss
    return losses


def divisors_of(batch: Batch) -> dict[str, int]:
    """Labels that count, and elements of the velocity; at least one."""
    found = {"language": max(1, int((batch["language"]["labels"] != -100).sum()))}
    if "generator" in batch:
        found["generator"] = max(1, batch["generator"]["target"].numel())
    return found


def step(layers: Sequence[nn.Module], batch: Batch, weights: Mapping[str, float]) -> Step:
    """One step on this batch."""
    return step_of(layers, run(layers, batch), divisors_of(batch), weights)


def step_of(
    layers: Sequence[nn.Module], losses: Mapping[str, Tensor], divisors: Mapping[str, int], weights: Mapping[str, float]
) -> Step:
    """The gradients of every trainable parameter of these losses (sums); zeros where none comes."""
    parameters = {
        layer.parameter_names[local]: parameter  # type: ignore[index]
        for layer in layers
        for local, parameter in layer.named_parameters()
        if parameter.requires_grad
    }
    total = sum(weights[name] * loss / divisors[name] for name, loss in losses.items())
    found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }
    return Step({name: loss.detach() for name, loss in losses.items()}, divisors, gradients)
