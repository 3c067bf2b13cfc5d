"""Whether a model takes the samples of an index: asked when a plan is made for them, and when a run starts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pipefit.data.multimodal.images import CHANNELS
from pipefit.data.multimodal.index import GENERATE, IMAGE, Index
from pipefit.data.multimodal.sample_rows import LATENTS, PATCHES, SampleRows
from pipefit.errors import DataError
from pipefit.model.graph import Layer, Model, Tensor

FLAGS = {IMAGE: "--patch", GENERATE: "--latent-patch"}
"""Of `pipefit data`: the side of a patch."""


def check_index(model: Model, index: Index, rows: SampleRows) -> None:
    """Raises DataError where samples have what the model has no module for, or cut otherwise than it takes them."""
    spaces = {module.space for module in model.modules}
    widths = {
        name: (tensor.shape[-1], tensor.dtype)
        for module in model.modules
        for name, tensor in data_inputs(model, module.layers).items()
    }
    for space, kind, name, words in (
        (PATCHES, IMAGE, "pixels", "to look at"),
        (LATENTS, GENERATE, "noisy", "to generate"),
    ):
        count = int(rows.counts[space].sum())
        if count and space not in spaces:
            raise DataError(
                f"The samples have images {words}, and the model has no module for them.",
                where=str(index.folder),
                seen=f"{count} tokens of {space}",
                allowed=f"samples without images {words}, or a model with that module",
            )
        values = index.rule(kind).patch_values
        if space in spaces and name in widths and widths[name][0] != values:
            raise DataError(
                "The images are cut into other patches than the model takes.",
                where=str(index.folder),
                seen=f"{values} numbers a patch of images {words}",
                allowed=f"{widths[name][0]}",
                next_step=f"pipefit data SOURCE -o INDEX {FLAGS[kind]} {math.isqrt(int(widths[name][0]) // CHANNELS)}",
            )
    known = model.config["language"].get("vocab_size") if "language" in model.config else None
    if known is not None and index.summary.vocabulary > int(known):
        raise DataError(
            "The tokenizer of the index has more tokens than the model knows.",
            where=str(index.folder),
            seen=index.summary.vocabulary,
            allowed=f"at most {known}",
        )


def data_inputs(model: Model, layers: Iterable[Layer]) -> dict[str, Tensor]:
    """What these layers take from the step plan, by name."""
    return {
        tensor.name: tensor
        for layer in layers
        for tensor in model.layer_graph(layer).inputs
        if tensor.role != "activation"
    }
