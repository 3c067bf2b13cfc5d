"""Models whose sequences can be cut into slices, and slices that a stage can process.

A slice runs forward before later slices, and depends on earlier ones through causal attention alone. All other
operators must work on each token separately, and must not draw random numbers that depend on the cut. Dropout here is
keyed by token position, and experts drop no token and have no auxiliary loss, so both can be sliced. For an opaque
layer, only its class (`tokenwise`) and the PyTorch modules inside it are known. An operator of a plug-in works on each
token separately if its rule splits the tokens, which `pipefit.testing.operators.check_operator` verifies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipefit.errors import PlanError
from pipefit.layout import split_by_shares
from pipefit.model.graph import Graph, Model, Operator, Shape, has_tokens, shapes_of, size_factors
from pipefit.model.ops import KINDS
from pipefit.model.ops.table import PLUGINS
from pipefit.plan.types import Plan
from pipefit.shard.choice import SEQUENCES
from pipefit.shard.rules import labels_of

SPLIT_TOKENS = ("megatron-sp", "searched")
"""Shardings whose programs may split tokens."""


def check_sliceable(model: Model, where: str = "order.slices") -> None:
    """Raise PlanError for the first layer that prevents slicing."""
    for error in slicing_obstacles(model, where):
        raise error


def slicing_obstacles(model: Model, where: str = "order.slices") -> Iterator[PlanError]:
    """Yield an error for every layer that prevents slicing; none if slices are possible."""
    if len(model.modules) > 1:
        yield PlanError(
            "The sequences of a model of several modules cannot be cut into slices: transfers between modules "
            "are counted over complete sequences.",
            where=where,
            seen=", ".join(module.name for module in model.modules),
            allowed="one slice: the whole sequence",
            next_step="leave out the slices",
        )
        return
    for module in model.modules:
        for layer in module.layers:
            obstacle = next(layer_obstacles(model.layer_graph(layer), f"{where} and layer {layer.name}"), None)
            if obstacle is not None:
                yield obstacle


def document_problems(plan: Plan, model: Model) -> Iterator[PlanError]:
    """Yield the obstacles to separate documents, if the plan keeps documents apart."""
    if plan.job.documents == "apart":
        yield from document_obstacles(model)


def document_obstacles(model: Model, where: str = "job.documents") -> Iterator[PlanError]:
    """Yield an error for every layer that mixes tokens beyond the reach of the attention mask.

    A layer that takes `documents` from the step plan handles them itself. In packed rows, images are documents.
    """
    for module in model.modules:
        if len(model.modules) > 1 and module.space != "samples":
            continue
        for layer in module.layers:
            graph = model.layer_graph(layer)
            if any(tensor.role == "documents" for tensor in graph.inputs):
                continue
            obstacle = next(layer_obstacles(graph, f"{where} and layer {layer.name}"), None)
            if obstacle is not None:
                yield PlanError(
                    "Documents cannot be kept apart: a layer mixes tokens outside of causal attention, or may do so.",
                    where=obstacle.where,
                    seen=obstacle.seen,
                    allowed="joined",
                    next_step="plan with --documents joined; or let the layer take `documents` "
                    "(docs/reference/models.md)",
                )


def slice_problems(plan: Plan, model: Model) -> Iterator[PlanError]:
    """Yield the obstacles to slicing, if the plan has slices."""
    if len(plan.order.slices) > 1:
        yield from slicing_obstacles(model)


def shard_problems(plan: Plan) -> Iterator[PlanError]:
    """Yield an error for every stage that splits tokens over its shards and leaves one without a token."""
    for index, stage in enumerate(plan.stages):
        if _splits_tokens(stage.sharding, plan.order.slices):
            shares = plan.groups[stage.group].to_mesh().find_axis("shard").shares
            yield from _too_short(plan.order.slices, shares, f"order.slices and stages[{index}].sharding")


def check_slices(
    slices: Sequence[int], sequence: int, shares: Sequence[int], sharding: str, where: str = "order.slices"
) -> None:
    """Raise PlanError if slices do not add up to the sequence, or are too short for these shards. Without slices, the
    sequence is the only slice."""
    if slices and (sum(slices) != sequence or min(slices) < 1):
        raise PlanError(
            "The slices must add up to the sequence.",
            where=where,
            seen=f"{', '.join(map(str, slices))}: {sum(slices)} tokens",
            allowed=f"positive lengths adding up to {sequence}",
        )
    if _splits_tokens(sharding, slices or (sequence,)):
        for error in _too_short(slices or (sequence,), shares, where):
            raise error


def _splits_tokens(sharding: str, slices: Sequence[int]) -> bool:
    """Return whether programs of this sharding may split tokens. A search splits none if rows have one token
    (images)."""
    return sharding in SPLIT_TOKENS and not (sharding == "searched" and tuple(slices) == (1,))


def _too_short(slices: Sequence[int], shares: Sequence[int], where: str) -> Iterator[PlanError]:
    for number, tokens in enumerate(slices):
        if min(stop - start for start, stop in split_by_shares(tokens, shares)) == 0:
            what, name = ("slice", f"slice {number}") if len(slices) > 1 else ("sequence", "a sequence")
            yield PlanError(
                f"A {what} is shorter than its shards need: one of them would have no token.",
                where=where,
                seen=f"{name} of {tokens} token(s), over shards of shares {', '.join(map(str, shares))}",
                allowed=f"{what}s of {min_slice_tokens(shares)} tokens or more",
                next_step=f"use longer {what}s, fewer or more even shards, or the sharding `megatron`, which splits no "
                "tokens",
            )
            return


def min_slice_tokens(shares: Sequence[int]) -> int:
    """Return the shortest slice that has a token for every shard."""
    tokens = len(shares)
    while min(stop - start for start, stop in split_by_shares(tokens, shares)) == 0:
        tokens += 1
    return tokens


def layer_obstacles(graph: Graph, where: str, sees_later: bool = False) -> Iterator[PlanError]:
    """Yield an error for everything in a layer that prevents cutting its sequences. With `sees_later`, attention may
    see later tokens."""
    shapes = shapes_of(graph)
    if not all(_is_sequence(tensor.shape) for tensor in graph.inputs if tensor.role != "labels"):
        yield PlanError(
            "A model captured as one graph cannot be cut into slices: its sequence length is fixed.",
            where=where,
            seen=", ".join(f"{tensor.name} {tensor.shape}" for tensor in graph.inputs),
            allowed="one slice: the whole sequence",
            next_step="leave out the slices, or give the model as a list of layers (docs/reference/models.md)",
        )
        return
    for operator in graph.operators:
        if KINDS[operator.kind].is_module:
            yield from _opaque_obstacles(operator, where)
        elif KINDS[operator.kind].read_later:
            if not sees_later and not operator.attributes.get("causal", True):
                yield PlanError(
                    "A model whose attention is not causal cannot be cut into slices: a token needs later tokens, "
                    "which are in slices that have not run yet.",
                    where=_operator_location(where, operator),
                    seen="attention without a causal mask",
                    allowed="one slice: the whole sequence",
                    next_step="leave out the slices, or make the attention causal",
                )
        elif operator.kind in PLUGINS:
            yield from _plugin_obstacles(operator, shapes, where)
        elif mixed := _mixing_reason(operator, shapes):
            yield PlanError(
                "A layer that mixes tokens outside of attention cannot be cut into slices: it would see only the "
                "tokens of its slice.",
                where=_operator_location(where, operator),
                seen=f"{operator.kind} {mixed}",
                allowed="one slice: the whole sequence",
                next_step="leave out the slices; products of queries and keys can be written as "
                "scaled_dot_product_attention with is_causal=True",
            )


def _operator_location(where: str, operator: Operator) -> str:
    return f"{where}, {operator.source}" if operator.source else where


def _plugin_obstacles(operator: Operator, shapes: Mapping[str, Shape], where: str) -> Iterator[PlanError]:
    """Yield an error unless the rule of a plug-in's operator gives all tokens one label, of independent parts."""
    inputs = tuple(shapes[name] if name else None for name in operator.inputs)
    outputs = tuple(shapes[name] for name in operator.outputs)
    labelled = labels_of(operator, inputs, outputs)
    pairs = zip((*inputs, *outputs), (*labelled.inputs, *labelled.outputs), strict=True)
    labels = {
        label
        for shape, dims in pairs
        if shape is not None
        for size, label in zip(shape, dims or (None,) * len(shape), strict=True)
        if has_tokens(size)
    }
    if len(labels) > 1 or labels & {None, *labelled.kinds, *labelled.joint}:
        yield PlanError(
            "A plug-in's operator cannot be cut into slices: its rule does not split the tokens, so it may mix them.",
            where=_operator_location(where, operator),
            seen=f"{operator.kind}, whose tokens have the labels {', '.join(sorted(map(str, labels)))}",
            allowed="one slice: the whole sequence",
            next_step="leave out the slices; or, if every token is computed separately, give the tokens of all inputs "
            "and outputs one label in the rule (docs/how-to/add-an-operator.md)",
        )


def _mixing_reason(operator: Operator, shapes: Mapping[str, Shape]) -> str:
    """Return, in words, how the operator mixes tokens; '' if it works on each token separately."""
    inputs = [shapes[name] for name in operator.inputs if name]
    if not inputs or not any(has_tokens(size) for size in inputs[0]):
        return ""
    kind = KINDS[operator.kind]
    if kind.mixes_features and has_tokens(inputs[0][-1]):
        return "along the tokens"
    return kind.mixes_tokens(operator.attributes, inputs, shapes[operator.outputs[0]])


def _is_sequence(shape: Shape) -> bool:
    """Return whether one dimension is a variable number of tokens, of a sequence or of a packed row attached to it."""
    return any({*SEQUENCES} & {*size_factors(str(size))[1]} for size in shape)


def _opaque_obstacles(operator: Operator, where: str) -> Iterator[PlanError]:
    attributes = operator.attributes
    for what, module in attributes.get("suspects", ()):
        yield PlanError(
            f"A layer that could not be captured {_WHY[what]}",
            where=where,
            seen=str(module),
            allowed="one slice: the whole sequence",
            next_step="leave out the slices, or write the layer so that it can be captured (docs/reference/models.md)",
        )
    if not attributes.get("tokenwise", False):
        yield PlanError(
            "A layer that could not be captured cannot be cut into slices: nothing says that it does not mix tokens, "
            "or draw random numbers that depend on the slices.",
            where=where,
            seen=f"opaque: {attributes['reason']}",
            allowed="layers that were captured, and layers with `tokenwise = True`",
            next_step="leave out the slices; or, if a token's output depends on that token alone, say so "
            "with the class attribute `tokenwise = True`",
        )


_WHY = {
    "random": "draws its own random numbers, which would change when its sequences are cut into slices.",
    "mixes": "mixes tokens and cannot be cut into slices: it would see only the tokens of its slice.",
}
