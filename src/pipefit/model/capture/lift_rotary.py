"""Recovering rotary position embeddings, however they are written.

Four spellings are known, each over cos and sin of an angle that is positions times constant frequencies:

    half         x * cos + concat(-x2, x1) * sin                     (Hugging Face), x1, x2 the halves of x
    half         concat(x1 * cos - x2 * sin, x2 * cos + x1 * sin)    (over half-wide cos and sin)
    interleaved  x * cos + interleave(-x2, x1) * sin                 (GPT-J), x1, x2 the even and odd features
    interleaved  interleave(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipefit.model.capture.rewrite import Editor
from pipefit.model.graph import Graph, Operator, Shape
from pipefit.model.ops.rotary import frequencies

_LOOSE = ("cast", "reshape", "transpose", "expand")
_RELATIVE_TOLERANCE = 2e-6
"Frequencies in a captured graph are float32."


@dataclass(frozen=True, slots=True)
class _Wave:
    """cos or sin of positions times frequencies, times a factor."""

    function: str
    positions: str
    frequencies: tuple[float, ...]
    factor: float
    spread: str
    "How the frequencies fill the features: `half` (twice, one after the other), `interleaved` (each twice), `once`."
    shape: Shape


@dataclass(frozen=True, slots=True)
class _Found:
    x: str
    positions: str
    frequencies: tuple[float, ...]
    factor: float
    style: str
    wave_shape: Shape


def lift_rotary(graph: Graph, candidates: Sequence[Mapping[str, Any]] = ()) -> Graph:
    """Replace every rotary embedding by a `rotary` operator. `candidates` are attribute sets preferred when their
    frequencies agree with the graph's, so that a named scaling stays named."""
    editor = Editor(graph)
    for operator in graph.operators:
        found = _rotated(editor, operator)
        if found is not None and found.positions in editor.inputs:
            _put(editor, operator, found, candidates)
    return _with_passed_features(editor.graph_now())


def _put(editor: Editor, operator: Operator, found: _Found, candidates: Sequence[Mapping[str, Any]]) -> None:
    attributes = {**_attributes(found, candidates), "style": found.style}
    shape = editor.shape(found.x)
    if len(shape) != 4:
        return
    tokens_at = _token_dimension(found.wave_shape)
    if tokens_at == 1:
        editor.replace(operator, "rotary", (found.x, found.positions), attributes)
    elif tokens_at == 2:
        turned, dtype = (shape[0], shape[2], shape[1], shape[3]), editor.dtype(found.x)
        swap = {"dims": [0, 2, 1, 3]}
        x = editor.insert(operator, "transpose", (found.x,), turned, dtype, swap)
        inner = editor.insert(operator, "rotary", (x, found.positions), turned, dtype, attributes)
        editor.replace(operator, "transpose", (inner,), swap)


def _token_dimension(shape: Shape) -> int | None:
    """Where the tokens are in the shape that cos broadcasts from: (B,T,1,K) or (B,1,T,K)."""
    if len(shape) != 4:
        return None
    if shape[2] == 1 and shape[1] == "T":
        return 1
    return 2 if shape[1] == 1 and shape[2] == "T" else None


def _attributes(found: _Found, candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """theta, dim and scaling whose frequencies are those of the graph."""
    dim = 2 * len(found.frequencies)
    theta = found.frequencies[1] ** (-len(found.frequencies)) if len(found.frequencies) > 1 else 10000.0
    rounded = [{"theta": float(f"{theta:.{digits}g}"), "dim": dim, "scaling": None} for digits in range(1, 8)]
    for attributes in (*candidates, *rounded):
        values, factor = frequencies(attributes)
        if len(values) == len(found.frequencies) and _close([*values, factor], [*found.frequencies, found.factor]):
            return {"theta": attributes["theta"], "dim": dim, "scaling": attributes["scaling"]}
    scaling = {"rope_type": "frequencies", "values": list(found.frequencies), "attention_factor": found.factor}
    return {"theta": float(f"{theta:.4g}"), "dim": dim, "scaling": scaling}


def _close(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(abs(x - y) <= _RELATIVE_TOLERANCE * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True))


def _rotated(editor: Editor, operator: Operator) -> _Found | None:
    if operator.kind == "add":
        return _sum_form(editor, operator)
    if operator.kind == "concat" and len(operator.inputs) == 2:
        return _pair_form(editor, operator, "half")
    if operator.kind == "reshape":
        joined = editor.match(operator.inputs[0], "concat")
        if joined is not None and len(joined.inputs) == 2 and _is_interleave(editor, operator, joined):
            return _pair_form(editor, joined, "interleaved")
    return None


def _sum_form(editor: Editor, operator: Operator) -> _Found | None:
    """x * cos + turned(x) * sin."""
    if not operator.inputs[1]:
        return None
    for left, right in (operator.inputs, operator.inputs[::-1]):
        first, second = _times_wave(editor, left, "cos"), _times_wave(editor, right, "sin")
        if first is None or second is None:
            continue
        (x, cos), (turned, sin) = first, second
        style = _turned_style(editor, turned, x)
        if style is not None and cos.spread == sin.spread == style and _same_angle(cos, sin):
            return _Found(x, cos.positions, cos.frequencies, cos.factor, style, cos.shape)
    return None


def _pair_form(editor: Editor, joined: Operator, style: str) -> _Found | None:
    """concat or interleave of (x1 * cos - x2 * sin, x2 * cos + x1 * sin)."""
    behind = [editor.through(name, ("reshape", "cast")) for name in joined.inputs]
    minus, plus = editor.match(behind[0], "sub"), editor.match(behind[1], "add")
    if minus is None or plus is None or not minus.inputs[1] or not plus.inputs[1]:
        return None
    first, second = _times_wave(editor, minus.inputs[0], "cos"), _times_wave(editor, minus.inputs[1], "sin")
    if first is None or second is None:
        return None
    (x1, cos), (x2, sin) = first, second
    terms = [_times_wave(editor, name, kind) for name in plus.inputs for kind in ("cos", "sin")]
    products = {(term[0], term[1].function) for term in terms if term is not None}
    source = _parts_of(editor, x1, x2, style)
    if products != {(x2, "cos"), (x1, "sin")} or source is None or not _same_angle(cos, sin) or cos.spread != "once":
        return None
    return _Found(source, cos.positions, cos.frequencies, cos.factor, style, cos.shape)


def _same_angle(a: _Wave, b: _Wave) -> bool:
    return (a.positions, a.frequencies, a.factor, a.shape) == (b.positions, b.frequencies, b.factor, b.shape)


def _times_wave(editor: Editor, name: str, function: str) -> tuple[str, _Wave] | None:
    """(x, wave) where `name` is x * wave; casts of x are dropped."""
    product = editor.match(name, "mul")
    if product is None or not product.inputs[1]:
        return None
    for x, wave_name in (product.inputs, product.inputs[::-1]):
        wave = _wave(editor, wave_name)
        if wave is not None and wave.function == function:
            return editor.through(x, ("cast",)), wave
    return None


def _wave(editor: Editor, name: str) -> _Wave | None:
    """cos or sin of positions * frequencies behind casts, reshapes, copies along features and a scalar factor."""
    shape, factor, spread = editor.shape(name), 1.0, "once"
    operator = editor.producer(name)
    while operator is not None and operator.kind not in ("cos", "sin"):
        doubled = _doubled(editor, operator)
        if doubled is not None and spread == "once":
            spread = doubled
        elif operator.kind == "mul" and not operator.inputs[1]:
            factor *= float(operator.attributes["scalar"])
        elif operator.kind not in _LOOSE:
            return None
        operator = editor.producer(operator.inputs[0])
    if operator is None:
        return None
    angle = _angle(editor, operator.inputs[0], spread)
    return None if angle is None else _Wave(operator.kind, angle[0], angle[1], factor, angle[2], shape)


def _angle(editor: Editor, name: str, spread: str) -> tuple[str, tuple[float, ...], str] | None:
    """(positions, frequencies, spread) where `name` is positions * constant frequencies."""
    operator = editor.producer(name)
    while operator is not None:
        doubled = _doubled(editor, operator)
        if doubled is not None and spread == "once":
            spread = doubled
        elif operator.kind == "mul" and operator.inputs[1]:
            break
        elif operator.kind not in _LOOSE:
            return None
        operator = editor.producer(operator.inputs[0])
    if operator is None:
        return None
    for positions, constant in (operator.inputs, operator.inputs[::-1]):
        values = editor.match(editor.through(constant, _LOOSE), "constant")
        source = editor.through(positions, _LOOSE)
        if values is not None and source in editor.inputs and editor.inputs[source].role == "positions":
            return _undouble(source, tuple(float(value) for value in values.attributes["values"]), spread)
    return None


def _undouble(source: str, values: tuple[float, ...], spread: str) -> tuple[str, tuple[float, ...], str]:
    """Frequencies that were doubled as constants already."""
    half = len(values) // 2
    if spread == "once" and half and values[:half] == values[half:]:
        return source, values[:half], "half"
    if spread == "once" and half > 1 and values[::2] == values[1::2]:
        return source, values[::2], "interleaved"
    return source, values, spread


def _doubled(editor: Editor, operator: Operator) -> str | None:
    """`half` for concat(a, a) along the last dimension; `interleaved` where every entry stands twice in a row."""
    if operator.kind == "repeat_interleave" and operator.attributes == {"repeats": 2}:
        return "interleaved"
    joined = operator if operator.kind == "concat" else None
    if operator.kind == "reshape":
        joined = editor.match(operator.inputs[0], "concat")
        if joined is None or not _is_interleave(editor, operator, joined):
            return None
    if joined is None or len({editor.through(name, ("reshape",)) for name in joined.inputs}) != 1:
        return None
    if len(joined.inputs) != 2 or joined.attributes["dim"] != len(editor.shape(joined.outputs[0])) - 1:
        return None
    return "half" if joined is operator else "interleaved"


def _is_interleave(editor: Editor, reshape: Operator, joined: Operator) -> bool:
    """Whether the two are stack(..., -1).flatten(-2): (..., n, 2) -> (..., 2n)."""
    before, after = editor.shape(joined.outputs[0]), editor.shape(reshape.outputs[0])
    if joined.attributes["dim"] != len(before) - 1 or before[-1] != 2 or len(after) != len(before) - 1:
        return False
    return before[:-2] == after[:-1]


def _turned_style(editor: Editor, turned: str, x: str) -> str | None:
    """`half` where `turned` is concat(-x2, x1) of halves of x; `interleaved` where it interleaves -odd, even."""
    operator = editor.producer(editor.through(turned, ("cast",)))
    style = "half"
    if operator is not None and operator.kind == "reshape":
        joined = editor.match(operator.inputs[0], "concat")
        if joined is None or not _is_interleave(editor, operator, joined):
            return None
        operator, style = joined, "interleaved"
    if operator is None or operator.kind != "concat" or len(operator.inputs) != 2:
        return None
    negated = editor.match(editor.through(operator.inputs[0], ("reshape", "cast")), "neg")
    if negated is None:
        return None
    source = _parts_of(editor, editor.through(operator.inputs[1], ("reshape", "cast")), negated.inputs[0], style)
    return style if source == x else None


def _parts_of(editor: Editor, first: str, second: str, style: str) -> str | None:
    """x where `first` and `second` are its halves (style half) or its even and odd features (interleaved)."""
    parts = [editor.through(name, ("cast", "reshape")) for name in (first, second)]
    kind = "slice" if style == "half" else "strided_slice"
    a, b = (editor.match(name, kind) for name in parts)
    if a is None or b is None or editor.resolve(a.inputs[0]) != editor.resolve(b.inputs[0]):
        return None
    shape = editor.shape(a.inputs[0])
    width, last = shape[-1], len(shape) - 1
    if not isinstance(width, int) or a.attributes["dim"] != last or b.attributes["dim"] != last:
        return None
    if style == "half":
        right = (a.attributes["start"], a.attributes["stop"], b.attributes["start"], b.attributes["stop"])
        holds = right == (0, width // 2, width // 2, width)
    else:
        holds = (a.attributes["start"], b.attributes["start"]) == (0, 1) and a.attributes["step"] == 2
        holds = holds and b.attributes["step"] == 2
    return editor.through(a.inputs[0], ("cast",)) if holds else None


def _with_passed_features(graph: Graph) -> Graph:
    """concat(rotary(first features of x), the other features of x) -> rotary of x with a smaller dim."""
    editor = Editor(graph)
    for operator in graph.operators:
        if operator.kind != "concat" or len(operator.inputs) != 2:
            continue
        rotary, passed = editor.match(operator.inputs[0], "rotary"), editor.match(operator.inputs[1], "slice")
        turned = editor.match(rotary.inputs[0], "slice") if rotary is not None else None
        if rotary is None or passed is None or turned is None:
            continue
        x, dim = editor.resolve(turned.inputs[0]), rotary.attributes["dim"]
        last = len(editor.shape(x)) - 1
        edges = (turned.attributes["start"], turned.attributes["stop"], passed.attributes["start"])
        same = editor.resolve(passed.inputs[0]) == x and operator.attributes["dim"] == last
        if same and edges == (0, dim, dim) and passed.attributes["stop"] == editor.shape(x)[-1]:
            editor.replace(operator, "rotary", (x, rotary.inputs[1]), rotary.attributes)
    return editor.graph_now()
