"""The small multimodal model of the lab's proof, with the cost ratios of MLLM-9B, and samples whose images are skewed.

DistTrain's MLLM-9B (arXiv 2408.04275) is a ViT-Huge of 0.63 B, a Llama of 7 B and a generator of 1 B parameters. A
sample of 8,192 tokens with as many image tokens to see, and to generate, as half of them asks 4 % of its work of the
encoder, 7 % of the generator, the rest of the language model. Here everything is narrow, a sequence has 48 tokens, and
a quarter of them each are patches and latents: encoder and generator are wider beside the language model than theirs,
so that a sample's work is divided nearly alike. Images have two patches each; how many images a sample has is
lognormal, cut where the sequence ends.

For few long samples there is a model whose language model is three times as wide as encoder and generator, as theirs
is, and samples of 768 tokens, nearly four tenths of them each patches and latents.

For what balancing and ordering gain there is a model of an encoder and a language model alone, whose samples have up to
five times as many images as on average, and whose encoder takes 0.8 of a third of the language model.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np

from pipefit.data.multimodal.images import ImageRule
from pipefit.data.multimodal.index import IndexRequest, make_index
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Model
from pipefit.model.registry import describe_config

SEQUENCE = 48
PATCH, TOKENS = 4, 2
"""Pixels of the side of a patch; patches of an image, one beside the other."""

IMAGES, MOST = 6, 11
"""Of a sample, to see and to generate each: on average (before the cut), and at most."""

FROZEN: dict[str, tuple[str, ...]] = {
    "trained": (),
    "vision frozen": ("vision.encoder",),
    "generator frozen": ("generator",),
    "language frozen": ("language",),
    "all but projector frozen": ("vision.encoder", "language", "generator"),
}

VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "image_size": PATCH * TOKENS, "patch_size": PATCH, "num_channels": 3,
}  # fmt: skip
LANGUAGE = {
    "model_type": "llama", "vocab_size": 272, "hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": SEQUENCE,
    "tie_word_embeddings": False,
}  # fmt: skip
GENERATOR = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "latent_size": 3 * PATCH * PATCH, "grid_size": TOKENS, "time_frequencies": 8,
}  # fmt: skip


LONG = 768
LONG_IMAGES, LONG_MOST = 150, 191
"""Tokens of a long sample; its images to see, and to generate, on average (before the cut), and at most."""

WIDE = LANGUAGE | {
    "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 2, "max_position_embeddings": LONG,
}  # fmt: skip

ARRANGED_IMAGES, ARRANGED_MOST = 4, 22
"""Of a sample of the model below, on average (before the cut), and at most."""

ARRANGED_VISION = VISION | {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
ARRANGED_LANGUAGE = LANGUAGE | {"num_hidden_layers": 6}


@lru_cache
def arranging_model() -> Model:
    """The captured model of an encoder and a language model, for what arranging samples gains."""
    config = {
        "model_type": "multimodal", "vision": ARRANGED_VISION, "language": ARRANGED_LANGUAGE,
        "projector_hidden_act": "gelu", "loss_weights": {"language": 1.0},
    }  # fmt: skip
    described = describe_config(config, "multimodal", "the benchmarks' model for arranging")
    return capture_family(described.family, described.config)


@lru_cache
def lab_model(training: str = "trained", long: bool = False) -> Model:
    """The captured model, or that for `long` samples, with what `FROZEN` says of it."""
    config = {
        "model_type": "multimodal", "vision": VISION, "language": WIDE if long else LANGUAGE, "generator": GENERATOR,
        "projector_hidden_act": "gelu", "frozen": list(FROZEN[training]),
        "loss_weights": {"language": 1.0, "generator": 1.0},
    }  # fmt: skip
    described = describe_config(config, "multimodal", "the benchmarks' multimodal model")
    return capture_family(described.family, described.config)


def image_counts(count: int, sigma: float, seed: int, mean: float = IMAGES, most: int = MOST) -> np.ndarray:
    """(count, 2): how many images samples have to see, and to generate."""
    drawn = np.random.default_rng(seed).lognormal(-sigma * sigma / 2, sigma, (count, 2))
    return np.clip(np.rint(mean * drawn), 0, most).astype(np.int64)


def make_samples(folder: Path, count: int, sigma: float, seed: int = 8) -> Path:
    """An index of so many samples: images to see, a text, images to generate. Images are small: decoding is measured
    elsewhere."""
    return _indexed(folder, image_counts(count, sigma, seed), seed)


def make_long_samples(folder: Path, count: int, sigma: float, seed: int = 8) -> Path:
    """An index of long samples, likewise."""
    return _indexed(folder, image_counts(count, sigma, seed, LONG_IMAGES, LONG_MOST), seed, LONG)


def make_arranged_samples(folder: Path, count: int, sigma: float, seed: int = 8) -> Path:
    """An index of samples for the model for arranging: nothing to generate, more images to see."""
    counts = image_counts(count, sigma, seed, ARRANGED_IMAGES, ARRANGED_MOST)
    counts[:, 1] = 0
    return _indexed(folder, counts, seed)


def _indexed(folder: Path, counts: np.ndarray, seed: int, sequence: int = SEQUENCE) -> Path:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    for number in range(16):
        Image.fromarray(draw.integers(0, 256, (PATCH, PATCH * TOKENS, 3), dtype=np.uint8)).save(
            folder / f"{number}.png"
        )
    with (folder / "manifest.jsonl").open("w") as manifest:
        for seen, generated in counts.tolist():
            pick = draw.integers(0, 16, seen + generated).tolist()
            parts = [{"image": f"{one}.png"} for one in pick[:seen]]
            text = {"text": "x" * (sequence - 1 - TOKENS * len(pick))}
            parts += [text, *({"generate": f"{one}.png"} for one in pick[seen:])]
            manifest.write(json.dumps({"parts": parts}) + "\n")
    rule = ImageRule(patch=PATCH, max_patches=TOKENS)
    make_index(
        IndexRequest(source=str(folder / "manifest.jsonl"), images=rule, generated=rule, check="header"),
        folder / "index",
    )
    return folder / "index"
