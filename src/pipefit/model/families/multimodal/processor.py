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

FACTOR = 1 / 255
"""The factor that brings pixels into 0 to 1."""


def add_pixel_fields(vision: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return an encoder's configuration with `image_mean` and `image_std` of the image processor in its folder. Fields
    that the configuration has stay.

    Raises FormatError if the file cannot be read, ModelError if it scales pixels by another factor than 1/255.
    """
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    return dict(vision) if path is None else {**_read_fields(path), **vision}


def _read_fields(path: Path) -> dict[str, Any]:
    """Return `image_mean` and `image_std` of a processor's file, without absent fields."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError("The image processor's file cannot be read.", where=str(path), seen=error) from None
    fields = data.get("image_processor", data) if isinstance(data, dict) else data
    if not isinstance(fields, dict):
        raise FormatError("The image processor's file holds no object.", where=str(path), seen=type(fields).__name__)
    if fields.get("do_normalize", True) is False:
        return {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    factor = fields.get("rescale_factor", FACTOR)
    if fields.get("do_rescale", True) is False or not math.isclose(float(factor), FACTOR, rel_tol=1e-3):
        raise ModelError(
            "The image processor scales pixels in a way that pipefit does not compute.",
            where=f"{path}, rescale_factor",
            seen="do_rescale false" if fields.get("do_rescale", True) is False else factor,
            allowed="1/255",
            next_step="give image_mean and image_std in the vision configuration, and remove the file",
        )
    return {name: fields[name] for name in ("image_mean", "image_std") if name in fields}
