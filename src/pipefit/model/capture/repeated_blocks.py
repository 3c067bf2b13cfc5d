"""Repeated blocks of a complete model: a prefix of them is exported, and all further blocks have the layers of equal
blocks in the prefix.

Two blocks are equal if their modules have the same classes, sizes and settings, apart from the number of the block, and
if the configuration has equal entries for both. The prefix has every block that occurs once, and two of every block
that occurs more often. A model is exported in full if the two have different graphs, or if a block or the loop over
them reads the number (`block_numbers.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipefit.model.capture.block_numbers import NUMBER_FIELDS, loop_reads_number, numbered_settings, reads_number
from pipefit.model.graph import Layer

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """The block list of a model, and a prefix that has all different blocks."""

    owner: nn.Module
    "The module with the list."
    attribute: str
    path: str
    "The path of the list in the model."
    alike: tuple[int, ...]
    "Block -> the first equal block."
    prefix: int

    @contextmanager
    def shorten_list(self) -> Iterator[None]:
        """Leave only the prefix in the model."""
        from torch import nn

        full = getattr(self.owner, self.attribute)
        setattr(self.owner, self.attribute, nn.ModuleList(list(full)[: self.prefix]))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, full)

    def repeat_layers(self, layers: Sequence[Layer]) -> tuple[Layer, ...] | None:
        """Return the layers of the complete model from the layers of the shortened one; None if a block is not exactly
        one layer with parameters of its own, or equal blocks have different graphs."""
        paths = [f"{self.path}.{index}" for index in range(self.prefix)]
        start = next((index for index, layer in enumerate(layers) if layer.name == paths[0]), len(layers))
        stop = start + self.prefix
        if not self._are_blocks(layers[start:stop], paths) or self._has_parameter([*layers[:start], *layers[stop:]]):
            return None
        further = [
            self._copy_block(layers[start + alike], paths[alike], f"{self.path}.{index}")
            for index, alike in enumerate(self.alike)
            if index >= self.prefix
        ]
        return (*layers[:stop], *further, *layers[stop:])

    def _are_blocks(self, layers: Sequence[Layer], paths: Sequence[str]) -> bool:
        """Return whether the layers are the blocks at these paths, with parameters of their own, and equal blocks have
        equal graphs."""
        if [layer.name for layer in layers] != [*paths]:
            return False
        return all(
            layer.graph == layers[self.alike[index]].graph
            and all(name.startswith(f"{layer.name}.") for name in layer.parameters.values())
            for index, layer in enumerate(layers)
        )

    def _has_parameter(self, layers: Sequence[Layer]) -> bool:
        """Return whether one of the layers reads a parameter of a block."""
        return any(name.startswith(f"{self.path}.") for layer in layers for name in layer.parameters.values())

    @staticmethod
    def _copy_block(block: Layer, source: str, path: str) -> Layer:
        parameters = {local: f"{path}{name.removeprefix(source)}" for local, name in block.parameters.items()}
        return replace(block, name=path, parameters=parameters)


def find_blocks(module: nn.Module) -> RepeatedBlocks | None:
    """Return the longest list of blocks; None if there is none, or too few of its blocks are equal."""
    from torch import nn

    lists = {path: child for path, child in module.named_modules() if isinstance(child, nn.ModuleList) and path}
    outer = [path for path in lists if not any(path.startswith(f"{above}.") for above in lists)]
    if not outer:
        return None
    path = max(outer, key=lambda name: len(lists[name]))
    parent, _, attribute = path.rpartition(".")
    blocks, owner = lists[path], module.get_submodule(parent)
    if loop_reads_number(owner) or any(reads_number(block) for block in blocks):
        return None
    prints = [
        (_block_fingerprint(block), numbered_settings(module, len(blocks), index)) for index, block in enumerate(blocks)
    ]
    counts, seen, prefix = Counter(prints), Counter[Any](), 0
    for index, fingerprint in enumerate(prints):
        seen[fingerprint] += 1
        if seen[fingerprint] <= min(2, counts[fingerprint]):
            prefix = index + 1
    if prefix == len(prints):
        return None
    alike = tuple(prints.index(fingerprint) for fingerprint in prints)
    return RepeatedBlocks(owner, attribute, path, alike, prefix)


def _block_fingerprint(block: nn.Module) -> Any:
    """Everything of a block that its computation may depend on, but its number."""
    from torch import nn

    internal = {*vars(nn.Module()), *NUMBER_FIELDS}
    parts: list[Any] = []
    for path, module in block.named_modules():
        settings = {name: _plain_value(value) for name, value in vars(module).items() if name not in internal}
        parts.append((path, type(module), tuple(sorted(settings.items()))))
    parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in block.named_parameters()]
    buffers = [(name, tuple(b.shape), str(b.dtype), _buffer_values(b)) for name, b in block.named_buffers()]
    return tuple(parts), tuple(parameters), tuple(buffers)


def _plain_value(value: Any) -> str:
    """A setting as text. Any other object counts as equal to itself alone, as one configuration of all blocks is."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple, set)):
        return repr([_plain_value(item) for item in value])
    if isinstance(value, dict):
        return repr({str(key): _plain_value(item) for key, item in value.items()})
    return f"{type(value).__qualname__} {id(value)}"


def _buffer_values(buffer: Any) -> Any:
    return None if buffer.device.type == "meta" else tuple(buffer.detach().double().flatten().tolist())
