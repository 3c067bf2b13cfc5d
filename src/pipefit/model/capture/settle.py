"""Final rewrites of a complete model's graph: operators that lifting left over become executable ones.

`move_reshapes` reverses a common pattern: models flatten rows and tokens before a product and unflatten them after it.
Sharding needs rows as a separate dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from pipefit.model.capture.rewrite import GraphEditor, canonical_names
from pipefit.model.graph import Graph, Operator, Shape

_CALLS: Mapping[str, str] = {
    "pow": "aten.pow.Tensor_Scalar",
    "sqrt": "aten.sqrt.default",
    "cos": "aten.cos.default",
    "sin": "aten.sin.default",
    "mean": "aten.mean.dim",
    "repeat_interleave": "aten.repeat_interleave.self_int",
    "strided_slice": "aten.slice.Tensor",
}


def settle_graph(graph: Graph) -> Graph:
    """Replace leftover operators: means over a known number of elements by sums, all others by PyTorch calls."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        if operator.kind == "mean" and _reduced_count(editor, operator) is not None:
            _sum_and_divide(editor, operator)
        elif operator.kind in _CALLS:
            _replace_by_call(editor, operator)
    return canonical_names(_duplicate_constants(editor.build_graph()))


def _duplicate_constants(graph: Graph) -> Graph:
    """Give every user of a constant its own copy, directly in front of it. A constant that lives through the model,
    with a choice of forms, would multiply the states of a sharding search."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        constants = {name: editor.match_kind(name, "constant") for name in operator.inputs if name}
        new = {
            name: editor.insert_operator(
                operator, "constant", (), editor.value_shape(name), editor.value_dtype(name), constant.attributes
            )
            for name, constant in constants.items()
            if constant is not None
        }
        if new:
            inputs = tuple(new.get(name, name) for name in operator.inputs)
            editor.replace_operator(operator, operator.kind, inputs, operator.attributes)
    return editor.build_graph()


def _reduced_count(editor: GraphEditor, operator: Operator) -> int | None:
    sizes = [editor.value_shape(operator.inputs[0])[dim] for dim in operator.attributes["dims"]]
    return prod(int(size) for size in sizes) if all(isinstance(size, int) for size in sizes) else None


def _sum_and_divide(editor: GraphEditor, operator: Operator) -> None:
    """mean -> sum times 1 / count, because a sum may be partial."""
    count = _reduced_count(editor, operator)
    assert count is not None
    name = operator.outputs[0]
    total = editor.insert_operator(
        operator, "sum", operator.inputs, editor.value_shape(name), editor.value_dtype(name), dict(operator.attributes)
    )
    editor.replace_operator(operator, "mul", (total, ""), {"scalar": 1.0 / count})


def _replace_by_call(editor: GraphEditor, operator: Operator) -> None:
    source = operator.attributes
    more: dict[str, list[Any]] = {
        "pow": [source.get("exponent")],
        "mean": [source.get("dims"), source.get("keepdim")],
        "repeat_interleave": [source.get("repeats"), -1],
        "strided_slice": [
            source.get("dim"),
            _size_argument(source.get("start")),
            _size_argument(source.get("stop")),
            source.get("step"),
        ],
    }
    name = operator.outputs[0]
    attributes: dict[str, Any] = {
        "target": _CALLS[operator.kind],
        "arguments": [{"input": 0}, *more.get(operator.kind, [])],
        "keywords": {},
        "result": None,
        "shape": list(editor.value_shape(name)),
        "dtype": editor.value_dtype(name),
    }
    editor.replace_operator(operator, "aten", operator.inputs, attributes)


def _size_argument(value: Any) -> Any:
    return {"size": value} if isinstance(value, str) else value


_ROWWISE = {"linear", "matmul", "add", "sub", "mul", "div", "silu", "gelu", "relu", "sigmoid", "tanh", "exp", "rsqrt",
            "neg", "layer_norm", "rms_norm", "cast", "pow", "sqrt"}  # fmt: skip
"""Kinds that treat every row of the last dimension alike."""


def move_reshapes(graph: Graph) -> Graph:
    """op(reshape(x)) -> reshape(op(x)), if the reshape flattens dimensions in front of the last one."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        if operator.kind in _ROWWISE:
            _sink_reshape(editor, operator)
    return editor.build_graph()


def _sink_reshape(editor: GraphEditor, operator: Operator) -> None:
    sources: list[str] = []
    front: Shape | None = None
    for position, name in enumerate(operator.inputs):
        if not name or (name in editor.parameters and (position or operator.kind == "linear")):
            sources.append(name)
            continue
        flat = editor.match_kind(name, "reshape")
        if flat is None:
            if len(editor.value_shape(name)) > 1:
                return
            sources.append(name)
            continue
        shape, source = editor.value_shape(name), editor.value_shape(flat.inputs[0])
        if len(shape) != 2 or len(source) < 3 or shape[-1] != source[-1] or front not in (None, source[:-1]):
            return
        front = source[:-1]
        sources.append(flat.inputs[0])
    if front is None or (operator.kind == "matmul" and operator.inputs[1] not in editor.parameters):
        return
    for name in sources:
        if (
            name in editor.parameters
            and operator.kind not in ("linear", "matmul")
            and len(editor.value_shape(name)) > 1
        ):
            return
    out = operator.outputs[0]
    shape = (*front, editor.value_shape(out)[-1])
    attributes = dict(operator.attributes)
    moved = editor.insert_operator(operator, operator.kind, tuple(sources), shape, editor.value_dtype(out), attributes)
    editor.replace_operator(operator, "reshape", (moved,), {"shape": list(editor.value_shape(out))})
