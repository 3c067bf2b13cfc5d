"""Conversion of an exported program's nodes to operators: one small converter per ATen operator.

Converters read only attributes of nodes and need no torch. A node without a converter, or with unsupported arguments,
raises `UnconvertibleError` with the reason; the layer then becomes opaque.
"""

from __future__ import annotations

from typing import Any

from pipefit.model.capture import convert_any, convert_complex, convert_compute, convert_losses, convert_shape
from pipefit.model.capture.emitter import CONVERTERS, GraphEmitter, UnconvertibleError, is_number, line_of
from pipefit.model.capture.source_labels import source_label

__all__ = ["GraphEmitter", "UnconvertibleError", "convert_node"]

REGISTERED_BY = (convert_complex, convert_compute, convert_losses, convert_shape)
"""The modules that fill `CONVERTERS` and `convert_any.ANY` on import."""

_IGNORED = {
    "aten._assert_tensor_metadata",
    "aten.promote_types",
    "aten.sym_constrain_range_for_size",
    "aten._assert_scalar",
}


def convert_node(emitter: GraphEmitter, node: Any, layer: str) -> None:
    """Append the operators of one exported `call_function` node."""
    target = str(node.target)
    base = ".".join(target.split(".")[:2])
    if base in _IGNORED or ("val" not in node.meta and not emitter.whole):
        return
    if "val" in node.meta and is_number(node.meta["val"]):
        return  # arithmetic on sizes: its users' shapes contain the result
    if target == "<built-in function getitem>":
        source, index = node.args
        if source in emitter.inner:
            emitter.stand_for(node, emitter.inner[source][index])
            return
        emitter.names[node] = emitter.parts[source][index]
        return
    emitter.source = _module_source(node) or layer
    if emitter.whole:
        convert_any.convert_any(emitter, node, base, convert_known)
    else:
        convert_known(emitter, node, base)


def convert_known(emitter: GraphEmitter, node: Any, base: str) -> None:
    """Convert a node whose function (`base`) has a converter. Raises UnconvertibleError if it has none."""
    arguments = list(node.args)
    if base in convert_shape.SPLITTERS:
        emitter.parts[node] = convert_shape.SPLITTERS[base](emitter, node, arguments, node.kwargs)
    elif base in CONVERTERS:
        emitter.names[node] = CONVERTERS[base](emitter, node, arguments, node.kwargs)
    else:
        hint = " (it works in place)" if base.endswith("_") else ""
        target = str(node.target).removeprefix("aten.")
        raise UnconvertibleError(f"there is no operator for {target}{hint}{line_of(node)}")


def _module_source(node: Any) -> str:
    """The module path within the layer, and its class."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path, kind = stack[-1]
    name = source_label(kind)
    return f"{path} ({name})" if path else name
