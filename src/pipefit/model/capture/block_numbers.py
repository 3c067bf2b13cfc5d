"""Uses of a block's number that make equal modules compute different functions.

A block may read its number in its forward, the loop over the blocks may read it, and lists of the configuration may
have an entry for each block.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

NUMBER_FIELDS = {"layer_idx", "layer_index", "layer_id", "layer_number", "block_idx", "block_index"}
"""Attributes of modules with the number of a block."""


def reads_number(block: nn.Module) -> bool:
    """Return whether a method of the block reads its number for anything but a cache, or has no source to look at."""
    classes: set[Any] = {type(module) for module in block.modules()}
    return any(map(_class_reads_number, classes))


def loop_reads_number(owner: nn.Module) -> bool:
    """Return whether a loop of the module reads the number of a pass for anything but a list of the configuration, or
    the module has no source to look at."""
    return any(
        tree is None or any(_loop_reads_number(node) for node in ast.walk(tree) if isinstance(node, ast.For))
        for tree in _class_trees(type(owner))
    )


def numbered_settings(module: nn.Module, count: int, index: int) -> tuple[str, ...]:
    """Return the entries for a block in lists and mappings of all configurations of a model with `count` blocks. A list
    of all their numbers, as `moe_layers` may be, has no entry."""
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    entries = []
    for config in configs.values():
        for name, value in sorted(vars(config).items()):
            if isinstance(value, (list, tuple)) and len(value) == count and list(value) != list(range(count)):
                entries.append(f"{name}: {value[index]!r}")
            elif isinstance(value, dict) and "layer" in name and (index in value or str(index) in value):
                entries.append(f"{name}: {value.get(index, value.get(str(index)))!r}")
    return tuple(entries)


@cache
def _class_reads_number(cls: Any) -> bool:
    return any(
        tree is None or any(_method_reads_number(method) for method in _methods_of(tree)) for tree in _class_trees(cls)
    )


def _class_trees(cls: Any) -> Iterator[ast.AST | None]:
    """Yield the syntax of a class and of each model class that it inherits from; None for one without a source."""
    for base in cls.__mro__:
        if _is_infrastructure(base.__module__):
            continue
        try:
            yield ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            yield None


def _is_infrastructure(module: str) -> bool:
    """Return whether a module is Python's, PyTorch's, or the part of `transformers` that all models share."""
    library = module.partition(".")[0]
    shared = library == "transformers" and not module.startswith("transformers.models.")
    return shared or library in ("torch", "builtins", "typing", "abc")


def _methods_of(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name != "__init__":
            yield node


def _method_reads_number(method: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr in NUMBER_FIELDS and not _is_for_cache(parents)
        for node, parents in _with_parents(method, ())
    )


def _is_for_cache(parents: tuple[ast.AST, ...]) -> bool:
    """Return whether the innermost call around a node is one of a cache."""
    call = next((node for node in reversed(parents) if isinstance(node, ast.Call)), None)
    return call is not None and any(word in ast.unparse(call.func) for word in ("cache", "past"))


def _loop_reads_number(loop: ast.For) -> bool:
    source = ast.unparse(loop.iter)
    target = loop.target
    if isinstance(target, ast.Tuple) and source.startswith("enumerate("):
        target = target.elts[0]
    elif not source.startswith("range("):
        return False
    if not isinstance(target, ast.Name):
        return True
    return any(
        isinstance(node, ast.Name) and node.id == target.id and not _is_for_config(parents)
        for statement in loop.body
        for node, parents in _with_parents(statement, ())
    )


def _is_for_config(parents: tuple[ast.AST, ...]) -> bool:
    """Return whether the innermost index around a node is that of a list of a configuration."""
    index = next((node for node in reversed(parents) if isinstance(node, ast.Subscript)), None)
    return index is not None and "config" in ast.unparse(index.value)


def _with_parents(node: ast.AST, parents: tuple[ast.AST, ...]) -> Iterator[tuple[Any, tuple[ast.AST, ...]]]:
    yield node, parents
    for child in ast.iter_child_nodes(node):
        yield from _with_parents(child, (*parents, node))
