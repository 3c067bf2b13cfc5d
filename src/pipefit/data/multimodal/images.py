"""Images: their size from the header alone, their number of patches, and their pixels as patches.

The patch grid of an image is a function of its width and height, so costs are known before decoding. Pixels stay uint8;
the model normalises them on the device. Pillow is imported inside the functions that read files.
"""

from __future__ import annotations

import math
import os
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import DataError
from pipefit.extras import install_command

CHANNELS = 3

_ORIENTATION, _TURNED = 0x0112, frozenset({5, 6, 7, 8})
"""The EXIF orientation tag, and its values that swap width and height."""

_TRANSPOSED = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
"""The Pillow operation that undoes each value of the tag."""

_GREY_16 = frozenset({"I", "I;16", "I;16B", "I;16L", "I;16N"})
"""Pillow modes with more than 8 bits of grey, which Pillow would clip at 255 instead of scaling."""


_PAUSES_S = (0.05, 0.5)
"""Pauses before retrying a file that the operating system could not read."""

ReadT = TypeVar("ReadT")


class BrokenImageError(Exception):
    """A file that is absent, cannot be read or is not an image; its text is a short reason."""


class ImageSize(NamedTuple):
    """Facts about an image that are known without decoding it."""

    width: int
    height: int
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRule:
    """The conversion of an image to patches: scaled down to at most `max_patches`, aspect ratio kept, cut at whole
    patches."""

    patch: int = 16
    "Side of a patch in pixels; one patch is one token."
    max_patches: int = 1024
    "Larger images are scaled down to this number of patches."
    side: int = 0
    "If above 0, every image is resized to a square of this many pixels a side (encoders of fixed size)."
    start_token: bool = False
    "Whether an extra token without pixels precedes every image (ViT's class token)."
    drops_start: bool = False
    "Whether the start token has no place in the sequence of the language model."
    end_token: bool = False
    "Whether an extra token without pixels follows every image (LLaVA's newline)."
    window: int = 0
    """If above 0, encoders get the patches window by window, each of at most this many patches a side, and row by row
    within a window. Else row by row."""

    def __post_init__(self) -> None:
        """Raises DataError for sizes that give no patches."""
        if self.patch < 1 or self.max_patches < 1 or self.side < 0 or self.side % self.patch or self.window < 0:
            raise DataError(
                "Images cannot be cut into such patches.",
                where="image rule",
                seen=f"patches of {self.patch} pixels, at most {self.max_patches}, side {self.side}, "
                f"window {self.window}",
                allowed="a patch and a number of patches of at least 1; a side that is a multiple of the patch, or 0; "
                "a window of at least 0 patches",
            )

    @property
    def patch_values(self) -> int:
        """Values of one patch, channels included."""
        return CHANNELS * self.patch**2

    @property
    def dropped_tokens(self) -> int:
        """The number of an image's tokens without a place in the sequence of the language model."""
        return int(self.start_token and self.drops_start)

    def token_count(self, width: int, height: int) -> int:
        """Return the number of tokens of an image of this size."""
        rows, columns = self.patch_grid(width, height)
        return rows * columns + self.start_token + self.end_token

    def patch_order(self, width: int, height: int) -> NDArray[np.int64]:
        """Return the patches of an image of this size, numbered row by row, in the order of the encoder."""
        rows, columns = self.patch_grid(width, height)
        number = np.arange(rows * columns, dtype=np.int64)
        if not self.window:
            return number
        row, column = np.divmod(number, columns)
        return np.lexsort((column, row, column // self.window, row // self.window))

    def token_order(self, width: int, height: int) -> NDArray[np.int64]:
        """Return the tokens of an image of this size in the order of the encoder, numbered as in the sequence of the
        language model. A start token that is not part of the sequence is -1."""
        order = self.patch_order(width, height) + int(self.start_token) - self.dropped_tokens
        first = [-1 if self.drops_start else 0] if self.start_token else []
        last = [order.size + len(first) - self.dropped_tokens] if self.end_token else []
        return np.array([*first, *order, *last], dtype=np.int64)

    def patch_grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (rows, columns) of patches of an image of this size: at least one, at most `max_patches` in all."""
        if self.side:
            return self.side // self.patch, self.side // self.patch
        scale = min(1.0, math.sqrt(self.max_patches * self.patch**2 / (width * height)))
        rows = min(self.max_patches, max(1, math.floor(height * scale / self.patch)))
        columns = min(self.max_patches // rows, max(1, math.floor(width * scale / self.patch)))
        return rows, columns


def read_size(path: Path, check: bool) -> ImageSize:
    """Return the displayed size of an image, with its EXIF rotation applied. With `check`, also decode all of it.

    Raises BrokenImageError, and MemoryError: an image that runs out of memory may be intact.
    """
    return _retry_read(lambda: _decoded_size(path, check))


def _decoded_size(path: Path, check: bool) -> ImageSize:
    with _open_image(path) as image:
        width, height = image.size
        if _exif_orientation(image) in _TURNED:
            width, height = height, width
        if check:
            _load_pixels(image)
        if image.mode == "F" or (check and image.mode in _GREY_16):
            _convert_to_rgb(image)
    return ImageSize(width, height, os.path.getsize(path))


def read_patches(path: Path, indexed: ImageSize, rule: ImageRule) -> NDArray[np.uint8]:
    """Return (tokens, channels * patch * patch) uint8, in the rule's order; within a patch by channel, then row, then
    column.

    The start and end tokens, if there are any, are zeros. Raises BrokenImageError if the file is no longer an image or
    its size differs from `indexed`, and MemoryError.
    """
    return _retry_read(lambda: _decode_patches(path, indexed, rule))


def _decode_patches(path: Path, indexed: ImageSize, rule: ImageRule) -> NDArray[np.uint8]:
    from PIL import Image

    width, height, file_bytes = indexed
    rows, columns = rule.patch_grid(width, height)
    target = columns * rule.patch, rows * rule.patch
    with _open_image(path) as image:
        orientation = _exif_orientation(image)
        turned = orientation in _TURNED
        if image.size != ((height, width) if turned else (width, height)):
            raise BrokenImageError(f"{image.size[0]} x {image.size[1]} pixels where {width} x {height} were indexed")
        image.draft("RGB", target[::-1] if turned else target)  # JPEG decodes to half or a quarter at once
        _load_pixels(image)
        seen = _convert_to_rgb(image)
        if orientation in _TRANSPOSED:
            seen = seen.transpose(Image.Transpose[_TRANSPOSED[orientation]])
        pixels_HWC = np.asarray(seen.resize(target, Image.Resampling.BICUBIC))
    if (seen_bytes := os.path.getsize(path)) != file_bytes:
        raise BrokenImageError(f"another file: {seen_bytes} bytes where {file_bytes} were indexed")
    patches = to_patches(pixels_HWC, rule.patch)
    return _add_tokens(patches[rule.patch_order(width, height)] if rule.window else patches, rule)


def to_patches(pixels_HWC: NDArray[np.uint8], patch: int) -> NDArray[np.uint8]:
    """Return (height * width / patch**2, channels * patch**2): patches row by row, each by channel, row and column."""
    height, width, channels = pixels_HWC.shape
    tiles = pixels_HWC.reshape(height // patch, patch, width // patch, patch, channels)
    return np.ascontiguousarray(tiles.transpose(0, 2, 4, 1, 3)).reshape(-1, channels * patch**2)


def grid_places(width: int, height: int, rule: ImageRule) -> NDArray[np.int64]:
    """Return (tokens, 4): row, column, rows, columns of every patch; row -1 is the start token, row -2 the end
    token."""
    rows, columns = rule.patch_grid(width, height)
    row, column = np.divmod(rule.patch_order(width, height), columns)
    if rule.start_token:
        row, column = np.append(-1, row), np.append(0, column)
    if rule.end_token:
        row, column = np.append(row, -2), np.append(column, 0)
    return np.stack([row, column, np.full_like(row, rows), np.full_like(row, columns)], axis=1)


def require_pillow() -> None:
    """Raise DataError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise DataError(
            "Reading images needs Pillow, which is not installed.", next_step=install_command("PIL")
        ) from None


def decoder_versions() -> str:
    """Return the installed versions of the libraries that determine the bytes of a decoded image."""
    try:
        import PIL
    except ImportError:
        return f"no Pillow, numpy {np.__version__}"
    return f"Pillow {PIL.__version__}, numpy {np.__version__}"


def _retry_read(read: Callable[[], ReadT]) -> ReadT:
    """Return the result of `read`, retrying errors of the operating system, which may be temporary.

    Raises BrokenImageError after the last attempt.
    """
    for pause_s in _PAUSES_S:
        try:
            return read()
        except OSError:
            time.sleep(pause_s)
    try:
        return read()
    except OSError as error:
        raise BrokenImageError(_error_reason(error)) from None


def _add_tokens(patches: NDArray[np.uint8], rule: ImageRule) -> NDArray[np.uint8]:
    """Return the patches with zeros for the start and end tokens."""
    return np.pad(patches, ((int(rule.start_token), int(rule.end_token)), (0, 0)))


def _open_image(path: Path) -> Any:
    """Return a PIL image whose header has been read."""
    from PIL import Image

    if not _is_file(path):
        raise BrokenImageError("there is no such file")
    with _decode_errors(), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(path)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: an impossible file name
        return False


@contextmanager
def _decode_errors() -> Iterator[None]:
    """Convert errors of an image decoder, of any type, to BrokenImageError.

    Errors of the operating system, which have an errno, and MemoryError are not converted.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise BrokenImageError(_error_reason(error)) from None


def _exif_orientation(image: Any) -> int:
    """Return the EXIF orientation, 1 if there is none before the pixels: Pillow would decode a PNG to look behind
    them."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    try:
        with _decode_errors():
            return int(image.getexif().get(_ORIENTATION, 1))
    except BrokenImageError:  # a damaged tag counts as absent
        return 1


def _load_pixels(image: Any) -> None:
    with _decode_errors():
        image.load()


def _convert_to_rgb(image: Any) -> Any:
    """Return a decoded image with 8 bits per channel. Transparent pixels get the colour stored in the file."""
    from PIL import Image

    if image.mode == "F":
        raise BrokenImageError("pixels are floating-point numbers, whose range nobody knows")
    if image.mode in _GREY_16:
        grey_HW = np.asarray(image).astype(np.int64)
        if grey_HW.min() < 0 or grey_HW.max() > 65535:
            raise BrokenImageError("grey of more than 16 bits")
        image = Image.fromarray(((grey_HW + 128) // 257).astype(np.uint8))
    with _decode_errors():  # Pillow reads some modes that it cannot convert
        return image.convert("RGB")


def _error_reason(error: Exception) -> str:
    lines = (getattr(error, "strerror", None) or str(error)).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return "not an image that Pillow knows" if text.startswith("cannot identify") else text[:120]
