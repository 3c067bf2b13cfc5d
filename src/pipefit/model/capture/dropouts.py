"""Dropout of complete models, keyed by the row and the index within the row, for any meaning of the dimensions."""

from __future__ import annotations

from typing import Any

from pipefit.model.capture.emitter import GraphEmitter, UnconvertibleError
from pipefit.model.capture.row_constants import divided_shape


def emit_row_dropout(emitter: GraphEmitter, x: Any, p: float, training: bool, line: str) -> str:
    """Emit dropout of the value of a node. Rows may be flattened with dimensions behind them. Raises
    UnconvertibleError, with the line of the model, for a value without rows in front."""
    if not training or p == 0:
        return emitter.value_name(x)
    shape, dtype = emitter.node_shape(x), emitter.node_dtype(x)
    apart = divided_shape(shape)
    if apart[:1] != ("B",):
        raise UnconvertibleError(f"dropout of a tensor without rows in dimension 0, or of entire features{line}")
    emitter.dropouts += 1
    attributes = {"p": p, "index": emitter.dropouts - 1, "by": "rows"}
    name = emitter.value_name(x)
    if apart == shape:
        return emitter.emit("dropout", (name,), shape, dtype, attributes)
    name = emitter.emit("reshape", (name,), apart, dtype, {"shape": list(apart)})
    name = emitter.emit("dropout", (name,), apart, dtype, attributes)
    return emitter.emit("reshape", (name,), shape, dtype, {"shape": list(shape)})
