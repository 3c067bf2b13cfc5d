"""Limits of the sequence length: a position table has a row for each position. Rotary positions have no limit.

`max_position_embeddings` of a rotary model is the length that it was trained for, not a limit, so it is not checked.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.errors import PlanError
from pipefit.model.graph import Graph, Model, ModelModule
from pipefit.model.ops import KINDS
from pipefit.plan.types import Plan


def fixed_length(model: Model) -> int | None:
    """Return the tokens of a row if the model fixes them, as a model captured as one graph does; None if any number
    works. Rows without tokens (images) have 1."""
    inputs = [tensor for layer in model.layers for tensor in model.layer_graph(layer).inputs]
    if any("T" in tensor.shape for tensor in inputs):
        return None
    return next((int(t.shape[1]) for t in inputs if t.role == "tokens" and len(t.shape) > 1), 1)


def resolve_length(model: Model, asked: int | None, where: str = "--seq") -> int:
    """Return the tokens of a row: the requested number, else the model's. Raises PlanError if neither is set or they
    differ."""
    fixed = fixed_length(model)
    tokens = fixed if asked is None else asked
    if fixed is not None and tokens is not None and tokens != fixed:
        raise _captured_length_error(fixed, tokens, where)
    if tokens is None:
        raise PlanError(
            "The sequence length is not set, and the model accepts any.",
            where=where,
            allowed="a whole number above zero",
            next_step=f"add {where} 1024",
        )
    return tokens


def check_length(module: ModelModule, model: Model, tokens: int, where: str) -> None:
    """Raise PlanError if `tokens` positions exceed the module's position table."""
    for error in _position_problems(module, model, tokens, where):
        raise error


def length_problems(plan: Plan, model: Model) -> Iterator[PlanError]:
    """Yield an error for every position table that is shorter than the plan's sequences."""
    spaces = {space.name: space.tokens for space in plan.spaces}
    for module in model.modules:
        tokens = spaces.get(module.space, 0) if len(model.modules) > 1 else 0
        yield from _position_problems(module, model, tokens or plan.job.sequence, "job.sequence")


def _position_problems(module: ModelModule, model: Model, tokens: int, where: str) -> Iterator[PlanError]:
    for layer in module.layers:
        for tensor in model.layer_graph(layer).inputs:
            fixed = tensor.shape[1] if tensor.role == "tokens" and len(tensor.shape) > 1 else "T"
            if isinstance(fixed, int) and fixed != tokens:
                yield _captured_length_error(fixed, tokens, where)
        for local, rows in position_tables(model.layer_graph(layer)).items():
            if tokens > rows:
                yield PlanError(
                    "The sequence is longer than the model's table of positions.",
                    where=f"{where} and {layer.parameters[local]} of layer {layer.name}",
                    seen=f"{tokens} tokens",
                    allowed=f"at most {rows}: the table has {rows} rows",
                    next_step=f"use sequences of {rows} tokens, or a model with more positions",
                )


def _captured_length_error(own: int, tokens: int, where: str) -> PlanError:
    return PlanError(
        "The model was captured as one graph, for one sequence length.",
        where=where,
        seen=f"{tokens} tokens",
        allowed=f"{own}, as in its example",
        next_step="give an example of that length (docs/reference/models.md)" if own > 1 else f"leave {where} out",
    )


def position_tables(graph: Graph) -> dict[str, int]:
    """Return {local name of each parameter that is looked up by position: number of positions}."""
    shapes = {parameter.name: parameter.shape for parameter in graph.parameters}
    offsets: dict[str, int] = {tensor.name: 0 for tensor in graph.inputs if tensor.role == "positions"}
    tables: dict[str, int] = {}
    for operator in graph.operators:
        first = operator.inputs[0] if operator.inputs else ""
        if first not in offsets:
            continue
        if KINDS[operator.kind].is_lookup:
            rows = shapes[operator.inputs[1]][0] - offsets[first]
            tables[operator.inputs[1]] = min(rows, tables.get(operator.inputs[1], rows))
        elif (number := KINDS[operator.kind].added_number(operator.attributes)) is not None:
            offsets[operator.outputs[0]] = offsets[first] + int(number)
    return tables
