"""Capture of layers: plain modules become operator graphs by non-strict `torch.export` on the meta device.

Every distinct layer is exported once, in bfloat16 (so that casts to float32 are visible), with rows B and tokens T as
dynamic dimensions: an export that would freeze one of them fails. The nodes become operators (`convert.py`), and groups
of small operators become operator kinds again (`lift.py`). A layer that cannot be exported or expressed becomes one
`opaque` operator, with a warning that names the layer, the line and the reason. Torch is imported inside the functions.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipefit.errors import CaptureWarning, ModelError, PipefitError
from pipefit.model.any_class import FIELDS, is_encoder
from pipefit.model.capture.convert import GraphEmitter, UnconvertibleError, convert_node
from pipefit.model.capture.export import MODULE as MODULE
from pipefit.model.capture.export import export_reason, fold_constant, on_meta, quiet_torch, uncached_shapes
from pipefit.model.capture.lift import lift_graph
from pipefit.model.capture.rewrite import unused_name
from pipefit.model.capture.source_labels import source_label
from pipefit.model.example import Example
from pipefit.model.families import FAMILIES
from pipefit.model.families.build import USER, build_layers, find_builder, typed_config
from pipefit.model.graph import Graph, Layer, Model, ModelModule, Operator, ParameterSpec, Shape, TensorSpec
from pipefit.model.ops import KINDS
from pipefit.model.user import open_user_model

if TYPE_CHECKING:
    from torch import nn

_ROLES = ("tokens", "positions", "labels", "documents")
_EXAMPLE = {"B": 3, "T": 11, "I": 7, "L": 5}
"""Sizes of the example inputs; they appear in no graph. I and L: tokens of a packed row that enters or leaves a
sequence."""

_REMEMBERED: dict[Any, Model] = {}
"""The last models of `capture_family`, the oldest first."""

_MOST_REMEMBERED = 16
"""Largest number of these models."""


class OpaqueLayerWarning(CaptureWarning):
    """A layer could not be captured and runs as an opaque module."""


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """The call of a layer: argument name -> graph input."""

    arguments: Mapping[str, TensorSpec]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(self.arguments.values())


def capture_family(family: str, config: Mapping[str, Any]) -> Model:
    """Return the model of a family as operator graphs. Raises ModelError for bad fields or an unknown family.

    The last models captured in this process are remembered by family and configuration, except those with opaque
    layers (they warn every time) and users' own modules (their files may change).
    """
    if family == USER:
        source = str(config.get("source", ""))
        user_model = open_user_model(config, with_values=False)
        if isinstance(user_model, Example):
            from pipefit.model.capture.whole import capture_whole

            model = replace(capture_whole(user_model, source), config=dict(config))
            _warn_of_later_tokens(model)
            return model
        from pipefit.model.families.finish import finish_layers

        return check_loss(capture_layers(finish_layers(user_model, "meta", None), family=family, config=config))
    typed = typed_config(family, config)
    key = (family, repr(config), FAMILIES[family].read, find_builder(family))
    if key in _REMEMBERED:
        return _REMEMBERED[key]
    rotary = getattr(typed, "rotary", None) or []
    candidates = [rotary] if isinstance(rotary, Mapping) else rotary
    model = capture_layers(build_layers(family, config), family=family, config=deepcopy(config), rotary=candidates)
    check_loss(model)
    if not any(KINDS[operator.kind].is_module for graph in model.graphs.values() for operator in graph.operators):
        while len(_REMEMBERED) >= _MOST_REMEMBERED:
            del _REMEMBERED[next(iter(_REMEMBERED))]
        _REMEMBERED[key] = model
    return model


def _warn_of_later_tokens(model: Model) -> None:
    """Warn if a class of `transformers` is an encoder: its loss predicts tokens that it sees."""
    operators = [operator for graph in model.graphs.values() for operator in graph.operators]
    causal = any(operator.kind == "attention" and operator.attributes["causal"] for operator in operators)
    if FIELDS in model.config and not causal and is_encoder(model.config[FIELDS]):
        warnings.warn(
            f"{model.config['source']}: attention sees later tokens, so the loss predicts tokens that the model sees; "
            "set is_decoder to true in the config.json",
            CaptureWarning,
            stacklevel=3,
        )


def capture_layers(
    layers: Sequence[nn.Module],
    *,
    family: str = USER,
    config: Mapping[str, Any] | None = None,
    x_features: int | None = None,
    rotary: Sequence[Mapping[str, Any]] = (),
) -> Model:
    """Return the chain `layers` as operator graphs; equal layers share one graph.

    The first argument of a layer's forward is its `x` unless it is named as an input of the step plan (tokens,
    positions, labels, documents, or one of the layer's own `data_inputs`). `x_features` is D of the first layer's x (B,
    T, D), if it has one. Layers may name their module and its space (`module_name`, `space`), and give the shape of
    their x (`x_shape`) if it comes from another space. Raises ModelError for a chain whose layers do not fit together.
    """
    from pipefit.model.families.finish import finish_layers

    if not layers:
        raise ModelError("The model has no layers.", where="layers", allowed="a list of nn.Modules")
    if any(not hasattr(layer, "parameter_names") for layer in layers):
        finish_layers(layers, _device_of(layers), None)
    x_shape: Shape | None = None if x_features is None else ("B", "T", x_features)
    graphs: dict[str, Graph] = {}
    known: dict[Any, str] = {}
    chain = []
    for layer in layers:
        name = str(layer.layer_name)
        call = _call_of(layer, name, getattr(layer, "x_shape", x_shape))
        fingerprint = (_layer_fingerprint(layer), call.inputs)
        if fingerprint not in known:
            graph = _capture_layer(layer, name, call, rotary)
            known[fingerprint] = graph.hash
            graphs[graph.hash] = graph
        graph = graphs[known[fingerprint]]
        if graph.operators[0].kind == "opaque" and graph.operators[0].attributes["key"] != name:
            graph = _opaque_graph(layer, name, call, str(graph.operators[0].attributes["reason"]))
            graphs[graph.hash] = graph
        names = {parameter.name: layer.parameter_names[parameter.name] for parameter in graph.parameters}
        chain.append(Layer(name=name, graph=graph.hash, parameters=names))
        x_shape = _output_shape(graph)
    keys = {layer.graph for layer in chain}
    used = {key: graph for key, graph in graphs.items() if key in keys}
    return Model(family=family, config=dict(config or {}), modules=_group_modules(layers, chain), graphs=used)


def check_loss(model: Model) -> Model:
    """Return the model. Raises ModelError if no module ends with a loss, so that nothing can be trained."""
    ends = [module.layers[-1] for module in model.modules]
    if any(model.layer_graph(layer).loss_output for layer in ends):
        return model
    shape = _output_shape(model.layer_graph(ends[-1]))
    raise ModelError(
        "The model has no loss.",
        where=f"the last layer, {ends[-1].name}",
        seen=f"an output of shape ({', '.join(map(str, shape))})",
        allowed="a last layer that returns the summed loss: a tensor without dimensions",
        next_step="append name_layer(TokenLoss(), 'loss', '') of pipefit.model.families.common, or a loss of your own",
    )


def _group_modules(layers: Sequence[nn.Module], chain: Sequence[Layer]) -> tuple[ModelModule, ...]:
    """Group consecutive layers by module, in order. Raises ModelError if a module appears twice."""
    modules: dict[str, tuple[str, list[Layer]]] = {}
    before = ""
    for layer, captured in zip(layers, chain, strict=True):
        name = str(getattr(layer, "module_name", MODULE))
        if name in modules and name != before:
            raise ModelError(
                "The layers of a module do not follow each other.",
                where=f"layer {captured.name}",
                seen=f"module {name!r} again, behind {before!r}",
                allowed="all layers of a module in one run",
            )
        modules.setdefault(name, (str(getattr(layer, "space", "samples")), []))[1].append(captured)
        before = name
    return tuple(ModelModule(name=name, space=space, layers=tuple(run)) for name, (space, run) in modules.items())


def _device_of(layers: Sequence[nn.Module]) -> str:
    devices = {str(parameter.device) for layer in layers for parameter in layer.parameters()}
    return devices.pop() if len(devices) == 1 else "cpu"


def _output_shape(graph: Graph) -> Shape:
    return graph.find_tensor(graph.outputs[0]).shape


def _call_of(layer: nn.Module, name: str, x_shape: Shape | None) -> _LayerCall:
    """The graph inputs for the arguments of forward."""
    arguments: dict[str, TensorSpec] = {}
    data_inputs = {tensor.name: tensor for tensor in getattr(layer, "data_inputs", ())}
    for argument in inspect.signature(layer.forward).parameters.values():
        if argument.name in data_inputs:
            tensor = data_inputs[argument.name]
        elif argument.name in _ROLES:
            tensor = TensorSpec(name=argument.name, shape=("B", "T"), dtype="int64", role=argument.name)  # type: ignore[arg-type]
        elif not any(tensor.role == "activation" for tensor in arguments.values()) and not arguments:
            if x_shape is None:
                raise ModelError(
                    "The first layer takes a hidden state, and its width is not known.",
                    where=name,
                    seen=f"forward({argument.name}, ...)",
                    allowed="a first layer that takes `tokens`, or capture_layers(..., x_features=D)",
                )
            tensor = TensorSpec(name=unused_name("x", dict(layer.named_parameters())), shape=x_shape)
        elif argument.default is not argument.empty or argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            continue
        else:
            raise ModelError(
                "A layer takes an input that has no source.",
                where=f"layer {name}",
                seen=f"forward argument {argument.name!r}",
                allowed=f"the hidden state first, then {', '.join((*_ROLES, *data_inputs))}",
            )
        arguments[argument.name] = tensor
    return _LayerCall(arguments)


def _capture_layer(layer: nn.Module, name: str, call: _LayerCall, rotary: Sequence[Mapping[str, Any]]) -> Graph:
    """Return the graph of one layer; an opaque graph if it cannot be captured."""
    reason = ""
    for dtype in ("bfloat16", "float32"):
        try:
            graph = lift_graph(_export_graph(layer, call, dtype), rotary)
        except UnconvertibleError as error:
            reason = str(error)
            continue
        unknown = [operator for operator in graph.operators if operator.kind not in KINDS]
        if not unknown:
            return graph
        reason = f"there is no operator for {unknown[0].kind}, in {unknown[0].source}"
    warnings.warn(
        f"layer {name} ({type(layer).__name__}) is not captured and stays opaque: {reason}",
        OpaqueLayerWarning,
        stacklevel=3,
    )
    return _opaque_graph(layer, name, call, reason)


def _export_graph(layer: nn.Module, call: _LayerCall, dtype: str) -> Graph:
    """Return the graph before lifting. Raises UnconvertibleError with the reason."""
    import torch

    compute = getattr(torch, dtype)
    module = on_meta(layer, compute)
    buffers = {local: buffer for local, buffer in layer.named_buffers() if buffer.device.type != "meta"}
    dims = {symbol: torch.export.Dim(symbol, min=2, max=1 << 24) for symbol in _EXAMPLE}
    arguments, dynamic = {}, {}
    for argument, tensor in call.arguments.items():
        sizes = [_EXAMPLE[size] if isinstance(size, str) else size for size in tensor.shape]
        kind = compute if tensor.dtype == "compute" else getattr(torch, tensor.dtype)
        arguments[argument] = torch.empty(sizes, dtype=kind, device="meta")
        dynamic[argument] = {i: dims[size] for i, size in enumerate(tensor.shape) if isinstance(size, str)}
    try:
        with quiet_torch(), uncached_shapes():
            program = torch.export.export(module, (), arguments, dynamic_shapes=dynamic, strict=False)
    except PipefitError:
        raise
    except Exception as error:  # user code may raise anything under export
        raise UnconvertibleError(export_reason(error, layer)) from error
    if program.graph_signature.buffers_to_mutate:
        raise UnconvertibleError("it changes a buffer in its forward")
    return _convert_program(program, layer, call, dtype, buffers)


def _convert_program(program: Any, layer: nn.Module, call: _LayerCall, dtype: str, buffers: Mapping[str, Any]) -> Graph:
    """Convert an exported program to operators, before lifting."""
    signature = program.graph_signature
    inputs = {spec.arg.name: spec for spec in signature.input_specs}
    nodes = list(program.graph.nodes)
    emitter = GraphEmitter(_match_symbols(nodes, inputs, call), dtype, source_label(type(layer)))
    for node in nodes:
        if node.op == "placeholder":
            _place_input(emitter, node, inputs[node.name], call, program, buffers)
        elif node.op == "call_function":
            if not fold_constant(emitter, node):
                convert_node(emitter, node, source_label(type(layer)))
        elif node.op == "output":
            outputs = node.args[0]
    ranks = [emitter.node_rank(output) if hasattr(output, "meta") else -1 for output in outputs]
    if -1 in ranks or not (len(ranks) == 1 or (len(ranks) == 2 and ranks[0] and not ranks[1])):
        raise UnconvertibleError(f"its forward returns {len(outputs)} values, not one tensor, nor one and a loss")
    specs = tuple(
        ParameterSpec(name=local, shape=tuple(parameter.shape), trainable=parameter.requires_grad)
        for local, parameter in layer.named_parameters()
    )
    return Graph(
        inputs=call.inputs,
        outputs=tuple(emitter.value_name(output) for output in outputs),
        operators=tuple(emitter.operators),
        parameters=specs,
        tensors=tuple(emitter.tensors.values()),
    )


def _match_symbols(nodes: Sequence[Any], inputs: Mapping[str, Any], call: _LayerCall) -> dict[str, str]:
    """The export's symbols -> B and T, from the shapes of the inputs. Raises UnconvertibleError if a dimension was
    frozen."""
    symbols: dict[str, str] = {}
    placeholders = [node for node in nodes if node.op == "placeholder" and inputs[node.name].kind.name == "USER_INPUT"]
    for node, tensor in zip(placeholders, call.inputs, strict=True):
        for size, ours in zip(node.meta["val"].shape, tensor.shape, strict=True):
            if not isinstance(ours, str):
                continue
            if isinstance(size, int):
                raise UnconvertibleError(f"it works for one number of {'rows' if ours == 'B' else 'tokens'} only")
            symbols[str(size.node.expr)] = ours
    return symbols


def _place_input(
    emitter: GraphEmitter, node: Any, spec: Any, call: _LayerCall, program: Any, buffers: Mapping[str, Any]
) -> None:
    """Assign an exported input to a graph input, a parameter, or a constant."""
    kind = spec.kind.name
    if kind == "USER_INPUT":
        emitter.names[node] = call.arguments[node.name].name
        tensor = call.arguments[node.name]
        emitter.given[tensor.name] = tensor.shape
    elif kind == "PARAMETER":
        emitter.names[node], emitter.given[spec.target] = spec.target, tuple(node.meta["val"].shape)
    elif kind == "BUFFER":
        if spec.target in buffers:
            emitter.constants[node] = buffers[spec.target].detach().cpu()
    else:
        constant = program.constants.get(spec.target)
        if constant is not None and constant.device.type != "meta":
            emitter.constants[node] = constant.detach().cpu()


def _suspect_modules(layer: nn.Module) -> list[list[str]]:
    """[`random` or `mixes`, name and class] of PyTorch modules inside the layer that draw random numbers or mix
    tokens."""
    from torch import nn

    random = nn.modules.dropout._DropoutNd
    mixes = (
        nn.modules.batchnorm._NormBase, nn.modules.conv._ConvNd, nn.GroupNorm, nn.MultiheadAttention, nn.RNNBase,
        nn.modules.pooling._AvgPoolNd, nn.modules.pooling._MaxPoolNd,
    )  # fmt: skip
    suspects = []
    for name, module in layer.named_modules():
        if isinstance(module, mixes) or (isinstance(module, random) and module.p > 0):
            what = "random" if isinstance(module, random) else "mixes"
            suspects.append([what, f"{name or 'the layer'}: {type(module).__name__}"])
    return suspects


def _opaque_graph(layer: nn.Module, name: str, call: _LayerCall, reason: str) -> Graph:
    """Return the layer as one opaque operator. Its output has the shape of x, or is a scalar loss if the layer takes
    labels."""
    values = [tensor.name for tensor in call.inputs]
    parameters = tuple(
        ParameterSpec(name=local, shape=tuple(parameter.shape), trainable=parameter.requires_grad)
        for local, parameter in layer.named_parameters()
    )
    shape: Shape
    if "labels" in values:
        shape = ()
    elif getattr(layer, "output_features", None) is not None:
        shape = ("B", "T", int(layer.output_features))
    elif call.inputs and call.inputs[0].role == "activation":
        shape = call.inputs[0].shape
    else:
        raise ModelError(
            "The output width of a layer that cannot be captured is not known.",
            where=f"layer {name}",
            seen=reason,
            allowed="an attribute `output_features` of the layer",
        )
    attributes = {
        "key": name,
        "inputs": len(values),
        "shape": list(shape),
        "parameter_count": sum(parameter.numel() for parameter in layer.parameters()),
        "kept_factor": float(getattr(layer, "kept_factor", 4.0)),
        "reason": reason,
        "tokenwise": bool(getattr(layer, "tokenwise", False)),
        "suspects": _suspect_modules(layer),
    }
    output = TensorSpec(name="opaque_0", shape=shape, dtype="float32" if shape == () else "compute")
    operator = Operator(
        kind="opaque",
        inputs=(*values, *(parameter.name for parameter in parameters)),
        outputs=(output.name,),
        attributes=attributes,
        source=source_label(type(layer)),
    )
    return Graph(
        inputs=call.inputs, outputs=(output.name,), operators=(operator,), parameters=parameters, tensors=(output,)
    )


def _layer_fingerprint(layer: nn.Module) -> Any:
    """A key that is equal for layers that compute the same function of their inputs and parameters: classes, plain
    attributes, shapes. Attributes that cannot be compared count as different."""
    import torch

    parts: list[Any] = []
    excluded = {"layer_name", "parameter_names", "_parameters", "_buffers", "_modules"}
    for path, module in layer.named_modules(remove_duplicate=False):
        plain = tuple((key, _plain_value(value)) for key, value in sorted(vars(module).items()) if key not in excluded)
        parameters = tuple((key, tuple(p.shape), p.requires_grad) for key, p in module.named_parameters(recurse=False))
        buffers = tuple(
            (key, "meta" if b.device.type == "meta" else tuple(b.detach().flatten().tolist()))
            for key, b in module.named_buffers(recurse=False)
            if isinstance(b, torch.Tensor)
        )
        parts.append((path, type(module), plain, parameters, buffers))
    return tuple(parts)


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return tuple(_plain_value(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((str(key), _plain_value(item)) for key, item in value.items())
    if isinstance(value, set):
        return tuple(sorted(map(str, value)))
    return id(value)
