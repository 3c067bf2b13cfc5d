"""Converters of losses in complete models: means over rows become sums, and the run divides them (`counted.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.errors import ModelError
from pipefit.model.capture.convert_any import converts_any, to_json_argument
from pipefit.model.capture.emitter import GraphEmitter, UnconvertibleError, line_of
from pipefit.model.graph import Shape


@converts_any("aten.cross_entropy_loss", "aten.nll_loss_nd", "aten.nll_loss")
def _convert_cross_entropy(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """Emit the sum. If the model takes the mean, the run divides by the labels of the step."""
    logits, labels = args[:2]
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    options = {**dict(zip(names, args[2:], strict=False)), **kwargs}
    if "nll" in str(node.target):
        if not str(logits.target).startswith("aten.log_softmax") or emitter.normalized_dim(logits, logits.args[1]) != 1:
            raise UnconvertibleError(f"nll_loss of an input that is not log_softmax over the classes{line_of(node)}")
        logits = logits.args[0]
    if options.get("weight") is not None or options.get("label_smoothing"):
        raise _no_sum_error(node, "cross-entropy with class weights or label smoothing")
    if options.get("reduction", 1) == 0 or emitter.node_dtype(labels) != "int64":
        raise _no_sum_error(node, "cross-entropy with reduction='none' or with class probabilities")
    value, shape = emitter.value_name(logits), emitter.node_shape(logits)
    if len(shape) > 2:  # classes are dimension 1
        dims = [0, *range(2, len(shape)), 1]
        value = emitter.emit(
            "transpose", (value,), tuple(shape[dim] for dim in dims), emitter.node_dtype(logits), {"dims": dims}
        )
    ignore = int(options.get("ignore_index", -100))
    name = emitter.emit("cross_entropy", (value, emitter.value_name(labels)), (), "float32", {"ignore_index": ignore})
    if options.get("reduction", 1) == 1:
        emitter.means.add(name)
    return name


def _no_sum_error(node: Any, what: str) -> ModelError:
    return ModelError(
        "This loss is not a sum over rows, but rows are spread over devices and microbatches.",
        where=line_of(node).removeprefix(", at ") or "loss",
        seen=what,
        allowed="cross_entropy with labels, or the mean or sum of a function of each element",
        next_step="remove these options, or write the loss as a sum of functions of each row",
    )


_REDUCTION = {"mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "kl_div": 2,
              "binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4}  # fmt: skip
"""Elementwise loss -> index of its `reduction` argument."""


@converts_any(*(f"aten.{name}" for name in _REDUCTION))
def _convert_elementwise_loss(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """Emit the loss of every element and their sum. If the model takes the mean, the run divides by the number of
    elements."""
    position = _REDUCTION[str(node.target).split(".")[1]]
    reduction = kwargs.get("reduction", args[position] if len(args) > position else 1)
    shape = emitter.node_shape(args[0])
    if reduction == 0 or shape != emitter.node_shape(args[1]):
        raise UnconvertibleError(f"{node.target} without a sum, or of another shape than its target{line_of(node)}")
    inputs: list[str] = []
    values = [*[*args, *([None] * position)][:position], 0, *args[position + 1 :]]
    attributes = {
        "target": str(node.target),
        "arguments": [to_json_argument(emitter, item, inputs) for item in values],
        "keywords": {n: to_json_argument(emitter, item, inputs) for n, item in kwargs.items() if n != "reduction"},
        "result": None,
        "shape": list(shape),
        "dtype": emitter.node_dtype(args[0]),
    }
    losses = emitter.emit("aten", inputs, shape, emitter.node_dtype(args[0]), attributes)
    return _emit_sum(emitter, node, losses, shape, mean=reduction == 1)


@converts_any("aten.mean")
def _convert_mean(emitter: GraphEmitter, node: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """Convert a mean over all dimensions, which is only allowed as the loss (`whole._check_loss`)."""
    shape = emitter.node_shape(args[0])
    if len(args) > 1 or shape[:1] != ("B",) or emitter.node_dtype(args[0]) != emitter.node_dtype(node):
        raise UnconvertibleError("a mean along dimensions")
    return _emit_sum(emitter, node, emitter.value_name(args[0]), shape, mean=True)


def _emit_sum(emitter: GraphEmitter, node: Any, value: str, shape: Shape, mean: bool) -> str:
    name = emitter.emit_like(node, "sum", (value,), {"dims": list(range(len(shape))), "keepdim": False})
    if mean:
        emitter.means.add(name)
    return name
