"""The tensors of weight files and the parameters of a captured class, converted by the code of `transformers`.

Files may hold names of another class, tensors of single experts, or fused projections. `transformers` describes these
by renamings and converters of its `conversion_mapping`, and this module applies them for one parameter at a time. Boxes
of renamed parameters and of stacked experts are read without conversion. Torch is imported inside the functions.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipefit.errors import ModelError
from pipefit.model.any_class import build_class, empty_parameters
from pipefit.model.families import WeightTensor

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of stored tensors, as safetensors writes them, that can be read as floating-point parameters."""


UNUSED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Patterns of tables in older files, which classes compute."""


@dataclass(slots=True, kw_only=True)
class TensorGroup:
    """Tensors that are converted together, in either direction."""

    first: str
    "Name of the first result."
    converter: Any = None
    "The library's WeightConverter; None if the tensor is only renamed."
    members: list[tuple[str, str]] = field(default_factory=list)
    "(name, source pattern of the converter), in the library's order."

    def convert_tensors(self, module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> tensor after the conversion. Raises ModelError with the reason of the library."""
        if self.converter is None:
            return {self.first: tensors[self.members[0][0]]}
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.members:
            converter.add_tensor(self.first, name, pattern, tensors[name])
        try:
            results = converter.convert(self.first, model=module, config=module.config)
        except Exception as error:  # an operation may raise anything
            raise ModelError(
                "`transformers` cannot convert these tensors of the weights.",
                where=type(module).__name__,
                seen=f"{', '.join(name for name, _ in self.members[:3])}: {type(error).__name__}: {error}",
                allowed=f"tensors that become {self.first}",
                next_step="check that the weights belong to this config.json, and open them with from_pretrained",
            ) from None
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def class_without_values(fields: Mapping[str, Any]) -> Any:
    """Return the class of a config.json with parameters without memory; torch's generator is unchanged."""
    import torch

    with torch.random.fork_rng(devices=[]), empty_parameters():
        return build_class(fields)


class ClassTensors:
    """The parameters and buffers of a class, found among the tensors of files."""

    def __init__(self, module: Any, stored: Iterable[str]) -> None:
        self._module = module
        self._state: dict[str, Tensor] = module.state_dict()
        self._ties = tied_names(module)
        self._stored = tuple(stored)
        self._groups = _group_stored(module, self._state, self._stored)
        self._last: tuple[TensorGroup | None, dict[str, Tensor]] = None, {}

    def stored_names(self, name: str) -> list[str]:
        """Return the names in the state dict under which the files hold a parameter or buffer."""
        return [alias for alias in self._ties.get(name, (name,)) if alias in self._groups]

    def stored_parts(self, name: str, shape: Sequence[int]) -> tuple[WeightTensor, ...]:
        """Return the tensors of files that hold a parameter, () if it must be converted."""
        group = self._groups[name]
        if group.converter is None:
            return (WeightTensor(group.members[0][0]),)
        return _stacked_parts(group, shape)

    def unused_names(self) -> list[str]:
        """Return the tensors of files without a use in the class, except for those of declared patterns."""
        used = {member for group in self._groups.values() for member, _ in group.members}
        declared = [*UNUSED, *(getattr(self._module, "_keys_to_ignore_on_load_unexpected", None) or ())]
        pattern = re.compile("|".join(f"({item})" for item in declared))
        return [name for name in self._stored if name not in used and not pattern.search(name)]

    def is_float(self, name: str) -> bool:
        """Return whether the class has this tensor in a floating-point type."""
        return name in self._state and self._state[name].is_floating_point()

    def members(self, name: str) -> list[str]:
        """Return the tensors of files from which a parameter is made."""
        return [member for member, _ in self._groups[name].members] if name in self._groups else []

    def convert_tensor(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return a parameter that the library converts, from complete tensors that `read` gives. Raises ModelError if
        the conversion does not give it."""
        group = self._groups[name]
        results = self._last[1] if self._last[0] is group else {}
        if name not in results:
            tensors = {member: read(member) for member, _ in group.members}
            results = group.convert_tensors(self._module, tensors)
        if name not in results:
            raise ModelError(
                "The conversion of `transformers` does not give a parameter of its class.",
                where=type(self._module).__name__,
                seen=f"{', '.join(results)} from {', '.join(self.members(name)[:3])}",
                allowed=name,
                next_step="save the weights again with save_pretrained of the installed transformers",
            )
        tensor = results.pop(name)
        self._last = group, results
        return tensor


def tied_names(module: Any) -> dict[str, tuple[str, ...]]:
    """Return parameter name -> all names of that parameter, for parameters with several."""
    by_identity: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return {name: tuple(names) for names in by_identity.values() if len(names) > 1 for name in names}


def _group_stored(module: Any, state: Mapping[str, Tensor], stored: Iterable[str]) -> dict[str, TensorGroup]:
    """Return name in the state dict -> the tensors of files that become it, as `from_pretrained` assigns them."""
    mapping = _find_mapping(module, add_legacy=True)
    if mapping is None:
        return {name: TensorGroup(first=name, members=[(name, name)]) for name in stored if name in state}
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    renamings, converters = _split_mapping(mapping)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = module.base_model_prefix
    groups: dict[str, TensorGroup] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:  # a file with the names of the class
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        group = groups.setdefault(target, TensorGroup(first=target, converter=converter))
        group.members.append((name, name if pattern is None else pattern))
    for first, group in list(groups.items()):
        if group.converter is not None:
            patterns = group.converter.target_patterns
            groups |= {first.replace(patterns[0], pattern): group for pattern in patterns[1:]}
    return groups


def _find_mapping(module: Any, add_legacy: bool) -> list[Any] | None:
    """Return the library's renamings and converters for a class; None before version 5, whose files have the names of
    the class."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return None
    return list(get_model_conversion_mapping(module, add_legacy=add_legacy))


def _split_mapping(mapping: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the renamings and the converters of a mapping."""
    from transformers.core_model_loading import WeightConverter

    converters = [item for item in mapping if isinstance(item, WeightConverter)]
    return [item for item in mapping if not isinstance(item, WeightConverter)], converters


def _stacked_parts(group: TensorGroup, shape: Sequence[int]) -> tuple[WeightTensor, ...]:
    """Return the tensors of single experts that a stacked parameter (E, rows, ...) consists of; () if the group is
    anything else."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    patterns = list(group.converter.source_patterns)
    steps = [(type(step), getattr(step, "dim", None)) for step in group.converter.operations]
    stack, join = (MergeModulelist, 0), (Concatenate, 1)
    if steps != [stack, join] and not (steps == [stack] and len(patterns) == 1):
        return ()
    if len(shape) < 2 or shape[1] % len(patterns):
        return ()
    rows = shape[1] // len(patterns)
    experts = {pattern: [name for name, source in group.members if source == pattern] for pattern in patterns}
    if any(len(names) != shape[0] for names in experts.values()):
        return ()
    return tuple(
        WeightTensor(names[expert], (expert, (part * rows, (part + 1) * rows)))
        for part, names in enumerate(experts.values())
        for expert in range(shape[0])
    )


def file_tensors(module: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor as `save_pretrained` writes them, for parameters and buffers of the class by name.

    A tied parameter is written once. Tensors wait until all tensors that are converted together have come. If the
    library cannot reverse its mapping, files have the names of the class, which `from_pretrained` reads as well. Raises
    ModelError if tensors that are converted together are missing.
    """
    groups, renamings = _plan_files(module)
    ties = tied_names(module)
    waiting: dict[str, Tensor] = {}
    written: set[str] = set()
    for name, tensor in tensors:
        for spelling in _written_names(module, ties[name]) if name in ties else (name,):
            if spelling in written:
                continue
            written.add(spelling)
            waiting[spelling] = tensor
            group = groups.get(spelling) or _renamed_group(spelling, spelling)
            if all(member in waiting for member, _ in group.members):
                parts = {member: waiting.pop(member) for member, _ in group.members}
                yield from _convert_group(module, group, parts, renamings).items()
    if waiting:
        raise ModelError(
            "Parameters that files hold in one tensor are missing.",
            where=type(module).__name__,
            seen=f"only a part of them: {', '.join(sorted(waiting)[:4])}",
            allowed="all parameters of a tensor together",
        )


def _convert_group(
    module: Any, group: TensorGroup, tensors: Mapping[str, Tensor], renamings: Sequence[Any]
) -> dict[str, Tensor]:
    """Return name in files -> tensor."""
    results = group.convert_tensors(module, tensors)
    return results if group.converter is None else {_rename(name, renamings): part for name, part in results.items()}


def _rename(name: str, renamings: Sequence[Any]) -> str:
    """Return a name after all renamings in turn."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _renamed_group(name: str, result: str) -> TensorGroup:
    """Return the group of a tensor that is only renamed."""
    return TensorGroup(first=result, members=[(name, name)])


def _plan_files(module: Any) -> tuple[dict[str, TensorGroup], list[Any]]:
    """Return name in the state dict -> group of its conversion to files, and the renamings of converted tensors. There
    are no groups if `transformers` cannot read back the result of its reversed mapping."""
    ties = tied_names(module)
    state = {
        name: tensor
        for name, tensor in module.state_dict().items()
        if name in _written_names(module, ties.get(name, (name,)))
    }
    try:
        groups, renamings = _reverse_groups(module, state)
        meta = {name: tensor.to("meta") for name, tensor in state.items()}
        names = [
            result
            for group in {id(group): group for group in groups.values()}.values()
            for result in _convert_group(module, group, {name: meta[name] for name, _ in group.members}, renamings)
        ]
    except Exception:  # an operation without a reverse raises anything
        return {}, []
    back = _group_stored(module, module.state_dict(), names)
    return (groups, renamings) if all(name in back for name in state) else ({}, [])


def _reverse_groups(module: Any, state: Mapping[str, Tensor]) -> tuple[dict[str, TensorGroup], list[Any]]:
    """Return the groups and renamings of the reversed mapping, as `save_pretrained` makes them."""
    mapping = _find_mapping(module, add_legacy=False)
    if mapping is None:
        return {}, []
    from transformers.core_model_loading import PrefixChange, dot_natural_key

    reverse = [item.reverse_transform() for item in reversed(mapping) if not isinstance(item, PrefixChange)]
    renamings, converters = _split_mapping(reverse)
    by_first: dict[str, TensorGroup] = {}
    groups: dict[str, TensorGroup] = {}
    for name in sorted(state, key=dot_natural_key):
        first, converter, pattern = _match_converter(name, converters)
        if converter is None:
            groups[name] = _renamed_group(name, _rename(name, renamings))
            continue
        groups[name] = by_first.setdefault(first, TensorGroup(first=first, converter=converter))
        groups[name].members.append((name, pattern))
    return groups, renamings


def _match_converter(name: str, converters: Sequence[Any]) -> tuple[str, Any, str]:
    """Return (name of the first result, converter, its source pattern) of the converter that takes a tensor; (name,
    None, "") if there is none."""
    for converter in converters:
        first, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return first, converter, pattern
    return name, None, ""


def _written_names(module: Any, names: Sequence[str]) -> list[str]:
    """Return the names under which a parameter is written. Names declared as tied are left out, except for the last if
    all are declared."""
    declared = [re.compile(pattern) for pattern in getattr(module, "all_tied_weights_keys", ())]
    tied = [name for name in sorted(names) if any(pattern.search(name) for pattern in declared)]
    left_out = tied[: len(names) - 1]
    return [name for name in names if name not in left_out]
