"""Converters of ATen operators that move, rename or cast numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipefit.model.capture.dropouts import emit_row_dropout
from pipefit.model.capture.emitter import GraphEmitter, UnconvertibleError, line_of, register_converter
from pipefit.model.graph import Size

_MANY = 1 << 62
"""A slice with this stop or a larger one extends to the end."""

Splitter = Callable[[GraphEmitter, Any, list[Any], Mapping[str, Any]], list[str]]
"""(emitter, node, arguments, keywords) -> the names of the node's values."""


@register_converter("aten.to", "aten._to_copy", "aten.type_as", "aten.float")
def _convert_cast(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x = emitter.value_name(args[0])
    before, after = emitter.node_dtype(args[0]), emitter.node_dtype(node)
    if before == after:
        return x
    return emitter.emit_like(node, "cast", (x,), {"dtype": after})


@register_converter("aten.alias", "aten.contiguous", "aten.clone", "aten.lift_fresh_copy")
def _convert_alias(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    return emitter.value_name(args[0])


@register_converter(
    *(
        f"aten.{kind}"
        for kind in ["view", "reshape", "_unsafe_view", "unflatten", "flatten", "unsqueeze", "squeeze", "view_as"]
    )
)
def _convert_reshape(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    return emitter.emit_like(node, "reshape", (emitter.value_name(args[0]),), {"shape": list(emitter.node_shape(node))})


@register_converter("aten.expand", "aten.expand_as")
def _convert_expand(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if emitter.node_shape(args[0]) == emitter.node_shape(node):
        return emitter.value_name(args[0])
    return emitter.emit_like(node, "expand", (emitter.value_name(args[0]),), {"shape": list(emitter.node_shape(node))})


@register_converter("aten.repeat_interleave")
def _convert_repeat_interleave(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, repeats, dim = [*args, None][:3]
    if not isinstance(repeats, int) or dim is None or emitter.normalized_dim(x, dim) != emitter.node_rank(x) - 1:
        raise UnconvertibleError(f"repeat_interleave other than of the last dimension{line_of(node)}")
    return emitter.emit_like(node, "repeat_interleave", (emitter.value_name(x),), {"repeats": repeats})


@register_converter("aten.transpose", "aten.permute", "aten.t", "aten.mT", "aten.numpy_T")
def _convert_transpose(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    kind, rank = str(node.target).split(".")[1], emitter.node_rank(node)
    dims = list(range(rank))
    if kind == "permute":
        dims = [emitter.normalized_dim(node, dim) for dim in args[1]]
    elif kind == "numpy_T":
        dims.reverse()
    else:
        a, b = (
            emitter.normalized_dim(node, dim) for dim in (args[1:3] if kind == "transpose" else (rank - 2, rank - 1))
        )
        dims[a], dims[b] = b, a
    return emitter.emit_like(node, "transpose", (emitter.value_name(args[0]),), {"dims": dims})


@register_converter("aten.slice")
def _convert_slice(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, dim, start, stop, step = [*args, *(0, None, None, 1)[len(args) - 1 :]][:5]
    dim = emitter.normalized_dim(x, dim)
    size = emitter.node_shape(x)[dim]
    start, stop = _slice_edge(emitter, start, 0, size), _slice_edge(emitter, stop, size, size)
    if step != 1:
        return emitter.emit_like(
            node, "strided_slice", (emitter.value_name(x),), {"dim": dim, "start": start, "stop": stop, "step": step}
        )
    if (start, stop) == (0, size):
        return emitter.value_name(x)
    return emitter.emit_like(node, "slice", (emitter.value_name(x),), {"dim": dim, "start": start, "stop": stop})


def _slice_edge(emitter: GraphEmitter, edge: Any, default: Size, size: Size) -> Size:
    if edge is None:
        return default
    if hasattr(edge, "meta"):
        return emitter.convert_size(edge.meta["val"])
    if isinstance(edge, int) and edge >= _MANY:
        return size
    if isinstance(size, int):
        return min(size, int(edge + size if edge < 0 else edge))
    if edge < 0:
        raise UnconvertibleError("a slice that ends before the last token")
    return int(edge)


@register_converter("aten.select")
def _convert_select(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, dim, index = args
    dim = emitter.normalized_dim(x, dim)
    shape = emitter.node_shape(x)
    if isinstance(shape[dim], str) or not isinstance(index, int):
        raise UnconvertibleError(f"one row or token picked out{line_of(node)}")
    index = index % int(shape[dim])
    part = _emit_slice(emitter, x, dim, index, index + 1)
    return emitter.emit_like(node, "reshape", (part,), {"shape": list(emitter.node_shape(node))})


@register_converter("aten.cat", "aten.concat")
def _convert_concat(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    tensors, dim = [*args, 0][:2]
    present = [item for item in tensors if item.meta["val"].numel() != 0]  # drops a cache that is still empty
    if len(present) == 1:
        return emitter.value_name(present[0])
    return emitter.emit_like(
        node, "concat", [emitter.value_name(item) for item in present], {"dim": emitter.normalized_dim(node, dim)}
    )


@register_converter("aten.stack")
def _convert_stack(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    tensors, dim = [*args, 0][:2]
    dim = emitter.normalized_dim(node, dim)
    shape = emitter.node_shape(tensors[0])
    shape = (*shape[:dim], 1, *shape[dim:])
    widened = [
        emitter.emit("reshape", (emitter.value_name(item),), shape, emitter.node_dtype(node), {"shape": list(shape)})
        for item in tensors
    ]
    return emitter.emit_like(node, "concat", widened, {"dim": dim})


def _convert_split(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> list[str]:
    x = args[0]
    dim = emitter.normalized_dim(x, kwargs.get("dim", args[2] if len(args) > 2 else 0))
    sizes = [item.shape[dim] for item in node.meta["val"]]
    if not all(isinstance(size, int) for size in sizes):
        raise UnconvertibleError(f"rows or tokens split into parts{line_of(node)}")
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [_emit_slice(emitter, x, dim, edges[i], edges[i + 1]) for i in range(len(sizes))]


def _convert_unbind(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> list[str]:
    x = args[0]
    dim = emitter.normalized_dim(x, kwargs.get("dim", args[1] if len(args) > 1 else 0))
    shape = emitter.node_shape(x)
    if not isinstance(shape[dim], int):
        raise UnconvertibleError(f"rows or tokens taken apart{line_of(node)}")
    left = (*shape[:dim], *shape[dim + 1 :])
    return [
        emitter.emit(
            "reshape", (_emit_slice(emitter, x, dim, i, i + 1),), left, emitter.node_dtype(x), {"shape": list(left)}
        )
        for i in range(int(shape[dim]))
    ]


def _emit_slice(emitter: GraphEmitter, x: Any, dim: int, start: int, stop: int) -> str:
    shape = emitter.node_shape(x)
    cut = (*shape[:dim], stop - start, *shape[dim + 1 :])
    if cut == shape:
        return emitter.value_name(x)
    attributes = {"dim": dim, "start": start, "stop": stop}
    return emitter.emit("slice", (emitter.value_name(x),), cut, emitter.node_dtype(x), attributes)


def _convert_broadcast(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Expand tensors to their common broadcast shape."""
    expanded = []
    for item in args[0]:
        shape = tuple(emitter.convert_size(size, node) for size in node.meta["val"][0].shape)
        name = emitter.value_name(item)
        if emitter.node_shape(item) != shape:
            name = emitter.emit("expand", (name,), shape, emitter.node_dtype(item), {"shape": list(shape)})
        expanded.append(name)
    return expanded


def _convert_native_dropout(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Convert dropout decomposed by the export; its mask has no reader."""
    if any(user.args[1] != 0 for user in node.users) or not emitter.whole:
        raise UnconvertibleError(f"dropout whose mask is read{line_of(node)}")
    return [emit_row_dropout(emitter, node.args[0], float(args[1]), bool(args[2]), line_of(node)), ""]


SPLITTERS: dict[str, Splitter] = {
    "aten.broadcast_tensors": _convert_broadcast,
    "aten.chunk": _convert_split,
    "aten.native_dropout": _convert_native_dropout,
    "aten.split": _convert_split,
    "aten.split_with_sizes": _convert_split,
    "aten.unbind": _convert_unbind,
}
