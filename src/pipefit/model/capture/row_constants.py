"""Constants of a complete model that have rows: masks, positions and first states, equal for all rows.

A node of only known numbers and the number of rows is computed for two numbers of rows. If all rows of both results are
equal, the value is one row, expanded. So a mask built for every row of a batch is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipefit.model.capture.emitter import GraphEmitter, UnconvertibleError, line_of
from pipefit.model.graph import Shape, size_factors

if TYPE_CHECKING:
    import torch

ROW_COUNTS = (3, 5)
"""The two numbers of rows."""

MASK_BYTES = 1 << 31
"""The largest mask that is computed, with all rows: sequences of up to 20,000 tokens."""

Numbers = tuple[Any, Any]
"""A value for each of the `ROW_COUNTS`."""


def fold_rows(emitter: GraphEmitter, node: Any) -> bool:
    """Compute a node whose inputs are all known, some of them by the number of rows. Returns whether it did."""
    import torch

    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not _is_foldable(emitter, node):
        return False
    limit = MASK_BYTES if value.dtype == torch.bool else ROW_COUNTS[1] * emitter.largest
    if _count_elements(value, emitter, limit) > limit:
        return False
    shape = emitter.node_shape(node)
    if _reads_shared_rows(emitter, node, shape):
        row = _evaluate_node(emitter, node, 0, one_row=True)
        numbers = tuple(row.expand([rows if size == "B" else size for size in shape]) for rows in ROW_COUNTS)
    else:
        numbers = tuple(_share_rows(_evaluate_node(emitter, node, version), shape) for version in (0, 1))
    emitter.row_constants[node] = (numbers[0], numbers[1])
    if all(isinstance(size, int) for size in value.shape) and torch.equal(*numbers):
        emitter.constants[node] = emitter.row_constants.pop(node)[0]
    return True


def one_row(emitter: GraphEmitter, node: Any) -> torch.Tensor | None:
    """Return the numbers of one row of a row constant, with size 1 along rows; None if rows differ."""
    import torch

    if node not in emitter.row_constants:
        return None
    shape, versions = emitter.node_shape(node), zip(emitter.row_constants[node], ROW_COUNTS, strict=True)
    first, second = (_reduce_rows(numbers, shape, rows) for numbers, rows in versions)
    return first if first is not None and second is not None and torch.equal(first, second) else None


def emit_row_constant(emitter: GraphEmitter, node: Any) -> str:
    """Emit one row as a constant, and its expansion. Raises UnconvertibleError if rows differ."""
    numbers = one_row(emitter, node)
    if numbers is None:
        raise UnconvertibleError(f"numbers that count the rows of a batch{line_of(node)}")
    shape, dtype = emitter.node_shape(node), emitter.node_dtype(node)
    name = emitter.emit_numbers(numbers, dtype)
    apart: Shape = divided_shape(shape)
    if any(size == "B" for size in apart):
        name = emitter.emit("expand", (name,), apart, dtype, {"shape": list(apart)})
    if apart != shape:
        name = emitter.emit("reshape", (name,), shape, dtype, {"shape": list(shape)})
    return name


def _is_foldable(emitter: GraphEmitter, node: Any) -> bool:
    """Return whether all inputs are known and no random number is drawn."""
    if draws_numbers(node) or "empty" in str(node.target):
        return False
    for source in node.all_input_nodes:
        if source in emitter.constants or source in emitter.row_constants:
            continue
        value = source.meta.get("val")
        if value is None or hasattr(value, "shape") or isinstance(value, (list, tuple)):
            return False
        if _number_at(emitter, value, 0) is None:
            return False
    return True


def draws_numbers(node: Any) -> bool:
    """Return whether the function of a node draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return any(str(tag).endswith("nondeterministic_seeded") for tag in tags) or "dropout" in str(node.target)


def _function_name(node: Any) -> str:
    """The name of an ATen function without its overload; empty for any other function."""
    return f"{node.target}..".split(".")[1]


def _share_rows(numbers: Any, shape: Shape) -> Any:
    """The same numbers, in the memory of one row if all rows are equal."""
    if shape.count("B") != 1 or numbers.shape[shape.index("B")] < 2:
        return numbers
    row = numbers.narrow(shape.index("B"), 0, 1)
    return row.clone().expand_as(numbers) if bool((row == numbers).all()) else numbers


def _count_elements(value: Any, emitter: GraphEmitter, limit: int) -> int:
    """The number of elements; more than the limit if a size depends on anything but rows."""
    total = 1
    for size in value.shape:
        number = _number_at(emitter, size, 1)
        total *= limit + 1 if number is None else number
    return int(total)


def _number_at(emitter: GraphEmitter, value: Any, version: int) -> Any:
    """A number of the export for one of the row counts; None if it depends on anything but rows."""
    if isinstance(value, (int, float, bool)):
        return value
    expression = getattr(getattr(value, "node", None), "expr", None)
    if expression is None or any(str(symbol) not in emitter.symbols for symbol in expression.free_symbols):
        return None
    number = expression.subs(dict.fromkeys(expression.free_symbols, ROW_COUNTS[version]))
    return int(number) if number.is_Integer else bool(number) if number.is_Boolean else float(number)


ELEMENTWISE = {"le", "lt", "ge", "gt", "eq", "ne", "__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not",
               "logical_and", "logical_or", "logical_not", "where"}  # fmt: skip
"""Functions of masks that treat every element alone."""


def _reads_shared_rows(emitter: GraphEmitter, node: Any, shape: Shape) -> bool:
    """Return whether a function of each element reads equal rows alone, so that one row is enough."""
    if _function_name(node) not in ELEMENTWISE or shape.count("B") != 1:
        return False
    for source in node.all_input_nodes:
        if source in emitter.row_constants:
            rows = emitter.node_shape(source)
            if rows.count("B") != 1 or emitter.row_constants[source][0].stride(rows.index("B")) != 0:
                return False
            if len(rows) - rows.index("B") != len(shape) - shape.index("B"):
                return False
        elif source not in emitter.constants:
            return False
    return True


def _evaluate_node(emitter: GraphEmitter, node: Any, version: int, one_row: bool = False) -> Any:
    """The value of a node for one of the row counts, or its one row if all values that it reads have equal rows."""
    import torch

    name = _function_name(node)
    copied = "view" in name or (name.endswith("_") and not name.startswith("__"))

    def known_value(item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            if item in emitter.row_constants:
                numbers = emitter.row_constants[item][version]
                numbers = numbers.narrow(emitter.node_shape(item).index("B"), 0, 1) if one_row else numbers
                return _to_float64(numbers, copied)
            if item in emitter.constants:
                return _to_float64(emitter.constants[item], copied)
            return _number_at(emitter, item.meta["val"], version)
        if isinstance(item, torch.dtype) and (item.is_floating_point or item.is_complex):
            return torch.complex128 if item.is_complex else torch.float64  # no rounding to the dtypes of the export
        if isinstance(item, (torch.SymInt, torch.SymFloat)):
            return _number_at(emitter, item, version)
        return torch.device("cpu") if isinstance(item, torch.device) else item

    arguments = torch.fx.node.map_aggregate(node.args, known_value)
    keywords = torch.fx.node.map_aggregate(dict(node.kwargs), known_value)
    return node.target(*arguments, **keywords)


def _to_float64(numbers: Any, copied: bool) -> Any:
    """The numbers in float64 unless the dtype is integer; a copy for functions that change their arguments, or that
    need all rows in memory."""
    import torch

    wide = numbers.double() if numbers.is_floating_point() else numbers
    return wide.clone(memory_format=torch.contiguous_format) if copied else wide


def divided_shape(shape: Shape) -> Shape:
    """A shape with rows in a dimension of their own: (12 * B, D) -> (B, 12, D)."""
    divided: list[Any] = []
    for size in shape:
        factor, symbols = size_factors(str(size))
        divided += ["B", factor] if symbols == ("B",) and factor != 1 else [size]
    return tuple(divided)


def _reduce_rows(numbers: Any, shape: Shape, rows: int) -> Any:
    """The numbers with size 1 along every dimension of rows; None if they differ between rows."""
    import torch

    apart = divided_shape(shape)
    if any(isinstance(size, str) and size != "B" for size in apart):
        return None
    reduced = numbers.reshape([rows if size == "B" else size for size in apart])
    for dim, size in enumerate(apart):
        if size == "B":
            row = reduced.narrow(dim, 0, 1)
            if not torch.equal(row.expand_as(reduced), reduced):
                return None
            reduced = row
    return reduced.clone()
