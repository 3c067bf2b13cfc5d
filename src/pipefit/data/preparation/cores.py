"""Estimate the cores that preparation needs: measured seconds per image, images per step, and the step time.

Images dominate the cost. Reading and decoding scale with the pixels of the file, resizing and cutting with the output
pixels, and each image has a constant cost. The rule: cores >= (images per step x seconds per image) / step seconds x
1.3. Every device prepares its own data, so an image that several devices need, such as the shards of a replica, counts
once for each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipefit.data.multimodal.feeds import DECODED
from pipefit.data.multimodal.fits import data_inputs
from pipefit.data.multimodal.images import BrokenImageError, ImageSize, read_patches
from pipefit.data.multimodal.index import GENERATE, IMAGE, SampleIndex
from pipefit.data.multimodal.sample_rows import PATCHES, SampleRows
from pipefit.data.stepplan import batch_shape
from pipefit.model.graph import Model
from pipefit.plan.types import Plan, Stage

MARGIN = 1.3
"""Safety factor for images of unequal cost and for the pool's own work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRate:
    """Seconds of one core for an image: `image_s + pixel_s x pixels of the file + patch_s x its tokens`."""

    image_s: float
    pixel_s: float
    patch_s: float
    measured: int = 0
    "Number of images that the rate was fitted to."

    def decode_seconds(self, pixels: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of images with these pixels in their files and these numbers of tokens."""
        result: NDArray[np.float64] = self.image_s + self.pixel_s * pixels + self.patch_s * tokens
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreDemand:
    """The cores that preparation needs, beside the devices of a plan."""

    cores: int
    images: float
    "Per step, on average."
    image_s: float
    "Of one core per image, on average."
    step_s: float
    copies: float = 1.0
    "Devices that each decode the same image, on average."

    def to_text(self) -> str:
        """Return a one-line description."""
        often = f", each decoded by {self.copies:.3g} devices," if self.copies != 1 else ""
        return (
            f"preparation: {self.cores} cores for {self.images:.0f} images{often} in steps of {self.step_s:.3g} s "
            f"({self.image_s * 1e3:.2f} ms per image on one core, measured on this host)"
        )


def image_sizes(index: SampleIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (pixels of the file, tokens) of every use of an image in the index."""
    uses = _image_uses(index)
    sizes = np.asarray(index.images)[uses[:, 1]]
    return sizes[:, 0] * sizes[:, 1], uses[:, 2]


def measured_rate(index: SampleIndex, images: int = 64) -> ImageRate:
    """Decode a sample of the index's images, evenly spread, on one core, and fit the rate (non-negative least squares).

    Unreadable images are skipped; if none is readable, all rates are 0.
    """
    uses = _image_uses(index)
    rows = []
    for use_index in np.unique(np.linspace(0, len(uses) - 1, min(images, len(uses))).astype(np.int64)):
        kind, image, tokens = uses[use_index].tolist()
        size = ImageSize(*index.images[image].tolist())
        began_s = time.process_time()
        try:
            read_patches(index.image_path(image), size, index.image_rule(kind))
        except BrokenImageError:
            continue
        rows.append((1.0, float(size.width * size.height), float(tokens), time.process_time() - began_s))
    return _fit_rate(np.array(rows)) if rows else ImageRate(image_s=0, pixel_s=0, patch_s=0)


def takes_decoded(model: Model, stage: Stage) -> bool:
    """Return whether the layers of a stage have inputs that need decoded images."""
    module = next(module for module in model.modules if module.name == stage.module)
    return not data_inputs(model, module.layers[slice(*stage.layers)]).keys().isdisjoint(DECODED.get(stage.space, ()))


def decoding_copies(plan: Plan, model: Model) -> dict[str, float]:
    """Return packed space -> number of devices that decode the same image.

    These are the shards of a replica, in every stage that takes its pixels. Stages that take turns each have their
    share of the images.
    """
    shape, copies = batch_shape(plan), dict.fromkeys(DECODED, 0.0)
    for number, stage in enumerate(plan.stages):
        if takes_decoded(model, stage):
            group, part = plan.stage_mesh(number), len(shape.own_units(number)) / shape.stage_microbatches(number)
            copies[stage.space] += part * group.size / group.find_axis("replica").size
    return copies


def cores_needed(
    index: SampleIndex,
    rows: SampleRows,
    batch: int,
    step_s: float,
    rate: ImageRate,
    copies: Mapping[str, float] | None = None,
) -> CoreDemand:
    """Return the cores with which preparation keeps up, on average, with steps of `step_s` seconds and `batch` rows.

    `copies` is the result of `decoding_copies`; None counts every image once.
    """
    seconds = rate.decode_seconds(*image_sizes(index))
    times = np.ones(len(seconds))
    for space, often in (copies or {}).items():
        times[_image_uses(index)[:, 0] == (IMAGE if space == PATCHES else GENERATE)] = often
    images = batch * float(rows.images.mean())
    image_s = float(seconds.mean()) if len(seconds) else 0.0
    work_s = float((seconds * times).mean()) if len(seconds) else 0.0
    return CoreDemand(
        cores=cores_for(images, work_s, step_s),
        images=images,
        image_s=image_s,
        step_s=step_s,
        copies=float(times.mean()) if len(times) else 1.0,
    )


def cores_for(images: float, image_s: float, step_s: float) -> int:
    """Return whole cores for `images` per step; at least one if there are any."""
    return math.ceil(images * image_s / step_s * MARGIN - 1e-9) if images else 0


def _image_uses(index: SampleIndex) -> NDArray[np.int64]:
    """Return (uses of images, 3) of the index's parts."""
    parts = np.asarray(index.parts)
    image_parts: NDArray[np.int64] = parts[(parts[:, 0] == IMAGE) | (parts[:, 0] == GENERATE)]
    return image_parts


def _fit_rate(rows: NDArray[np.float64]) -> ImageRate:
    """Fit the last column by the others with non-negative least squares, each column scaled to its mean."""
    from scipy.optimize import nnls

    scale = np.maximum(rows[:, :3].mean(axis=0), 1e-12)
    image_s, pixel_s, patch_s = nnls(rows[:, :3] / scale, rows[:, 3])[0] / scale
    return ImageRate(image_s=float(image_s), pixel_s=float(pixel_s), patch_s=float(patch_s), measured=len(rows))
