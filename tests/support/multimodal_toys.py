"""Folders of small images, their manifests and indexes, and plans with replica counts per module."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.support.data_toys import toy_plan

from pipefit.data.multimodal.feeds import SampleSource
from pipefit.data.multimodal.images import ImageRule
from pipefit.data.multimodal.index import IndexRequest, SampleIndex, make_index, open_index
from pipefit.data.multimodal.sample_rows import SampleRows, rows_of_index
from pipefit.data.stepplan import BatchShape, batch_shape

SEQUENCE = 96
RULE = ImageRule(patch=4, max_patches=12)
LATENT_RULE = ImageRule(patch=2, max_patches=6)


def write_images(folder: Path, count: int, seed: int = 0) -> list[str]:
    """Photographs of noise, of many sizes, JPEG and PNG; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, names = np.random.default_rng(seed), []
    for number in range(count):
        width, height = (int(size) for size in generator.integers(3, 40, 2))
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        names.append(f"{number:03d}.{'jpg' if number % 2 else 'png'}")
        Image.fromarray(pixels).save(folder / names[-1])
    return names


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mixed_manifest(folder: Path, samples: int = 24) -> Path:
    """Samples with 0 to 3 images to look at, every third with one to generate, texts that are learned and not."""
    names = iter(write_images(folder / "images", 4 * samples) * 2)
    generator, rows = np.random.default_rng(1), []
    for number in range(samples):
        parts: list[dict[str, Any]] = [{"text": "look", "learn": False}]
        for _ in range(int(generator.integers(0, 4))):
            parts += [{"image": f"images/{next(names)}"}, {"text": "x" * int(generator.integers(1, 6))}]
        if number % 3 == 0:
            parts.append({"generate": f"images/{next(names)}"})
        rows.append({"id": f"s{number}", "parts": parts})
    return write_rows(folder / "manifest.jsonl", rows)


def mixed_index(folder: Path, samples: int = 24, start_token: bool = False) -> SampleIndex:
    request = IndexRequest(
        source=str(mixed_manifest(folder, samples)),
        images=replace(RULE, start_token=start_token),
        generated=LATENT_RULE,
        image_token=1,
        generation_token=2,
    )
    make_index(request, folder / "index")
    return open_index(folder / "index")


def source_of(index: SampleIndex, **options: Any) -> SampleSource:
    return SampleSource(index=index, rows=rows_of_index(index, SEQUENCE, images=True), seed=3, **options)


def shape_of(
    batch: int, microbatches: int, shares: tuple[tuple[int, ...], ...], multiples: tuple[int, ...] | None = None
) -> BatchShape:
    return batch_shape(
        toy_plan(batch=batch, sequence=SEQUENCE, microbatches=microbatches, shares=shares, multiples=multiples, seed=3)
    )


def made_rows(patches: Any, latents: Any = None) -> SampleRows:
    """Rows with these counts, of nothing."""
    counts = np.asarray(patches, dtype=np.int64)
    zeros = np.zeros_like(counts)
    of_latents = zeros if latents is None else np.asarray(latents, dtype=np.int64)
    return SampleRows(
        count=len(counts), sequence=SEQUENCE, last_labels=SEQUENCE, held_out=0, samples=np.arange(len(counts)),
        starts=np.arange(len(counts) + 1), counts={"samples": zeros + SEQUENCE, "patches": counts,
        "latents": of_latents}, squares={"samples": zeros, "patches": counts**2, "latents": of_latents**2},
        images=zeros, label_counts=zeros + 1, latent_values=1, too_long=0,
    )  # fmt: skip
