"""The image processor that `transformers` saves beside a model: how pixels are normalised. No torch at import."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipefit.errors import FormatError, ModelError

FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of an image processor; the second holds it under `image_processor`."""

PIXEL_FIELDS = ("image_mean", "image_std")
"""Fields of an encoder that the processor's file gives; weights do not depend on them."""

FACTOR = 1 / 255
"""The factor that brings pixels into 0 to 1."""


def complete_config(config: Mapping[str, Any], folder: Path, parts: Mapping[str, Path]) -> dict[str, Any]:
    """Return a configuration whose encoder has `image_mean` and `image_std` of the image processor beside it. Fields of
    the configuration have priority.

    `folder` is the configuration's own, `parts` those of named parts. Raises FormatError if the processor's file cannot
    be read, ModelError if it scales pixels by another factor than 1/255.
    """
    part = "vision" if "vision" in parts else "vision_config"
    encoder = config.get(part)
    beside = parts.get(part, folder)
    path = next((beside / name for name in FILES if (beside / name).is_file()), None)
    if path is None or not isinstance(encoder, Mapping):
        return dict(config)
    towers = encoder.get("vision_config")
    if isinstance(towers, Mapping):  # a SigLIP of two towers
        return {**config, part: {**encoder, "vision_config": {**_read_fields(path), **towers}}}
    return {**config, part: {**_read_fields(path), **encoder}}


def _read_fields(path: Path) -> dict[str, Any]:
    """Return `image_mean` and `image_std` of a processor's file, without absent fields."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError("The image processor's file cannot be read.", where=str(path), seen=error) from None
    fields = data.get("image_processor", data) if isinstance(data, dict) else data
    if not isinstance(fields, dict):
        raise FormatError("The image processor's file holds no object.", where=str(path), seen=type(fields).__name__)
    factor = None if fields.get("do_rescale", True) is False else fields.get("rescale_factor", FACTOR)
    if not isinstance(factor, int | float) or not math.isclose(factor, FACTOR, rel_tol=1e-3):
        raise ModelError(
            "The image processor scales pixels in a way that pipefit does not compute.",
            where=f"{path}, rescale_factor",
            seen="do_rescale false" if factor is None and "rescale_factor" not in fields else repr(factor),
            allowed="1/255",
            next_step="give image_mean and image_std in the vision configuration, and remove the file",
        )
    if fields.get("do_normalize", True) is False:
        return {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    return {name: fields[name] for name in PIXEL_FIELDS if name in fields}
