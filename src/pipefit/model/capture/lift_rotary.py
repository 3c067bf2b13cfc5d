"""Recognition of rotary position embeddings in exported graphs.

Four forms are known, each over cos and sin of an angle, positions times constant frequencies:

    half         x * cos + concat(-x2, x1) * sin                     (Hugging Face), x1, x2 the halves of x
    half         concat(x1 * cos - x2 * sin, x2 * cos + x1 * sin)    (over half-wide cos and sin)
    interleaved  x * cos + interleave(-x2, x1) * sin                 (GPT-J), x1, x2 the even and odd features
    interleaved  interleave(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipefit.model.capture.rewrite import GraphEditor
from pipefit.model.graph import Graph, Operator, Shape
from pipefit.model.ops.constant import unpack_numbers
from pipefit.model.ops.rotary import rotary_frequencies

_LOOSE = ("cast", "reshape", "transpose", "expand")
_RELATIVE_TOLERANCE = 2e-6
"Tolerance for frequencies, which are float32 in a captured graph."


@dataclass(frozen=True, slots=True)
class _RotaryWave:
    """cos or sin of positions times frequencies, times a factor."""

    function: str
    positions: str
    frequencies: tuple[float, ...]
    factor: float
    spread: str
    "Layout of the frequencies in the features: `half` (concatenated twice), `interleaved` (each twice), `once`."
    shape: Shape


@dataclass(frozen=True, slots=True)
class _RotaryMatch:
    x: str
    positions: str
    frequencies: tuple[float, ...]
    factor: float
    style: str
    wave_shape: Shape


def lift_rotary(graph: Graph, candidates: Sequence[Mapping[str, Any]] = ()) -> Graph:
    """Replace every rotary embedding by a `rotary` operator. `candidates` are attribute sets that are preferred if
    their frequencies match the graph's, so that a named scaling keeps its name."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        rotated = _match_rotated(editor, operator)
        if rotated is not None and rotated.positions in editor.inputs:
            _insert_rotary(editor, operator, rotated, candidates)
    return _with_passed_features(editor.build_graph())


def _insert_rotary(
    editor: GraphEditor, operator: Operator, found: _RotaryMatch, candidates: Sequence[Mapping[str, Any]]
) -> None:
    attributes = {**_rotary_attributes(found, candidates), "style": found.style}
    shape = editor.value_shape(found.x)
    if len(shape) != 4:
        return
    tokens_at = _token_dimension(found.wave_shape)
    if tokens_at == 1:
        editor.replace_operator(operator, "rotary", (found.x, found.positions), attributes)
    elif tokens_at == 2:
        turned, dtype = (shape[0], shape[2], shape[1], shape[3]), editor.value_dtype(found.x)
        swap = {"dims": [0, 2, 1, 3]}
        x = editor.insert_operator(operator, "transpose", (found.x,), turned, dtype, swap)
        inner = editor.insert_operator(operator, "rotary", (x, found.positions), turned, dtype, attributes)
        editor.replace_operator(operator, "transpose", (inner,), swap)


def _token_dimension(shape: Shape) -> int | None:
    """The index of the token dimension in the shape of cos before broadcasting: (B,T,1,K) or (B,1,T,K); None for
    others."""
    if len(shape) != 4:
        return None
    if shape[2] == 1 and shape[1] == "T":
        return 1
    return 2 if shape[1] == 1 and shape[2] == "T" else None


def _rotary_attributes(found: _RotaryMatch, candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """theta, dim and scaling that give the frequencies of the graph."""
    dim = 2 * len(found.frequencies)
    theta = found.frequencies[1] ** (-len(found.frequencies)) if len(found.frequencies) > 1 else 10000.0
    rounded = [{"theta": float(f"{theta:.{digits}g}"), "dim": dim, "scaling": None} for digits in range(1, 8)]
    for attributes in (*candidates, *rounded):
        values, factor = rotary_frequencies(attributes)
        if len(values) == len(found.frequencies) and _all_close([*values, factor], [*found.frequencies, found.factor]):
            return {"theta": attributes["theta"], "dim": dim, "scaling": attributes["scaling"]}
    scaling = {"rope_type": "frequencies", "values": list(found.frequencies), "attention_factor": found.factor}
    return {"theta": float(f"{theta:.4g}"), "dim": dim, "scaling": scaling}


def _all_close(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(abs(x - y) <= _RELATIVE_TOLERANCE * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True))


def _match_rotated(editor: GraphEditor, operator: Operator) -> _RotaryMatch | None:
    if operator.kind == "add":
        return _match_sum_form(editor, operator)
    if operator.kind == "concat" and len(operator.inputs) == 2:
        return _match_pair_form(editor, operator, "half")
    if operator.kind == "reshape":
        joined = editor.match_kind(operator.inputs[0], "concat")
        if joined is not None and len(joined.inputs) == 2 and _is_interleave(editor, operator, joined):
            return _match_pair_form(editor, joined, "interleaved")
    return None


def _match_sum_form(editor: GraphEditor, operator: Operator) -> _RotaryMatch | None:
    """x * cos + turned(x) * sin."""
    if not operator.inputs[1]:
        return None
    for left, right in (operator.inputs, operator.inputs[::-1]):
        first, second = _match_times_wave(editor, left, "cos"), _match_times_wave(editor, right, "sin")
        if first is None or second is None:
            continue
        (x, cos), (turned, sin) = first, second
        style = _turned_style(editor, turned, x)
        if style is not None and cos.spread == sin.spread == style and _same_angle(cos, sin):
            return _RotaryMatch(x, cos.positions, cos.frequencies, cos.factor, style, cos.shape)
    return None


def _match_pair_form(editor: GraphEditor, joined: Operator, style: str) -> _RotaryMatch | None:
    """concat or interleave of (x1 * cos - x2 * sin, x2 * cos + x1 * sin)."""
    behind = [editor.skip_kinds(name, ("reshape", "cast")) for name in joined.inputs]
    minus, plus = editor.match_kind(behind[0], "sub"), editor.match_kind(behind[1], "add")
    if minus is None or plus is None or not minus.inputs[1] or not plus.inputs[1]:
        return None
    first, second = _match_times_wave(editor, minus.inputs[0], "cos"), _match_times_wave(editor, minus.inputs[1], "sin")
    if first is None or second is None:
        return None
    (x1, cos), (x2, sin) = first, second
    terms = [_match_times_wave(editor, name, kind) for name in plus.inputs for kind in ("cos", "sin")]
    products = {(term[0], term[1].function) for term in terms if term is not None}
    source = _parts_of(editor, x1, x2, style)
    if products != {(x2, "cos"), (x1, "sin")} or source is None or not _same_angle(cos, sin) or cos.spread != "once":
        return None
    return _RotaryMatch(source, cos.positions, cos.frequencies, cos.factor, style, cos.shape)


def _same_angle(a: _RotaryWave, b: _RotaryWave) -> bool:
    return (a.positions, a.frequencies, a.factor, a.shape) == (b.positions, b.frequencies, b.factor, b.shape)


def _match_times_wave(editor: GraphEditor, name: str, function: str) -> tuple[str, _RotaryWave] | None:
    """(x, wave) if `name` is x * wave, otherwise None; casts of x are dropped."""
    product = editor.match_kind(name, "mul")
    if product is None or not product.inputs[1]:
        return None
    for x, wave_name in (product.inputs, product.inputs[::-1]):
        wave = _match_wave(editor, wave_name)
        if wave is not None and wave.function == function:
            return editor.skip_kinds(x, ("cast",)), wave
    return None


def _match_wave(editor: GraphEditor, name: str) -> _RotaryWave | None:
    """Match cos or sin of positions * frequencies behind casts, reshapes, copies along features and a scalar factor."""
    shape, factor, spread = editor.value_shape(name), 1.0, "once"
    operator = editor.find_producer(name)
    while operator is not None and operator.kind not in ("cos", "sin"):
        doubled = _doubling_style(editor, operator)
        if doubled is not None and spread == "once":
            spread = doubled
        elif operator.kind == "mul" and not operator.inputs[1]:
            factor *= float(operator.attributes["scalar"])
        elif operator.kind not in _LOOSE:
            return None
        operator = editor.find_producer(operator.inputs[0])
    if operator is None:
        return None
    angle = _match_angle(editor, operator.inputs[0], spread)
    return None if angle is None else _RotaryWave(operator.kind, angle[0], angle[1], factor, angle[2], shape)


def _match_angle(editor: GraphEditor, name: str, spread: str) -> tuple[str, tuple[float, ...], str] | None:
    """(positions, frequencies, spread) if `name` is positions * constant frequencies, otherwise None."""
    operator = editor.find_producer(name)
    while operator is not None:
        doubled = _doubling_style(editor, operator)
        if doubled is not None and spread == "once":
            spread = doubled
        elif operator.kind == "mul" and operator.inputs[1]:
            break
        elif operator.kind not in _LOOSE:
            return None
        operator = editor.find_producer(operator.inputs[0])
    if operator is None:
        return None
    for positions, constant in (operator.inputs, operator.inputs[::-1]):
        values = editor.match_kind(editor.skip_kinds(constant, _LOOSE), "constant")
        source = editor.skip_kinds(positions, _LOOSE)
        if values is not None and source in editor.inputs and editor.inputs[source].role == "positions":
            return _remove_doubling(source, tuple(unpack_numbers(values.attributes["values"]).tolist()), spread)
    return None


def _remove_doubling(source: str, values: tuple[float, ...], spread: str) -> tuple[str, tuple[float, ...], str]:
    """Halve frequencies that were already doubled as constants."""
    half = len(values) // 2
    if spread == "once" and half and values[:half] == values[half:]:
        return source, values[:half], "half"
    if spread == "once" and half > 1 and values[::2] == values[1::2]:
        return source, values[::2], "interleaved"
    return source, values, spread


def _doubling_style(editor: GraphEditor, operator: Operator) -> str | None:
    """`half` for concat(a, a) along the last dimension; `interleaved` if every entry is repeated twice in a row."""
    if operator.kind == "repeat_interleave" and operator.attributes == {"repeats": 2}:
        return "interleaved"
    joined = operator if operator.kind == "concat" else None
    if operator.kind == "reshape":
        joined = editor.match_kind(operator.inputs[0], "concat")
        if joined is None or not _is_interleave(editor, operator, joined):
            return None
    if joined is None or len({editor.skip_kinds(name, ("reshape",)) for name in joined.inputs}) != 1:
        return None
    if len(joined.inputs) != 2 or joined.attributes["dim"] != len(editor.value_shape(joined.outputs[0])) - 1:
        return None
    return "half" if joined is operator else "interleaved"


def _is_interleave(editor: GraphEditor, reshape: Operator, joined: Operator) -> bool:
    """Return whether the two operators are stack(..., -1).flatten(-2): (..., n, 2) -> (..., 2n)."""
    before, after = editor.value_shape(joined.outputs[0]), editor.value_shape(reshape.outputs[0])
    if joined.attributes["dim"] != len(before) - 1 or before[-1] != 2 or len(after) != len(before) - 1:
        return False
    return before[:-2] == after[:-1]


def _turned_style(editor: GraphEditor, turned: str, x: str) -> str | None:
    """`half` if `turned` is concat(-x2, x1) of the halves of x; `interleaved` if it interleaves -odd and even
    features."""
    operator = editor.find_producer(editor.skip_kinds(turned, ("cast",)))
    style = "half"
    if operator is not None and operator.kind == "reshape":
        joined = editor.match_kind(operator.inputs[0], "concat")
        if joined is None or not _is_interleave(editor, operator, joined):
            return None
        operator, style = joined, "interleaved"
    if operator is None or operator.kind != "concat" or len(operator.inputs) != 2:
        return None
    negated = editor.match_kind(editor.skip_kinds(operator.inputs[0], ("reshape", "cast")), "neg")
    if negated is None:
        return None
    source = _parts_of(editor, editor.skip_kinds(operator.inputs[1], ("reshape", "cast")), negated.inputs[0], style)
    return style if source == x else None


def _parts_of(editor: GraphEditor, first: str, second: str, style: str) -> str | None:
    """x if `first` and `second` are its halves (style half) or its even and odd features (interleaved), otherwise
    None."""
    parts = [editor.skip_kinds(name, ("cast", "reshape")) for name in (first, second)]
    kind = "slice" if style == "half" else "strided_slice"
    a, b = (editor.match_kind(name, kind) for name in parts)
    if a is None or b is None or editor.resolve_name(a.inputs[0]) != editor.resolve_name(b.inputs[0]):
        return None
    shape = editor.value_shape(a.inputs[0])
    width, last = shape[-1], len(shape) - 1
    if not isinstance(width, int) or a.attributes["dim"] != last or b.attributes["dim"] != last:
        return None
    if style == "half":
        right = (a.attributes["start"], a.attributes["stop"], b.attributes["start"], b.attributes["stop"])
        holds = right == (0, width // 2, width // 2, width)
    else:
        holds = (a.attributes["start"], b.attributes["start"]) == (0, 1) and a.attributes["step"] == 2
        holds = holds and b.attributes["step"] == 2
    return editor.skip_kinds(a.inputs[0], ("cast",)) if holds else None


def _with_passed_features(graph: Graph) -> Graph:
    """concat(rotary(first features of x), remaining features of x) -> rotary of x with a smaller dim."""
    editor = GraphEditor(graph)
    for operator in graph.operators:
        if operator.kind != "concat" or len(operator.inputs) != 2:
            continue
        rotary, passed = editor.match_kind(operator.inputs[0], "rotary"), editor.match_kind(operator.inputs[1], "slice")
        turned = editor.match_kind(rotary.inputs[0], "slice") if rotary is not None else None
        if rotary is None or passed is None or turned is None:
            continue
        x, dim = editor.resolve_name(turned.inputs[0]), rotary.attributes["dim"]
        last = len(editor.value_shape(x)) - 1
        edges = (turned.attributes["start"], turned.attributes["stop"], passed.attributes["start"])
        same = editor.resolve_name(passed.inputs[0]) == x and operator.attributes["dim"] == last
        if same and edges == (0, dim, dim) and passed.attributes["stop"] == editor.value_shape(x)[-1]:
            editor.replace_operator(operator, "rotary", (x, rotary.inputs[1]), rotary.attributes)
    return editor.build_graph()
