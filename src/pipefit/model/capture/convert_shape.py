"""Converters of ATen operators that move, rename or cast numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipefit.model.capture.emitter import Emitter, Unconvertible, converts, line_of
from pipefit.model.graph import Size

_MANY = 1 << 62
"""A slice that ends here or later ends at the end."""

Splitter = Callable[[Emitter, Any, list[Any], Mapping[str, Any]], list[str]]
"""(emitter, node, arguments, keywords) -> the names of the node's values."""


@converts("aten.to", "aten._to_copy", "aten.type_as", "aten.float")
def _cast(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x = emitter.value(args[0])
    before, after = emitter.dtype(args[0]), emitter.dtype(node)
    if before == after:
        return x
    return emitter.like(node, "cast", (x,), {"dtype": after})


@converts("aten.alias", "aten.contiguous", "aten.clone", "aten.lift_fresh_copy")
def _same(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    return emitter.value(args[0])


@converts(
    *(
        f"aten.{kind}"
        for kind in ["view", "reshape", "_unsafe_view", "unflatten", "flatten", "unsqueeze", "squeeze", "view_as"]
    )
)
def _reshape(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    return emitter.like(node, "reshape", (emitter.value(args[0]),), {"shape": list(emitter.shape(node))})


@converts("aten.expand", "aten.expand_as")
def _expand(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    if emitter.shape(args[0]) == emitter.shape(node):
        return emitter.value(args[0])
    return emitter.like(node, "expand", (emitter.value(args[0]),), {"shape": list(emitter.shape(node))})


@converts("aten.repeat_interleave")
def _repeat_interleave(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, repeats, dim = [*args, None][:3]
    if not isinstance(repeats, int) or dim is None or emitter.dim(x, dim) != emitter.rank(x) - 1:
        raise Unconvertible(f"repeat_interleave other than of the last dimension{line_of(node)}")
    return emitter.like(node, "repeat_interleave", (emitter.value(x),), {"repeats": repeats})


@converts("aten.transpose", "aten.permute", "aten.t", "aten.mT", "aten.numpy_T")
def _transpose(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    kind, rank = str(node.target).split(".")[1], emitter.rank(node)
    dims = list(range(rank))
    if kind == "permute":
        dims = [emitter.dim(node, dim) for dim in args[1]]
    elif kind == "numpy_T":
        dims.reverse()
    else:
        a, b = (emitter.dim(node, dim) for dim in (args[1:3] if kind == "transpose" else (rank - 2, rank - 1)))
        dims[a], dims[b] = b, a
    return emitter.like(node, "transpose", (emitter.value(args[0]),), {"dims": dims})


@converts("aten.slice")
def _slice(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, dim, start, stop, step = [*args, *(0, None, None, 1)[len(args) - 1 :]][:5]
    dim = emitter.dim(x, dim)
    size = emitter.shape(x)[dim]
    start, stop = _edge(emitter, start, 0, size), _edge(emitter, stop, size, size)
    if step != 1:
        return emitter.like(
            node, "strided_slice", (emitter.value(x),), {"dim": dim, "start": start, "stop": stop, "step": step}
        )
    if (start, stop) == (0, size):
        return emitter.value(x)
    return emitter.like(node, "slice", (emitter.value(x),), {"dim": dim, "start": start, "stop": stop})


def _edge(emitter: Emitter, edge: Any, default: Size, size: Size) -> Size:
    if edge is None:
        return default
    if hasattr(edge, "meta"):
        return emitter.size(edge.meta["val"])
    if isinstance(edge, int) and edge >= _MANY:
        return size
    if isinstance(size, int):
        return min(size, int(edge + size if edge < 0 else edge))
    if edge < 0:
        raise Unconvertible("a slice that ends before the last token")
    return int(edge)


@converts("aten.select")
def _select(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    x, dim, index = args
    dim = emitter.dim(x, dim)
    shape = emitter.shape(x)
    if isinstance(shape[dim], str) or not isinstance(index, int):
        raise Unconvertible(f"one row or token picked out{line_of(node)}")
    index = index % int(shape[dim])
    part = _part(emitter, x, dim, index, index + 1)
    return emitter.like(node, "reshape", (part,), {"shape": list(emitter.shape(node))})


@converts("aten.cat", "aten.concat")
def _concat(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    tensors, dim = [*args, 0][:2]
    present = [item for item in tensors if item.meta["val"].numel() != 0]  # a cache that is empty yet
    if len(present) == 1:
        return emitter.value(present[0])
    return emitter.like(node, "concat", [emitter.value(item) for item in present], {"dim": emitter.dim(node, dim)})


@converts("aten.stack")
def _stack(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    tensors, dim = [*args, 0][:2]
    dim = emitter.dim(node, dim)
    shape = emitter.shape(tensors[0])
    shape = (*shape[:dim], 1, *shape[dim:])
    widened = [
        emitter.emit("reshape", (emitter.value(item),), shape, emitter.dtype(node), {"shape": list(shape)})
        for item in tensors
    ]
    return emitter.like(node, "concat", widened, {"dim": dim})


def _split(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> list[str]:
    x = args[0]
    dim = emitter.dim(x, kwargs.get("dim", args[2] if len(args) > 2 else 0))
    sizes = [item.shape[dim] for item in node.meta["val"]]
    if not all(isinstance(size, int) for size in sizes):
        raise Unconvertible(f"rows or tokens split into parts{line_of(node)}")
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [_part(emitter, x, dim, edges[i], edges[i + 1]) for i in range(len(sizes))]


def _unbind(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> list[str]:
    x = args[0]
    dim = emitter.dim(x, kwargs.get("dim", args[1] if len(args) > 1 else 0))
    shape = emitter.shape(x)
    if not isinstance(shape[dim], int):
        raise Unconvertible(f"rows or tokens taken apart{line_of(node)}")
    left = (*shape[:dim], *shape[dim + 1 :])
    return [
        emitter.emit("reshape", (_part(emitter, x, dim, i, i + 1),), left, emitter.dtype(x), {"shape": list(left)})
        for i in range(int(shape[dim]))
    ]


def _part(emitter: Emitter, x: Any, dim: int, start: int, stop: int) -> str:
    shape = emitter.shape(x)
    cut = (*shape[:dim], stop - start, *shape[dim + 1 :])
    if cut == shape:
        return emitter.value(x)
    attributes = {"dim": dim, "start": start, "stop": stop}
    return emitter.emit("slice", (emitter.value(x),), cut, emitter.dtype(x), attributes)


def _broadcast(emitter: Emitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Tensors in the shape that all of them have together."""
    found = []
    for item in args[0]:
        shape = tuple(emitter.size(size) for size in node.meta["val"][0].shape)
        name = emitter.value(item)
        if emitter.shape(item) != shape:
            name = emitter.emit("expand", (name,), shape, emitter.dtype(item), {"shape": list(shape)})
        found.append(name)
    return found


SPLITTERS: dict[str, Splitter] = {
    "aten.broadcast_tensors": _broadcast,
    "aten.chunk": _split,
    "aten.split": _split,
    "aten.split_with_sizes": _split,
    "aten.unbind": _unbind,
}
