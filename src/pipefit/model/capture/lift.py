"""Pattern rewrites that turn the small operators of an export back into operator kinds.

Each pass is a pure function Graph -> Graph in the ordered tuple `LIFT_PASSES`. Beside the registered kinds a graph
under lifting may hold `constant` {values}, `pow` {exponent}, `mean` {dim}, `sqrt`, `cos`, `sin`, `expand`,
`strided_slice` {dim, start, step} and `attention_bhtk` {causal, scale}. If any of them is left afterwards, the layer
becomes opaque. `lift_rotary.py` handles rotary embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipefit.model.capture.lift_rotary import lift_rotary
from pipefit.model.capture.rewrite import GraphEditor, canonical_names
from pipefit.model.graph import Graph, Operator
from pipefit.model.ops import KINDS

_SWAP = [0, 2, 1, 3]
"(rows, tokens, heads, features) to (rows, heads, tokens, features) and back."


def lift_graph(graph: Graph, rotary_candidates: Sequence[Mapping[str, Any]] = ()) -> Graph:
    """Run all passes in order, then assign canonical names. `rotary_candidates` are attribute sets that are preferred
    for rotary operators with matching frequencies."""
    graph = merge_equal_operators(remove_dead(graph))
    for _ in range(2):  # some forms of rotary embeddings match only before reshapes are merged, others only after
        graph = lift_rotary(graph, rotary_candidates)
        for apply_pass in LIFT_PASSES:
            graph = apply_pass(graph)
    return canonical_names(graph)


def merge_equal_operators(graph: Graph) -> Graph:
    """Merge cheap operators of equal kind, inputs and attributes. Boundaries are not merged: their number is the
    cost."""
    editor = GraphEditor(graph)
    seen: dict[str, str] = {}
    for operator in graph.operators:
        if operator.kind in KINDS and KINDS[operator.kind].boundary:
            continue
        inputs = [editor.resolve_name(name) if name else "" for name in operator.inputs]
        key = json.dumps([operator.kind, inputs, dict(operator.attributes)], sort_keys=True)
        if key in seen and editor.value_shape(seen[key]) == editor.value_shape(operator.outputs[0]):
            editor.alias_value(operator.outputs[0], seen[key])
        else:
            seen.setdefault(key, operator.outputs[0])
    return editor.build_graph()


def remove_casts_of_equal_types(graph: Graph) -> Graph:
    """cast(x) to the dtype of x -> x; a cast of a cast -> one cast."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        if operator.kind != "cast":
            continue
        source = operator.inputs[0]
        if editor.value_dtype(source) == operator.attributes["dtype"]:
            editor.alias_value(operator.outputs[0], source)
    return editor.build_graph()


def merge_reshapes(graph: Graph) -> Graph:
    """reshape of a reshape -> one reshape; reshape to the same shape -> removed."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        if operator.kind != "reshape":
            continue
        source = editor.skip_kinds(operator.inputs[0], ("reshape",))
        if tuple(editor.value_shape(source)) == tuple(operator.attributes["shape"]):
            editor.alias_value(operator.outputs[0], source)
        elif source != editor.resolve_name(operator.inputs[0]):
            editor.replace_operator(operator, "reshape", (source,), operator.attributes)
    return editor.build_graph()


def merge_transposes(graph: Graph) -> Graph:
    """transpose of a transpose -> one transpose, or removed."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        if operator.kind != "transpose":
            continue
        dims, source = list(operator.attributes["dims"]), operator.inputs[0]
        inner = editor.match_kind(source, "transpose")
        if inner is not None:
            dims, source = [inner.attributes["dims"][dim] for dim in dims], inner.inputs[0]
        if dims == list(range(len(dims))):
            editor.alias_value(operator.outputs[0], source)
        elif inner is not None:
            editor.replace_operator(operator, "transpose", (source,), {"dims": dims})
    return editor.build_graph()


def lift_linear(graph: Graph) -> Graph:
    """matmul(x, transpose(parameter)) -> linear(x, parameter); add(linear without bias, parameter) -> linear with that
    bias."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        if operator.kind != "matmul":
            continue
        flipped = editor.match_kind(operator.inputs[1], "transpose")
        if (
            flipped is not None
            and flipped.inputs[0] in editor.parameters
            and len(editor.value_shape(flipped.inputs[0])) == 2
        ):
            editor.replace_operator(operator, "linear", (operator.inputs[0], flipped.inputs[0], ""))
    for operator in list(editor.operators):
        if operator.kind == "add" and operator.inputs[1] in editor.parameters:
            linear = editor.match_kind(operator.inputs[0], "linear")
            bias = operator.inputs[1]
            if linear is None or linear.inputs[2] or len(editor.find_users(linear.outputs[0])) != 1:
                continue
            if editor.value_shape(bias) == editor.value_shape(linear.inputs[1])[:1]:
                editor.replace_operator(operator, "linear", (linear.inputs[0], linear.inputs[1], bias))
    return editor.build_graph()


def lift_rms_norm(graph: Graph) -> Graph:
    """x * rsqrt(mean(x^2) + eps) [* weight], with casts anywhere -> rms_norm(x, weight?)."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        normalized = _match_normalized(editor, operator)
        if normalized is None:
            continue
        source, eps = normalized
        editor.replace_operator(operator, "rms_norm", (source, ""), {"eps": eps})
    for operator in list(editor.operators):
        if operator.kind != "mul" or not operator.inputs[1]:
            continue
        for value, weight in (operator.inputs, operator.inputs[::-1]):
            norm = editor.match_kind(editor.skip_kinds(value, ("cast",)), "rms_norm")
            scale = editor.skip_kinds(weight, ("cast",))
            if norm is None or norm.inputs[1] or scale not in editor.parameters:
                continue
            if editor.value_shape(scale) == editor.value_shape(norm.inputs[0])[-1:]:
                editor.replace_operator(operator, "rms_norm", (norm.inputs[0], scale), norm.attributes)
                break
    return _norms_in_their_input_type(editor.build_graph())


def _match_normalized(editor: GraphEditor, operator: Operator) -> tuple[str, float] | None:
    """(x, eps) if `operator` is x * rsqrt(mean(x^2) + eps) or x / sqrt(mean(x^2) + eps), otherwise None."""
    if operator.kind not in ("mul", "div") or not operator.inputs[1]:
        return None
    pairs = (operator.inputs, operator.inputs[::-1]) if operator.kind == "mul" else (operator.inputs,)
    for value, factor in pairs:
        root = editor.match_kind(factor, "rsqrt" if operator.kind == "mul" else "sqrt")
        if root is None:
            continue
        shifted = editor.match_kind(root.inputs[0], "add")
        if shifted is None or shifted.inputs[1] or "scalar" not in shifted.attributes:
            continue
        mean = editor.match_kind(shifted.inputs[0], "mean")
        if mean is None or not mean.attributes["keepdim"]:
            continue
        squared = _match_squared(editor, mean.inputs[0])
        source = editor.skip_kinds(value, ("cast",))
        last = len(editor.value_shape(source)) - 1
        if (
            squared is not None
            and editor.skip_kinds(squared, ("cast",)) == source
            and mean.attributes["dims"] == [last]
        ):
            return source, float(shifted.attributes["scalar"])
    return None


def _match_squared(editor: GraphEditor, name: str) -> str | None:
    power = editor.match_kind(name, "pow")
    if power is not None and power.attributes["exponent"] == 2:
        return editor.resolve_name(power.inputs[0])
    product = editor.match_kind(name, "mul")
    if product is not None and product.inputs[1] and product.inputs[0] == product.inputs[1]:
        return editor.resolve_name(product.inputs[0])
    return None


def _norms_in_their_input_type(graph: Graph) -> Graph:
    """Give every norm's value the dtype of its input; the next cast pass then removes a cast back to that dtype."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        if operator.kind == "rms_norm":
            name = operator.outputs[0]
            tensor = editor.tensors[name]
            editor.tensors[name] = type(tensor)(
                name=name, shape=tensor.shape, dtype=editor.value_dtype(operator.inputs[0]), role=tensor.role
            )
    return editor.build_graph()


def lift_repeated_keys(graph: Graph) -> Graph:
    """Keys and values repeated for every head of their group (unsqueeze, expand, reshape) -> the originals: attention
    reads groups directly."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        if operator.kind != "attention_bhtk":
            continue
        inputs = [operator.inputs[0], *(_before_repeat(editor, name) for name in operator.inputs[1:])]
        if len({editor.value_shape(name)[1] for name in inputs[1:]}) == 1:
            editor.replace_operator(operator, "attention_bhtk", tuple(inputs), operator.attributes)
    return editor.build_graph()


def _before_repeat(editor: GraphEditor, name: str) -> str:
    """k (B,G,T,K) if `name` is reshape(expand(reshape(k, (B,G,1,T,K)), (B,G,n,T,K)), (B,G*n,T,K)), otherwise `name`."""
    merged = editor.match_kind(name, "reshape")
    expanded = editor.match_kind(merged.inputs[0], "expand") if merged is not None else None
    if expanded is None:
        return name
    wide, narrow = editor.value_shape(expanded.outputs[0]), editor.value_shape(expanded.inputs[0])
    source = editor.skip_kinds(expanded.inputs[0], ("reshape",))
    if len(wide) == 5 and narrow == (*wide[:2], 1, *wide[3:]) and editor.value_shape(source) == (*wide[:2], *wide[3:]):
        return source
    return name


def lift_attention(graph: Graph) -> Graph:
    """Attention in (rows, heads, tokens, features) -> attention in (rows, tokens, heads, features) between transposes,
    which `merge_transposes` then cancels with the model's transposes."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        if operator.kind != "attention_bhtk" or len(editor.value_shape(operator.inputs[0])) != 4:
            continue
        swapped = []
        for name in operator.inputs:
            shape = editor.value_shape(name)
            turned = (shape[0], shape[2], shape[1], shape[3])
            swapped.append(
                editor.insert_operator(
                    operator, "transpose", (name,), turned, editor.value_dtype(name), {"dims": _SWAP}
                )
            )
        heads, groups = editor.value_shape(operator.inputs[0])[1], editor.value_shape(operator.inputs[1])[1]
        if isinstance(heads, str) or isinstance(groups, str) or heads % groups:
            continue
        out_shape = (*editor.value_shape(swapped[0])[:-1], editor.value_shape(swapped[2])[-1])
        attributes = {**operator.attributes, "window": operator.attributes.get("window")}
        inner = editor.insert_operator(
            operator, "attention", tuple(swapped), out_shape, editor.value_dtype(swapped[0]), attributes
        )
        editor.replace_operator(operator, "transpose", (inner,), {"dims": _SWAP})
    return editor.build_graph()


def lift_cross_entropy(graph: Graph) -> Graph:
    """cross_entropy over flattened (B*T, V) logits, with casts -> over (B, T, V) logits and (B, T) labels."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        if operator.kind != "cross_entropy":
            continue
        logits = editor.skip_kinds(operator.inputs[0], ("cast", "reshape"))
        labels = editor.skip_kinds(operator.inputs[1], ("reshape",))
        flat = len(editor.value_shape(operator.inputs[0])) == 2
        if (
            flat
            and len(editor.value_shape(logits)) == 3
            and editor.value_shape(logits)[:2] == editor.value_shape(labels)
        ):
            editor.replace_operator(operator, "cross_entropy", (logits, labels), operator.attributes)
    return editor.build_graph()


def remove_dead(graph: Graph) -> Graph:
    """Remove operators that no output needs."""
    return GraphEditor(graph).build_graph()


LIFT_PASSES: tuple[Callable[[Graph], Graph], ...] = (
    remove_dead,
    remove_casts_of_equal_types,
    merge_reshapes,
    merge_transposes,
    lift_linear,
    lift_rms_norm,
    lift_repeated_keys,
    lift_attention,
    merge_transposes,
    lift_cross_entropy,
    remove_casts_of_equal_types,
)
