"""Arithmetic of an export that overwrites its first argument, replaced by functions that return a new tensor.

`ExportedProgram.run_decompositions` replaces every function of this kind, and traces the model twice more. That takes
most of a large model's capture, so a model with simple cases only, such as `weights /= weights.sum()`, avoids it.
"""

from __future__ import annotations

from typing import Any

ARITHMETIC = ("add_", "sub_", "mul_", "div_")
"""In-place functions that are replaced, if nothing else can see the tensor that they change."""

HARMLESS = ("relu_", "silu_", "detach_", "dropout_")
"""In-place functions that have converters of their own."""


def replace_arithmetic(program: Any) -> bool:
    """Replace in-place arithmetic in the graph of an export. Returns whether other in-place functions are left."""
    import torch

    graph = program.graph
    position_of = {node: position for position, node in enumerate(graph.nodes)}
    is_left = False
    for node in graph.nodes:
        name = _function_name(node)
        if not _is_in_place(node) or name in HARMLESS:
            continue
        if name not in ARITHMETIC or not _is_replaceable(node, position_of):
            is_left = True
            continue
        changed = node.args[0]
        node.target = getattr(getattr(torch.ops.aten, name.removesuffix("_")), node.target._overloadname)
        for user in list(changed.users):
            if position_of[user] > position_of[node]:
                user.replace_input_with(changed, node)
    return is_left


def _function_name(node: Any) -> str:
    """The name of a node's ATen function, without its overload; '' for other nodes."""
    return node.target._schema.name.split("::")[-1] if hasattr(node.target, "_schema") else ""


def _is_in_place(node: Any) -> bool:
    return hasattr(node.target, "_schema") and bool(node.target._schema.is_mutable)


def _is_replaceable(node: Any, position_of: dict[Any, int]) -> bool:
    """Return whether a new tensor may stand for the changed one: no other value before the node shares its memory, and
    its shape and type stay as they are."""
    changed, number = node.args[0], node.args[1] if len(node.args) > 1 else None
    producer = changed.args[0] if "getitem" in str(changed.target) else changed
    before = [user for user in changed.users if position_of[user] < position_of[node]]
    if changed.op != "call_function" or any(map(_may_share_memory, (producer, *before))):
        return False
    value = changed.meta["val"]
    if isinstance(number, (int, float)):
        return bool(value.is_floating_point())
    number_value = getattr(number, "meta", {}).get("val")
    return bool(getattr(number_value, "dtype", None) == value.dtype)


def _may_share_memory(node: Any) -> bool:
    """Return whether a result of the node may share memory with an argument, as views do."""
    return not hasattr(node.target, "_schema") or any(bool(entry.alias_info) for entry in node.target._schema.returns)
