"""Capture of complete models: any `nn.Module` with its loss, unmodified, from example inputs.

The forward is exported once, with its loss, by non-strict `torch.export` on the meta device. Rows B may vary; every
other size is taken from the examples. Functions become operators (`convert_any.py`). Functions without an operator kind
become PyTorch calls, and a warning names those that cannot be split. The model is cut into layers at points where a
single value passes on (`cut_layers.py`), so that the planner can assign them to stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipefit.errors import CaptureWarning, ModelError, PipefitError
from pipefit.model.capture.convert import GraphEmitter, UnconvertibleError, convert_node
from pipefit.model.capture.counted import LINEAR_KINDS
from pipefit.model.capture.cut_layers import cut_layers
from pipefit.model.capture.export import MODULE, export_reason, fold_constant, on_meta, quiet_torch, traced_numbers
from pipefit.model.capture.in_place import replace_arithmetic
from pipefit.model.capture.library_delta import replace_delta_rules
from pipefit.model.capture.library_experts import separate_rows
from pipefit.model.capture.lift import lift_graph
from pipefit.model.capture.repeated_blocks import find_blocks
from pipefit.model.capture.rewrite import unused_name
from pipefit.model.capture.row_constants import emit_row_constant
from pipefit.model.capture.settle import move_reshapes, settle_graph
from pipefit.model.example import Example
from pipefit.model.families.build import USER
from pipefit.model.graph import Graph, Layer, Model, ModelModule, ParameterSpec, TensorSpec
from pipefit.model.ops import KINDS

if TYPE_CHECKING:
    import torch
    from torch import nn

NAMED_ROLES = {"input_ids": "tokens", "tokens": "tokens", "position_ids": "positions", "positions": "positions",
         "labels": "labels"}  # fmt: skip
"""Common names of inputs that the step plan gives -> their role."""


class UnknownOperatorWarning(CaptureWarning):
    """A function has no split rule: it is computed in full on every device."""


def capture_whole(example: Example, source: str = "") -> Model:
    """Return the model of an example. Raises ModelError with one reason if it cannot be captured; warns of functions
    that are computed in full on every device."""
    names, tensors = _tensor_inputs(example)
    layers, graphs = _capture_repeated(example, names, tensors) or _capture_layers(example, names, tensors, source)
    module = ModelModule(name=MODULE, layers=layers)
    return Model(family=USER, config={"source": source} if source else {}, modules=(module,), graphs=graphs)


ChainGraphs = tuple[tuple[Layer, ...], dict[str, Graph]]
"""(layers, graphs by hash)."""


def _capture_repeated(example: Example, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> ChainGraphs | None:
    """Return the layers and graphs from an export of the different blocks only; None if that is not possible."""
    blocks = find_blocks(example.module)
    if blocks is None:
        return None
    try:
        with blocks.shorten_list(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            layers, graphs = _capture_layers(example, names, tensors, "")
    except ModelError:  # a forward that counts its blocks, or one that cannot be captured in full either
        return None
    repeated = blocks.repeat_layers(layers)
    if repeated is None:
        return None
    for warning in seen:
        warnings.warn(warning.message, warning.category, stacklevel=3)
    return repeated, graphs


def _capture_layers(
    example: Example, names: Sequence[str], tensors: Sequence[torch.Tensor], source: str
) -> ChainGraphs:
    """Return the layers and graphs of an example. Raises ModelError if it cannot be captured."""
    reason = ""
    for dtype in ("bfloat16", "float32"):
        try:
            graph = _capture_graph(example, names, tensors, dtype)
            break
        except UnconvertibleError as error:
            reason = str(error)
    else:
        rewriting = "rewrite that line, or " if ", at " in reason else ""
        raise ModelError(
            "The model cannot be captured.",
            where=source or type(example.module).__name__,
            seen=reason,
            next_step=f"{rewriting}give the model as a list of layers (docs/reference/models.md)",
        )
    layers, graphs = cut_layers(graph)
    return tuple(layers), graphs


def _tensor_inputs(example: Example) -> tuple[list[str], list[torch.Tensor]]:
    """Return the inputs that are tensors. Raises ModelError if their numbers of rows differ."""
    import torch

    tensors = {name: value for name, value in example.inputs.items() if isinstance(value, torch.Tensor)}
    rows = {value.shape[0] if value.dim() else 0 for value in tensors.values()}
    if len(rows) != 1 or min(rows) < 2:
        raise ModelError(
            "The example inputs need the same number of rows in dimension 0, at least two.",
            where="inputs",
            seen=", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items()) or "no tensor",
            allowed="for example input_ids (3, 128), labels (3, 128)",
        )
    if example.loss is not None and example.labels not in tensors:
        raise ModelError(
            "The loss needs labels, but there is no input of that name.",
            where="labels",
            seen=example.labels,
            allowed=", ".join(tensors),
        )
    return list(tensors), list(tensors.values())


def _whole_module(example: Example, module: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return a module with forward(values) -> the loss."""
    from torch import nn

    class LossModule(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, values: Sequence[torch.Tensor]) -> Any:
            arguments = {**example.inputs, **dict(zip(names, values, strict=True))}
            if example.loss is not None:
                labels = arguments.pop(example.labels)
                return example.loss(self.model(**arguments), labels)
            return _find_loss(self.model(**arguments), module)

    return LossModule()


def _find_loss(result: Any, module: nn.Module) -> Any:
    """Return the scalar loss in the result of forward."""
    import torch

    loss = getattr(result, "loss", None)
    if loss is None and isinstance(result, Mapping):
        loss = result.get("loss")
    if loss is None:
        loss = result[0] if isinstance(result, (tuple, list)) and result else result
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    raise ModelError(
        "The model returns no loss.",
        where=f"{type(module).__name__}.forward",
        seen=f"a tensor {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(result).__name__,
        allowed="a scalar, an object or mapping with `loss`, a tuple that begins with it",
        next_step="give labels among the inputs, or Example(loss=...)",
    )


def _capture_graph(example: Example, names: Sequence[str], tensors: Sequence[torch.Tensor], dtype: str) -> Graph:
    """Return the graph. Raises UnconvertibleError with the reason."""
    import torch

    compute = getattr(torch, dtype)
    loss_module = _whole_module(example, on_meta(example.module, compute).train(), names)
    buffers = {f"model.{n}": b for n, b in example.module.named_buffers() if b.device.type != "meta"}
    values = tuple(
        torch.empty(t.shape, dtype=compute if t.is_floating_point() else t.dtype, device="meta") for t in tensors
    )
    rows = torch.export.Dim("B", min=2, max=1 << 24)
    try:
        with quiet_torch(), separate_rows(), replace_delta_rules(loss_module), traced_numbers():
            program = torch.export.export(
                loss_module,
                (values,),
                dynamic_shapes=(tuple({0: rows} for _ in values),),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            if replace_arithmetic(program):
                program = program.run_decompositions({})
    except PipefitError:
        raise
    except Exception as error:  # user code may raise anything under export
        raise UnconvertibleError(export_reason(error, example.module)) from error
    if program.graph_signature.buffers_to_mutate:
        changed = next(iter(program.graph_signature.buffers_to_mutate.values()))
        raise UnconvertibleError(_changes_buffer(example.module, changed.removeprefix("model.")))
    return _convert_export(program, example, names, tensors, dtype, buffers)


def _changes_buffer(module: nn.Module, name: str) -> str:
    """The reason for a model that cannot be captured because its forward changes a buffer."""
    owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
    reason = f"it changes the buffer {name} in its forward ({owner})"
    return f"{reason}: running statistics over rows; use GroupNorm or LayerNorm" if "BatchNorm" in owner else reason


def _convert_export(
    program: Any,
    example: Example,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    dtype: str,
    buffers: Mapping[str, torch.Tensor],
) -> Graph:
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    nodes = list(program.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder" and specs[node.name].kind.name == "USER_INPUT"]
    assert len(placeholders) == len(names), f"{len(placeholders)} inputs of {len(names)}"
    sizes = [node.meta["val"].shape[0] for node in placeholders]
    if any(isinstance(size, int) for size in sizes):
        raise UnconvertibleError("it works for one number of rows only")
    emitter = GraphEmitter(
        {str(size.node.expr): "B" for size in sizes}, dtype, type(example.module).__name__, whole=True
    )
    emitter.emit_row_constant, emitter.emit_computed = emit_row_constant, _emit_computed
    fed = input_tensors(example)
    inputs = [
        replace(fed[name], dtype=emitter.node_dtype(node)) for name, node in zip(names, placeholders, strict=True)
    ]
    for tensor, node in zip(inputs, placeholders, strict=True):
        emitter.names[node], emitter.given[tensor.name] = tensor.name, tensor.shape
    parameters = _parameter_specs(example.module)
    for node in nodes:
        if node.op == "placeholder" and node not in emitter.names:
            _place_input(emitter, node, specs[node.name], program, buffers, parameters)
    _convert_nodes(emitter, program.graph_module, [node for node in nodes if node.op == "call_function"])
    result = emitter.value_name(next(node for node in nodes if node.op == "output").args[0][0])
    graph = Graph(
        inputs=tuple(inputs),
        outputs=(result,),
        operators=tuple(emitter.operators),
        parameters=tuple({spec.name: spec for spec in parameters.values()}.values()),
        tensors=tuple(emitter.tensors.values()),
    )
    _check_loss(graph, emitter.means)
    graph = _without_unused(settle_graph(lift_graph(move_reshapes(graph))))
    _warn_unknown(emitter.unknown, graph)
    missing = [operator for operator in graph.operators if operator.kind not in KINDS]
    if missing:
        raise UnconvertibleError(f"there is no operator for {missing[0].kind}, in {missing[0].source}")
    return graph


def input_tensors(example: Example) -> dict[str, TensorSpec]:
    """Input name -> its name, role and shape in the graphs, for every tensor input. Tokens, positions and labels are
    fed by the step plan, all others by their own name."""
    import torch

    specs: dict[str, TensorSpec] = {}
    used_names = {name for name, _ in example.module.named_parameters(remove_duplicate=False)}
    for name, value in example.inputs.items():
        if not isinstance(value, torch.Tensor):
            continue
        role: Any = example.roles.get(name, NAMED_ROLES.get(name, "data"))
        fits = value.dtype == torch.int64 and (value.dim() == 2 or role == "labels")
        role_used = any(tensor.role == role for tensor in specs.values())
        role = role if fits and not role_used else "data"
        dtype = "compute" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
        shape = ("B", *value.shape[1:])
        input_name = unused_name(name if role == "data" else role, used_names)
        used_names.add(input_name)
        specs[name] = TensorSpec(name=input_name, shape=shape, dtype=dtype, role=role)
    return specs


def _parameter_specs(module: nn.Module) -> dict[str, ParameterSpec]:
    """Parameter name -> its spec under the first of its names, for every name of a parameter."""
    first: dict[int, str] = {}
    specs = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        specs[name] = ParameterSpec(name=known, shape=tuple(parameter.shape), trainable=parameter.requires_grad)
    return specs


def _place_input(
    emitter: GraphEmitter,
    node: Any,
    spec: Any,
    program: Any,
    buffers: Mapping[str, torch.Tensor],
    parameters: Mapping[str, ParameterSpec],
) -> None:
    """Assign a parameter or a constant to a placeholder of the export."""
    if spec.kind.name == "PARAMETER":
        parameter = parameters[spec.target.removeprefix("model.")]
        emitter.names[node], emitter.given[parameter.name] = parameter.name, parameter.shape
        return
    known = buffers.get(spec.target) if spec.kind.name == "BUFFER" else program.constants.get(spec.target)
    if known is not None and known.device.type != "meta":
        emitter.constants[node] = known.detach().cpu()
    elif known is not None and not known.numel():
        emitter.constants[node] = known.new_empty(known.shape, device="cpu")


def _convert_nodes(emitter: GraphEmitter, owner: Any, nodes: Sequence[Any]) -> None:
    """Convert nodes in order, including the nodes of nested graphs."""
    for node in nodes:
        if str(node.target).startswith("wrap_with_"):
            _convert_inner(emitter, owner, node)
        elif not fold_constant(emitter, node):
            convert_node(emitter, node, emitter.source)


def _emit_computed(emitter: GraphEmitter, node: Any) -> None:
    """Emit the function of a node, in the name of its own module."""
    reader = emitter.source
    convert_node(emitter, node, emitter.source)
    emitter.source = reader


def _convert_inner(emitter: GraphEmitter, owner: Any, node: Any) -> None:
    """Convert the nested graph of a part without gradients or with another autocast."""
    position = next(i for i, item in enumerate(node.args) if getattr(item, "op", "") == "get_attr")
    inner = getattr(owner, node.args[position].target)
    nodes = list(inner.graph.nodes)
    for within, value in zip((n for n in nodes if n.op == "placeholder"), node.args[position + 1 :], strict=True):
        if value in emitter.names or value in emitter.constants or value in emitter.row_constants:
            emitter.stand_for(within, value)
    _convert_nodes(emitter, inner, [inner_node for inner_node in nodes if inner_node.op == "call_function"])
    results = next(inner_node for inner_node in nodes if inner_node.op == "output").args[0]
    emitter.inner[node] = results if isinstance(results, (list, tuple)) else (results,)
    if "grad" in str(node.target) and node.args[0] is False:
        for inner_node in emitter.inner[node]:
            if inner_node in emitter.names and inner_node not in emitter.constants:
                attributes: dict[str, Any] = {
                    "target": "aten.detach.default", "arguments": [{"input": 0}], "keywords": {}, "result": None,
                    "shape": list(emitter.node_shape(inner_node)), "dtype": emitter.node_dtype(inner_node),
                }  # fmt: skip
                emitter.names[inner_node] = emitter.emit_like(
                    inner_node, "aten", (emitter.names[inner_node],), attributes
                )


def _check_loss(graph: Graph, means: set[str]) -> None:
    """Raise ModelError if a mean is used anywhere but as the loss itself, because the run divides the sum by the labels
    of the step."""
    producers = {name: operator for operator in graph.operators for name in operator.outputs}
    name = graph.outputs[0]
    while (
        name in producers
        and name not in means
        and producers[name].kind in LINEAR_KINDS
        and not any(producers[name].inputs[1:])
    ):
        name = producers[name].inputs[0]
    averaged = next(
        (op for op in graph.operators if op.kind == "mean" and not graph.find_tensor(op.outputs[0]).shape), None
    )
    if (means and name not in means) or averaged is not None:
        raise ModelError(
            "The loss combines means, but rows are spread over devices and microbatches: only one mean can be a sum.",
            where=averaged.source if averaged else producers[name].source if name in producers else "loss",
            seen=f"{len(means) + (averaged is not None)} mean(s) within a loss",
            allowed="one mean, or a sum: cross_entropy(...), mse_loss(...), x.mean(), or with reduction='sum'",
            next_step="remove the other terms of the loss, or write the loss as a sum",
        )


def _without_unused(graph: Graph) -> Graph:
    """Remove inputs and parameters that no operator reads."""
    read = {name for operator in graph.operators for name in operator.inputs}
    return Graph(
        inputs=tuple(tensor for tensor in graph.inputs if tensor.name in read),
        outputs=graph.outputs,
        operators=graph.operators,
        parameters=tuple(spec for spec in graph.parameters if spec.name in read),
        tensors=graph.tensors,
    )


def _warn_unknown(unknown: Mapping[str, str], graph: Graph) -> None:
    """Warn of functions that are computed in full on every device."""
    left = {str(operator.attributes["target"]) for operator in graph.operators if operator.kind == "aten"}
    for target, line in unknown.items():
        if target in left:
            warnings.warn(
                f"{target}, called at {line}, has no split rule: it is computed in full on every device",
                UnknownOperatorWarning,
                stacklevel=4,
            )
