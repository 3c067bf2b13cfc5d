"""The index: a manifest converted once to arrays that every rank maps: tokens, parts, image sizes, paths.

The index contains everything that determines a step, so all ranks agree without communication. A broken or absent image
is found when the index is made, and its sample is then on no rank. `make_index` writes the folder under a temporary
name and renames it; `open_index` only maps.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipefit.codec import dump_text, from_data
from pipefit.data.multimodal.folder import Task, read_samples
from pipefit.data.multimodal.images import BrokenImageError, ImageRule, ImageSize, read_size, require_pillow
from pipefit.data.multimodal.manifest import ManifestSample, SamplePart, printable_name
from pipefit.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from pipefit.errors import DataError, FormatError

OnBroken = Literal["fail", "skip"]
Check = Literal["decode", "header"]

TEXT, PROMPT, IMAGE, GENERATE, END = range(5)
"""Kinds of parts as numbers. A prompt is a text without labels; END is the separator after a sample."""

_FORMAT = 1
_ARRAYS = ("tokens", "sample_parts", "parts", "images", "texts", "text_ends")
_SAMPLES_AT_ONCE = 512
_REPORTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRequest:
    """The manifest to index, and the conversion of texts and images to tokens."""

    source: str
    "A manifest (jsonl, parquet) or a folder of images."
    task: Task = "caption"
    "For a folder: whether texts are learned from the images, or images generated from the texts."
    tokenizer: str = BYTES
    "`bytes`, a tokenizer.json, or a folder that contains one."
    images: ImageRule = field(default_factory=ImageRule)
    "Conversion of input images to patches."
    generated: ImageRule = field(default_factory=ImageRule)
    "Conversion of generated images to latent patches."
    image_token: int = 0
    "The placeholder id of an input patch in the sequence; the model replaces its embedding by the patch."
    generation_token: int = 0
    "The placeholder id of a latent patch to be generated."
    on_broken: OnBroken = "fail"
    "The action for a broken or absent image: end the indexing, or leave out its sample (counted and reported)."
    check: Check = "decode"
    "`decode` reads every image fully; `header` reads its size only, and broken pixels are found during training."

    def __post_init__(self) -> None:
        """Raises DataError for token ids below 0."""
        for option, token in (("--image-token", self.image_token), ("--generation-token", self.generation_token)):
            if token < 0:
                raise DataError("This is no token id.", where=option, seen=token, allowed="0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSample:
    """A sample that is not in the index, and the reason."""

    sample: str
    where: str
    image: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSummary:
    """The description of an index, stored with it."""

    format: int
    request: IndexRequest
    root: str
    "The base folder of image paths."
    samples: int
    images: int
    tokens: int
    "Tokens of all texts."
    image_bytes: int
    vocabulary: int
    separator: int | None
    left_out: int
    "Samples whose image is broken or absent."
    reported: tuple[SkippedSample, ...]
    "The first thousand of them."
    digest: str
    "Hash of all arrays and rules: equal data have equal digests."


class SampleIndex:
    """The metadata of all samples, memory-mapped."""

    def __init__(self, folder: Path, summary: IndexSummary) -> None:
        self.folder, self.summary = folder, summary
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        self.tokens: NDArray[Any] = arrays["tokens"]
        "Ids of all texts, concatenated."
        self.sample_parts: NDArray[Any] = arrays["sample_parts"]
        "(samples + 1,): the start of each sample's parts."
        self.parts: NDArray[Any] = arrays["parts"]
        "(parts, 3): kind; first token, or number of the image; number of tokens, patches or latents."
        self.images: NDArray[Any] = arrays["images"]
        "(images, 3): width, height, bytes of the file."
        self._texts, self._text_ends = arrays["texts"], arrays["text_ends"]
        lengths = [len(self.sample_parts) - 1, len(self.images), len(self.tokens), len(self._text_ends)]
        said = [summary.samples, summary.images, summary.tokens, summary.samples + summary.images]
        ends = [int(self.sample_parts[-1]), int(self._text_ends[-1])]
        if lengths != said or ends != [len(self.parts), len(self._texts)]:
            raise ValueError("its arrays are of another index")

    @property
    def samples(self) -> int:
        return self.summary.samples

    def sample_name(self, sample: int) -> str:
        """Return the `id` of a sample."""
        return self._read_text(sample)

    def image_path(self, image: int) -> Path:
        """Return the path of an image's file."""
        return Path(self.summary.root) / self._read_text(self.samples + image)

    def image_rule(self, kind: int) -> ImageRule:
        """Return the conversion of images of this kind to patches."""
        return self.summary.request.generated if kind == GENERATE else self.summary.request.images

    def _read_text(self, number: int) -> str:
        start = int(self._text_ends[number - 1]) if number else 0
        return bytes(self._texts[start : int(self._text_ends[number])]).decode("utf-8", "surrogatepass")


def make_index(request: IndexRequest, folder: Path, threads: int = 8) -> IndexSummary:
    """Read the manifest and the images' sizes, and write the index to `folder`.

    Raises DataError for a source that is missing, broken or empty, for an image that is broken or absent unless
    `on_broken` is `skip`, and if `folder` cannot be written or is not an index.
    """
    from concurrent.futures import ThreadPoolExecutor

    require_pillow()
    source = Path(request.source).expanduser()
    tokenizer = load_tokenizer(request.tokenizer)
    root = source if source.is_dir() else source.parent
    builder = _IndexBuilder(request, tokenizer, root.absolute())
    with ThreadPoolExecutor(threads) as pool:
        for block in _sample_blocks(read_samples(source, request.task)):
            builder.add_samples(block, list(pool.map(builder.read_sizes, block)))
    summary = builder.make_summary(str(source))
    _write_index(folder, builder.to_arrays(), summary)
    return summary


def open_index(folder: Path) -> SampleIndex:
    """Open the index that `make_index` wrote. Raises DataError if it is absent, of another version or damaged."""
    try:
        data = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        summary = from_data(IndexSummary, data, str(folder / "index.json"))
        if summary.format != _FORMAT:
            raise ValueError(f"format {summary.format}, not {_FORMAT}")
        return SampleIndex(folder, summary)
    except (OSError, ValueError, EOFError, FormatError) as error:
        raise DataError(
            "This is no index of samples, or a damaged one.",
            where=str(folder),
            seen=str(error).splitlines()[0],
            next_step=f"make it: pipefit data MANIFEST -o {folder}",
        ) from None


PartSizes = list[ImageSize | SkippedSample | None]
"""For every part of a sample: the size of its image, the reason it has none, or None for a text."""


class _IndexBuilder:
    def __init__(self, request: IndexRequest, tokenizer: Tokenizer, root: Path) -> None:
        self._request, self._tokenizer, self._root = request, tokenizer, root
        self._tokens: list[NDArray[np.int64]] = []
        self._token_count = 0
        self._sample_parts, self._parts = [0], list[tuple[int, int, int]]()
        self._images, self._names, self._paths = list[ImageSize](), list[str](), list[str]()
        self._left_out, self._reported = 0, list[SkippedSample]()

    def read_sizes(self, sample: ManifestSample) -> PartSizes:
        """Return the sizes of a sample's images. Pure: may run in parallel."""
        return [None if part.kind == "text" else self._read_size(sample, part) for part in sample.parts]

    def add_samples(self, samples: list[ManifestSample], sizes: list[PartSizes]) -> None:
        """Append samples in their order. Raises DataError at a broken image, unless broken images are skipped."""
        for sample, of_parts in zip(samples, sizes, strict=True):
            broken = next((size for size in of_parts if isinstance(size, SkippedSample)), None)
            if broken is None:
                self._append_sample(sample, of_parts)
            elif self._request.on_broken == "fail":
                raise _broken_image_error(broken)
            else:
                self._left_out += 1
                self._reported += [broken] if len(self._reported) < _REPORTED else []

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        texts = [name.encode("utf-8", "surrogatepass") for name in (*self._names, *self._paths)]
        vocabulary = self._tokenizer.vocabulary
        kind = np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.uint32
        return {
            "tokens": np.concatenate([np.zeros(0, np.int64), *self._tokens]).astype(kind),
            "sample_parts": np.array(self._sample_parts, dtype=np.int64),
            "parts": np.array(self._parts, dtype=np.int64).reshape(-1, 3),
            "images": np.array(self._images, dtype=np.int64).reshape(-1, 3),
            "texts": np.frombuffer(b"".join(texts), dtype=np.uint8),
            "text_ends": np.cumsum([len(text) for text in texts], dtype=np.int64),
        }

    def make_summary(self, source: str) -> IndexSummary:
        if not self._names:
            raise DataError(
                "There is no sample to train on.",
                where=source,
                seen=f"{self._left_out} samples left out for their images" if self._left_out else "no rows",
                next_step="name a manifest with samples, or mend the images",
            )
        state = hashlib.sha256(f"{_FORMAT} {self._tokenizer.digest} {self._request.image_token}".encode())
        state.update(f"{self._request.images} {self._request.generated} {self._request.generation_token}".encode())
        for name, array in self.to_arrays().items():
            state.update(f"{name} {array.shape}".encode() + array.tobytes())
        return IndexSummary(
            format=_FORMAT,
            request=self._request,
            root=str(self._root),
            samples=len(self._names),
            images=len(self._images),
            tokens=self._token_count,
            image_bytes=sum(image.file_bytes for image in self._images),
            vocabulary=self._tokenizer.vocabulary,
            separator=self._tokenizer.separator,
            left_out=self._left_out,
            reported=tuple(self._reported),
            digest=state.hexdigest()[:24],
        )

    def _read_size(self, sample: ManifestSample, part: SamplePart) -> ImageSize | SkippedSample:
        try:
            return read_size(self._root / part.value, check=self._request.check == "decode")
        except BrokenImageError as error:
            return SkippedSample(
                sample=printable_name(sample.name),
                where=printable_name(sample.where),
                image=printable_name(part.value),
                reason=str(error),
            )

    def _append_sample(self, sample: ManifestSample, sizes: PartSizes) -> None:
        for part, size in zip(sample.parts, sizes, strict=True):
            if isinstance(size, ImageSize):
                self._append_image(part, size)
            else:
                self._append_text(TEXT if part.learn else PROMPT, self._encode_text(part.value))
        if self._tokenizer.separator is not None:
            self._append_text(END, np.array([self._tokenizer.separator], dtype=np.int64))
        self._sample_parts.append(len(self._parts))
        self._names.append(printable_name(sample.name))

    def _append_image(self, part: SamplePart, size: ImageSize) -> None:
        generate = part.kind == "generate"
        rule = self._request.generated if generate else self._request.images
        self._parts.append(
            (GENERATE if generate else IMAGE, len(self._images), rule.token_count(size.width, size.height))
        )
        self._images.append(size)
        self._paths.append(part.value)

    def _append_text(self, kind: int, ids: NDArray[np.int64]) -> None:
        if len(ids):
            self._parts.append((kind, self._token_count, len(ids)))
            self._tokens.append(ids)
            self._token_count += len(ids)

    def _encode_text(self, text: str) -> NDArray[np.int64]:
        """Encode a text without the separator, which comes once after the whole sample."""
        ids = self._tokenizer.encode(text.encode("utf-8", errors="replace"))
        return ids if self._tokenizer.separator is None else ids[:-1]


def _sample_blocks(samples: Iterable[ManifestSample]) -> Iterable[list[ManifestSample]]:
    block: list[ManifestSample] = []
    for sample in samples:
        block.append(sample)
        if len(block) == _SAMPLES_AT_ONCE:
            yield block
            block = []
    yield block


def _broken_image_error(broken: SkippedSample) -> DataError:
    absent = broken.reason == "there is no such file"
    return DataError(
        "The manifest names an image whose file is not there." if absent else "An image is broken.",
        where=f"{broken.where} (sample {broken.sample})",
        seen=broken.image if absent else f"{broken.image}: {broken.reason}",
        allowed="image files that are there and can be read, relative to the manifest",
        next_step="mend the file or remove the row, or leave such samples out with --on-broken skip",
    )


def _write_index(folder: Path, arrays: dict[str, NDArray[Any]], summary: IndexSummary) -> None:
    import shutil

    if folder.exists() and not (folder / "index.json").is_file():
        raise DataError(
            "The folder for the index exists and is not an index.",
            where=str(folder),
            allowed="a new folder, or an index, which is replaced",
        )
    folder = folder.resolve()  # "." has no name, and a symbolic link is kept
    aside = folder.with_name(f".{folder.name}.{os.urandom(16).hex()}")
    before = aside.with_name(f"{aside.name}.old")
    try:
        aside.mkdir(parents=True)
        for name, array in arrays.items():
            np.save(aside / f"{name}.npy", array)
        (aside / "index.json").write_text(dump_text(summary), encoding="utf-8")
        if folder.exists():
            os.replace(folder, before)
        try:
            os.replace(aside, folder)
        except OSError:
            if before.exists():
                os.replace(before, folder)
            raise
    except OSError as error:
        raise DataError("The index cannot be written.", where=str(folder), seen=error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(before, ignore_errors=True)
