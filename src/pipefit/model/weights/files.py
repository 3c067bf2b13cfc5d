"""Weights in Hugging Face's safetensors files: read by global name, entire or in part, and written back.

A parameter may be stored as several tensors (one per expert), transposed (GPT-2's Conv1D), or with its rows in another
order (fused projections); `ModelConfig.stored_tensors` describes this. For captured classes of `transformers`,
`conversions.py` does. Nothing is unpickled. Torch is imported inside the functions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipefit.errors import ModelError, most_like
from pipefit.model.any_class import FIELDS
from pipefit.model.families import RowParts, WeightTensor
from pipefit.model.families.build import USER, typed_config
from pipefit.model.weights.conversions import FLOATS, ClassTensors, class_without_values, file_tensors
from pipefit.model.weights.stacked_experts import expert_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DEFAULT_MAX_FILE_BYTES = 5 * 10**9

ParameterBox = Sequence[tuple[int, int]]
"""Half-open range of each dimension of a parameter."""

PREFIXES = ("model", "transformer", "vit", "vision_model")
"""Prefixes that Hugging Face's task classes put before the names of the inner model."""


class WeightNames(Protocol):
    """The mapping from parameter names to stored tensors."""

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        """The stored tensors of the parameter with this global name."""


class WeightFiles:
    """The safetensors files of one model, opened for reading. May be used as a context manager."""

    def __init__(self, source: Path, family: str, config: Mapping[str, Any], typed: WeightNames | None = None) -> None:
        """`source`: a directory (with an index or single file) or one safetensors file. `typed` maps parameter names to
        stored tensors instead of the family's configuration. Raises ModelError."""
        self.source = source
        self._typed = typed if typed is not None or family == USER else typed_config(family, config)
        self._files = {path: _open_file(path) for path in _list_files(source)}
        self._where = {name: handle for handle in self._files.values() for name in handle.keys()}  # noqa: SIM118
        in_class = family == USER and FIELDS in config
        self._class = ClassTensors(class_without_values(config[FIELDS]), self._where) if in_class else None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in the files."""
        return tuple(self._where)

    @property
    def unused_names(self) -> tuple[str, ...]:
        """Names of tensors in the files without a use in a captured class; () for any other model."""
        return tuple(self._class.unused_names()) if self._class is not None else ()

    def has_tensor(self, name: str) -> bool:
        """Return whether the files hold the parameter or buffer with that global name."""
        return name in self._where or (self._class is not None and bool(self._class.stored_names(name)))

    def read(self, name: str, shape: Sequence[int], box: ParameterBox | None = None) -> Tensor:
        """Return the parameter with that global name and shape, or a box of it, on the CPU in the dtype of the file.

        Raises ModelError if a tensor is missing, has another shape, or is quantized or untied in the files of a class.
        """
        box = [(0, size) for size in shape] if box is None else list(box)
        aliases = self._class.stored_names(name) if self._class is not None else []
        if not aliases:
            return self._read_blocks(self._stored_blocks(name, shape), name, shape, box)
        tensor = self._read_of_class(aliases[0], shape, box)
        for alias in aliases[1:]:
            if not self._read_of_class(alias, shape, box).equal(tensor):
                raise ModelError(
                    "The weights hold different values of a parameter that this configuration ties.",
                    where=str(self.source),
                    seen=", ".join(aliases),
                    allowed="equal values, or one of these tensors",
                    next_step='plan with "tie_word_embeddings": false in config.json, or remove a tensor',
                )
        return tensor

    def _read_of_class(self, name: str, shape: Sequence[int], box: ParameterBox) -> Tensor:
        """Return a box of a parameter of a captured class, under a name of its state dict."""
        assert self._class is not None
        stored = {member: self._where[member].get_slice(member).get_dtype() for member in self._class.members(name)}
        if self._class.is_float(name) and not FLOATS.issuperset(stored.values()):
            raise ModelError(
                "The weights are quantized, and pipefit reads floating-point numbers only.",
                where=str(self.source),
                seen=", ".join(f"{member} {dtype}" for member, dtype in list(stored.items())[:3]),
                allowed=", ".join(sorted(FLOATS)),
                next_step="open them with from_pretrained, call dequantize(), and save them with save_pretrained",
            )
        parts = self._class.stored_parts(name, shape)
        if parts:
            return self._read_blocks(parts, name, shape, box)
        tensor = self._class.convert_tensor(name, lambda member: self._where[member].get_tensor(member))
        if list(tensor.shape) != list(shape):
            raise self._shape_error(", ".join(list(stored)[:3]), tensor.shape, shape)
        part = tensor[_box_index(box)]
        return part if part.shape == tensor.shape else part.clone()

    def _read_blocks(
        self, blocks: Sequence[WeightTensor], name: str, shape: Sequence[int], box: ParameterBox
    ) -> Tensor:
        """Return a box of a parameter from the tensors that hold it."""
        import torch

        if len(blocks) == 1 and not blocks[0].index:
            return self._read_part(blocks[0], name, shape, box)
        out: Tensor | None = None
        for block in blocks:
            target, inner, block_shape = _overlap_box(block, shape, box)
            if target is None:
                continue
            part = self._read_part(block, name, block_shape, inner)
            if out is None:
                out = torch.empty([stop - start for start, stop in box], dtype=part.dtype)
            out[target] = part
        if out is None:
            out = torch.empty([stop - start for start, stop in box])
        return out

    def _stored_blocks(self, name: str, shape: Sequence[int]) -> tuple[WeightTensor, ...]:
        """The stored tensors of a parameter; only its own name if the file holds it in one piece."""
        blocks = self._typed.stored_tensors(name) if self._typed is not None else (WeightTensor(name),)
        if self._typed is None and self._find_spelling(name) is None:
            return expert_tensors(name, shape, lambda stored: self._find_spelling(stored) is not None) or blocks
        if self._find_block(blocks[0]) is None and self._find_spelling(name) is not None:
            return (WeightTensor(name),)
        return blocks

    def _find_spelling(self, name: str) -> str | None:
        """The file's spelling of a name: unchanged, or without or with the prefix of the full model."""
        plain = name.split(".", 1)[-1]
        known = (name, plain, *(f"{prefix}.{name}" for prefix in PREFIXES))
        return next((item for item in known if item in self._where), None)

    def _find_block(self, block: WeightTensor) -> str | None:
        """Return the file's spelling of the first of a tensor's names that it has."""
        names = (self._find_spelling(name) for name in (block.name, *block.further_names))
        return next((name for name in names if name is not None), None)

    def _read_part(self, block: WeightTensor, name: str, shape: Sequence[int], box: ParameterBox) -> Tensor:
        spelled = self._find_block(block)
        if spelled is None:
            near = most_like(block.name, self._where)
            raise ModelError(
                f"The weights lack the tensor {block.name!r}" + (f" (part of {name})." if block.name != name else "."),
                where=str(self.source),
                seen=f"{len(self._where)} tensors" + (f", the nearest {near[0]!r}" if near else ""),
                next_step="check that the weights belong to this config.json",
            )
        handle = self._where[spelled].get_slice(spelled)
        expected = _stored_shape(block, shape)
        if list(handle.get_shape()) != expected:
            raise self._shape_error(block.name, handle.get_shape(), expected)
        if not shape:
            return self._where[spelled].get_tensor(spelled)
        if block.rows is not None:
            return _read_rows(handle, block.rows, box)
        if block.alternating:
            part = _alternate_rows(handle[_box_index(box[:1])].transpose(1, -1 if block.transposed else 1), merge=True)
            return part[(slice(None), *_box_index(box[1:]))].contiguous()
        if block.heads or block.shape:
            return _reordered_tensor(block, self._where[spelled].get_tensor(spelled), shape)[_box_index(box)]
        part = handle[_box_index([*box[:-2], box[-1], box[-2]] if block.transposed else box)]
        return part.transpose(-1, -2).contiguous() if block.transposed else part

    def _shape_error(self, name: str, seen: Sequence[int], expected: Sequence[int]) -> ModelError:
        """The error of a stored tensor whose shape differs from its parameter's."""
        return ModelError(
            f"The tensor {name!r} of the weights has a wrong shape.",
            where=str(self.source),
            seen=str(list(seen)),
            allowed=str(list(expected)),
            next_step="check that the weights belong to this config.json",
        )

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._where.clear()


def load_layers(layers: Sequence[nn.Module], source: Path, family: str, config: Mapping[str, Any]) -> None:
    """Fill the parameters of `layers` (on a real device) from the files, cast to the parameters' dtype."""
    import torch

    with WeightFiles(source, family, config) as files, torch.no_grad():
        for layer in layers:
            for local, parameter in layer.named_parameters():
                parameter.copy_(files.read(layer.parameter_names[local], parameter.shape))


def layer_tensors(layers: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Global name -> parameter; tied parameters appear once."""
    return {
        layer.parameter_names[local]: parameter.detach()
        for layer in layers
        for local, parameter in layer.named_parameters()
    }


def save_weights(
    directory: Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    family: str,
    config: Mapping[str, Any],
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
) -> list[Path]:
    """Write parameters (by global name) and config.json as Hugging Face does; return the paths of the files.

    Those of a captured class are written as its `save_pretrained` does; `tensors` may hold its buffers as well.
    More than `max_file_bytes` are split over several files with an index. Files are written under temporary names and
    renamed at the end, the index last. `tensors` may be a generator; only one file's tensors are held at a time.
    """
    directory.mkdir(parents=True, exist_ok=True)
    typed = None if family == USER else typed_config(family, config)
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    if family == USER and FIELDS in config:
        pairs = file_tensors(class_without_values(config[FIELDS]), pairs)
    shards: list[dict[str, int]] = []
    pending: dict[str, Tensor] = {}
    joined = JoinedTensors()
    dtype = ""
    for name, tensor in pairs:
        dtype = dtype or str(tensor.dtype).removeprefix("torch.")
        for block in typed.stored_tensors(name) if typed is not None else (WeightTensor(name),):
            piece = joined.add_part(block, stored_piece(block, tensor.detach()))
            if piece is None:
                continue
            if pending and _total_bytes(pending.values()) + _total_bytes([piece]) > max_file_bytes:
                shards.append(_write_shard(directory, len(shards), pending))
                pending = {}
            pending[block.name] = piece
    joined.check_complete(directory)
    shards.append(_write_shard(directory, len(shards), pending))
    paths = _rename_shards(directory, shards)
    written = typed.to_config() if typed is not None else config.get(FIELDS)
    return paths if written is None else [*paths, _write_config(directory / "config.json", written, dtype)]


def _write_config(path: Path, config: Mapping[str, Any], dtype: str) -> Path:
    """Write a config.json with the type of the weights and return its path. `dtype` of the configuration, the type of
    other weights, is left out, because it has priority over `torch_dtype`."""
    fields = {name: value for name, value in config.items() if name != "dtype"}
    replace_file(path, json.dumps({**fields, "torch_dtype": dtype}, indent=2) + "\n")
    return path


class JoinedTensors:
    """Tensors of the file that hold several parameters, until all of them have been given."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Tensor, int]] = {}

    def add_part(self, block: WeightTensor, piece: Tensor) -> Tensor | None:
        """Return the complete tensor of the file; None while parameters are missing in it."""
        rows = block.rows
        if rows is None:
            return piece
        total, left = self._waiting.pop(block.name, (None, rows.size))
        if total is None:
            total = piece.new_empty((rows.groups * rows.size, *piece.shape[1:]))
        groups = total.unflatten(0, (rows.groups, rows.size))
        groups[:, rows.start : rows.stop] = piece.unflatten(0, (rows.groups, -1))
        left -= rows.stop - rows.start
        if not left:
            return total
        self._waiting[block.name] = (total, left)
        return None

    def check_complete(self, directory: Path) -> None:
        """Raise ModelError if a parameter of one of these tensors is missing."""
        if self._waiting:
            raise ModelError(
                "Parameters that files hold in one tensor are missing.",
                where=str(directory),
                seen=f"only a part of {', '.join(sorted(self._waiting)[:4])}",
                allowed="all parameters of a tensor together",
            )


def stored_piece(block: WeightTensor, tensor: Tensor) -> Tensor:
    """Return the part of a parameter that a stored tensor holds, as it is in the file, in memory of its own."""
    piece = tensor[_as_index(block)] if block.index else tensor
    piece = _order_rows(piece, (block.heads, 3)) if block.heads else piece
    piece = _alternate_rows(piece, merge=False) if block.alternating else piece
    piece = (piece.transpose(-1, -2) if block.transposed else piece).to("cpu", copy=True).contiguous()
    return piece.reshape(block.shape) if block.shape else piece


def _stored_shape(block: WeightTensor, shape: Sequence[int]) -> list[int]:
    """Return the shape in the file of the tensor that holds a parameter or a part of it with this shape."""
    if block.rows is not None:
        return [block.rows.groups * block.rows.size, *shape[1:]]
    if block.transposed:
        return [*shape[:-2], shape[-1], shape[-2]]
    return list(block.shape or shape)


def _read_rows(handle: Any, rows: RowParts, box: ParameterBox) -> Tensor:
    """Return the box of a parameter whose rows are those rows of the stored tensor; reads only the groups in the
    box."""
    (start, stop), *columns = box
    width = rows.stop - rows.start
    first, last = start // width, max(-(-stop // width), start // width + 1)
    part: Tensor = handle[_box_index([(first * rows.size, last * rows.size), *columns])]
    part = part.unflatten(0, (last - first, rows.size))[:, rows.start : rows.stop].flatten(0, 1)
    return part[start - first * width : stop - first * width].contiguous()


def _box_index(box: ParameterBox) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _reordered_tensor(block: WeightTensor, stored: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a stored tensor with the shape and the order of rows of the parameter."""
    if block.heads:
        return _order_rows(stored.t() if block.transposed else stored, (3, block.heads))
    return stored.reshape(tuple(shape))


def _alternate_rows(tensor: Tensor, merge: bool) -> Tensor:
    """Return stacked experts (E, 2F, ...), whose second dimension alternates between two halves, with the first half in
    front (`merge`), or the reverse."""
    return tensor.unflatten(1, (-1, 2) if merge else (2, -1)).transpose(1, 2).flatten(1, 2)


def _order_rows(tensor: Tensor, groups: tuple[int, int]) -> Tensor:
    """Return a tensor whose rows are groups of groups of rows, with the order of the two levels exchanged."""
    return tensor.unflatten(0, (*groups, -1)).transpose(0, 1).flatten(0, 2)


def _as_index(block: WeightTensor) -> tuple[Any, ...]:
    return tuple(item if isinstance(item, int) else slice(*item) for item in block.index)


def _overlap_box(
    block: WeightTensor, shape: Sequence[int], box: ParameterBox
) -> tuple[tuple[Any, ...] | None, list[Any], list[int]]:
    """(index of the block's part in the box, ranges within the block, shape of the block); None if they do not
    overlap."""
    target: list[Any] = []
    inner: list[tuple[int, int]] = []
    block_shape: list[int] = []
    for dim, (start, stop) in enumerate(box):
        item = block.index[dim] if dim < len(block.index) else (0, shape[dim])
        if isinstance(item, int):
            if not start <= item < stop:
                return None, [], []
            target.append(item - start)
            continue
        low, high = max(start, item[0]), min(stop, item[1])
        if low >= high:
            return None, [], []
        target.append(slice(low - start, high - start))
        inner.append((low - item[0], high - item[0]))
        block_shape.append(item[1] - item[0])
    return tuple(target), inner, block_shape


def _list_files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    index = source / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ModelError("The index of the weights cannot be read.", where=str(index), seen=error) from None
        missing = [name for name in names if not (source / name).is_file()]
        if missing:
            raise ModelError("Files of the weights are missing.", where=str(source), seen=", ".join(missing))
        return [source / name for name in names]
    if (source / SINGLE).is_file():
        return [source / SINGLE]
    there = source.exists()
    raise ModelError(
        "There are no weights here.",
        where=str(source),
        seen=None if there else "no such file or directory",
        allowed=f"{SINGLE}, or {INDEX} with its files",
        next_step="convert other formats with transformers' save_pretrained"
        if there
        else "check the path; weights of modules are given as vision=DIR or language=DIR, or both with a comma between",
    )


def _open_file(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError("The weights file is damaged or no safetensors file.", where=str(path), seen=error) from None


def _total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _write_shard(directory: Path, number: int, tensors: dict[str, Tensor]) -> dict[str, int]:
    from safetensors.torch import save_file

    save_file(tensors, directory / f".{number}.partial", metadata={"format": "pt"})
    return {name: _total_bytes([tensor]) for name, tensor in tensors.items()}


def _rename_shards(directory: Path, shards: list[dict[str, int]]) -> list[Path]:
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        os.replace(directory / f".{i}.partial", directory / name)
    paths = [directory / name for name in names]
    if count == 1:
        (directory / INDEX).unlink(missing_ok=True)
        return paths
    weight_map = {name: names[i] for i, shard in enumerate(shards) for name in shard}
    total = sum(size for shard in shards for size in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    replace_file(directory / INDEX, json.dumps(index, indent=2) + "\n")
    return [*paths, directory / INDEX]


def replace_file(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
