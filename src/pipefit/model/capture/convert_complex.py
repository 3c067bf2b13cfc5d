"""Converters of complex numbers, as some classes turn queries and keys: a complex value is its real and imaginary parts
along one more dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.capture.convert_any import converts_any
from pipefit.model.capture.emitter import CONVERTERS, GraphEmitter, UnconvertibleError, line_of
from pipefit.model.capture.row_constants import one_row


@converts_any("aten.view_as_complex", "aten.view_as_real")
def _convert_view(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    return emitter.value_name(args[0])


@converts_any("aten.mul")
def _convert_mul(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """Emit a product. A complex factor must be known: a + bi times c + si is (ac - bs) + (as + bc)i."""
    if not str(node.meta["val"].dtype).startswith("torch.complex"):
        return CONVERTERS["aten.mul"](emitter, node, args, kwargs)
    value, factor = args if _known_numbers(emitter, args[0]) is None else reversed(args)
    numbers = _known_numbers(emitter, factor)
    if numbers is None or value not in emitter.names:
        raise UnconvertibleError(f"a product of complex values{line_of(node)}")
    name = emitter.value_name(value)
    shape, dtype = (*emitter.node_shape(node), 1), emitter.tensors[name].dtype
    dim, before = len(shape) - 1, emitter.node_shape(value)
    real, imaginary = (
        emitter.emit("slice", (name,), (*before, 1), dtype, {"dim": dim, "start": part, "stop": part + 1})
        for part in (0, 1)
    )
    cosine, sine = (emitter.emit_numbers(part.unsqueeze(-1), dtype) for part in (numbers.real, numbers.imag))

    def multiply_parts(a: str, b: str) -> str:
        return emitter.emit("mul", (a, b), shape, dtype)

    parts = (
        emitter.emit("sub", (multiply_parts(real, cosine), multiply_parts(imaginary, sine)), shape, dtype),
        emitter.emit("add", (multiply_parts(real, sine), multiply_parts(imaginary, cosine)), shape, dtype),
    )
    return emitter.emit("concat", parts, (*shape[:-1], 2), dtype, {"dim": dim})


def _known_numbers(emitter: GraphEmitter, node: Any) -> Any:
    """The numbers of a constant with size 1 along rows; None for any other value."""
    return one_row(emitter, node) if node in emitter.row_constants else emitter.constants.get(node)
