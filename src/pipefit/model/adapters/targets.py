"""The linear layers of a model that adapters can be added to, under the module paths of its weight files.

A file may hold several linear layers of a graph as one module (a fused projection). They share one factor A, as one
adapter of that module does, and the rows of B are divided like the rows of the weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipefit.errors import ModelError, most_like
from pipefit.model.adapters.options import ALL_LINEAR, AdapterConfig
from pipefit.model.families import FAMILIES, WeightTensor
from pipefit.model.families.build import typed_config
from pipefit.model.graph import Graph, Model, Operator
from pipefit.model.ops import KINDS

WEIGHT = ".weight"

FACTOR_A, FACTOR_B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's parameters."""

EXPERT_NAMES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that PEFT reads as those of experts and routers in a model that has experts, wherever they are."""

MOST_LISTED = 24
"""Largest number of names in an error message."""


@dataclass(slots=True, kw_only=True)
class LinearModule:
    """A linear module of the weight files, and the operators that compute it."""

    path: str
    "Module path in the files, for example `model.layers.0.self_attn.q_proj`."
    layer: int
    "Index of its layer in the model."
    operators: list[int] = field(default_factory=list)
    "Indices of its linear operators in the layer's graph."
    is_fused: bool = False
    "Whether the files hold several linear layers in this module."
    is_left_out: bool = False
    "Whether `all-linear` leaves it out: the head, and MLPs of a model with experts."
    reason: str = ""
    "The reason for which it cannot be adapted; empty: it can."

    rows_left: int = 0
    "Rows of the fused module that none of its operators computes."

    @property
    def leaf(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def add_tensors(self, blocks: Sequence[WeightTensor]) -> None:
        """Note the form in which files hold the weight of one of the operators."""
        block = blocks[0]
        if len(blocks) > 1 or block.index or block.alternating or block.shape or not block.name.endswith(WEIGHT):
            self.reason = "files hold its weight in another form"
        elif block.rows is not None:
            self.rows_left = self.rows_left if self.is_fused else block.rows.size
            self.rows_left -= block.rows.stop - block.rows.start
            self.is_fused = True

    def check_parts(self, graph: Graph) -> None:
        """Give a reason if the operators are not the parts of one module, all with one input."""
        inputs = {graph.operators[position].inputs[0] for position in self.operators}
        if not self.reason and (len(inputs) > 1 or self.rows_left or (len(self.operators) > 1) > self.is_fused):
            self.reason = "files hold it together with other layers"


class StoredWeights:
    """The tensors of the weight files that hold a model's parameters."""

    def __init__(self, model: Model) -> None:
        known = model.family in FAMILIES
        self._typed = typed_config(model.family, model.config) if known else None

    def find_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        """Return the tensors of the parameter with this global name."""
        return (WeightTensor(name),) if self._typed is None else self._typed.stored_tensors(name)


def is_adapter(name: str) -> bool:
    """Return whether a parameter with this global name is a factor of an adapter."""
    return name.endswith((FACTOR_A, FACTOR_B))


def find_linear_modules(model: Model) -> list[LinearModule]:
    """Return all linear modules of a model, in order. Their weights are parameters called `PATH.weight`."""
    stored, uses = StoredWeights(model), _count_uses(model)
    modules: dict[tuple[int, str], LinearModule] = {}
    for index, layer in enumerate(model.layers):
        graph = model.layer_graph(layer)
        for position, operator in enumerate(graph.operators):
            name = layer.parameters.get(operator.inputs[1], "") if KINDS[operator.kind].is_linear else ""
            if not name.endswith(WEIGHT) or is_adapter(name):
                continue
            blocks = stored.find_tensors(name)
            path = blocks[0].name.removesuffix(WEIGHT)
            module = modules.setdefault((index, path), LinearModule(path=path, layer=index))
            module.operators.append(position)
            if uses[name] > 1 or sum(operator.inputs[1] in reader.inputs for reader in graph.operators) > 1:
                module.reason = "its weight is used several times"
            module.add_tensors(blocks)
    has_experts = any(_has_stacked_experts(graph) for graph in model.graphs.values())
    for module in modules.values():
        module.check_parts(model.layer_graph(model.layers[module.layer]))
        if has_experts and module.leaf in EXPERT_NAMES:
            module.is_left_out, module.reason = True, "in a model with experts, PEFT reads this name as theirs"
    _mark_head(model, list(modules.values()))
    return list(modules.values())


def _has_stacked_experts(graph: Graph) -> bool:
    """Return whether a parameter with one matrix per expert is read by anything but a convolution."""
    stacked = {spec.name for spec in graph.parameters if len(spec.shape) == 3}
    return any(stacked & {*operator.inputs} for operator in graph.operators if not KINDS[operator.kind].is_convolution)


def select_targets(model: Model, config: AdapterConfig) -> list[LinearModule]:
    """Return the modules that the targets select. Raises ModelError for a target without such a module, and for
    modules that cannot be adapted."""
    if len(model.modules) > 1:
        raise ModelError(
            "Adapters can be added to language models only, not to a model of several modules.",
            where="--lora",
            seen=", ".join(module.name for module in model.modules),
            next_step="freeze parts of it instead: --freeze 'vision.*'",
        )
    modules = find_linear_modules(model)
    if config.targets == (ALL_LINEAR,):
        selected = [module for module in modules if not module.is_left_out]
    else:
        for target in config.targets:
            if not any(_matches_path(module.path, target) for module in modules):
                raise _unknown_target(target, modules)
        selected = [module for module in modules if any(_matches_path(module.path, name) for name in config.targets)]
    if not selected or any(module.reason for module in selected):
        raise _refused_targets(selected, modules, config)
    return selected


def _refused_targets(
    selected: Sequence[LinearModule], modules: Sequence[LinearModule], config: AdapterConfig
) -> ModelError:
    refused = [module for module in selected if module.reason]
    able = _list_names(module.leaf for module in modules if not module.reason)
    return ModelError(
        "These linear layers cannot be adapted." if refused else "The model has no linear layer to adapt.",
        where="--lora-targets",
        seen=_list_names(f"{module.leaf} ({module.reason})" for module in refused) or ",".join(config.targets),
        allowed=able or "none in this model",
        next_step="name others with --lora-targets" if able else None,
    )


def _unknown_target(target: str, modules: Sequence[LinearModule]) -> ModelError:
    names = {module.leaf: None for module in modules if not module.reason}
    near = most_like(target, names)
    return ModelError(
        "No linear layer of the model has this name.",
        where="--lora-targets",
        seen=target,
        allowed=f"{ALL_LINEAR}, or {_list_names(names) or 'none in this model'}",
        next_step=f"did you mean {near[0]}?" if near else None,
    )


def _matches_path(path: str, target: str) -> bool:
    """Return whether a target names the module: its path, or the end of it behind a dot."""
    return path == target or path.endswith(f".{target}")


def _list_names(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - MOST_LISTED
    return ", ".join(distinct[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _count_uses(model: Model) -> Counter[str]:
    """Return the number of layers that use each parameter."""
    return Counter(name for layer in model.layers for name in layer.parameters.values())


def _mark_head(model: Model, modules: Sequence[LinearModule]) -> None:
    """Mark the output head of a model: the last linear module, if its result is computed for the loss."""
    if not modules:
        return
    last = modules[-1]
    graph = model.layer_graph(model.layers[last.layer])
    behind = [model.layer_graph(layer) for layer in model.layers[last.layer + 1 :]]
    last.is_left_out |= _ends_features(graph, graph.operators[last.operators[-1]]) and not any(
        KINDS[operator.kind].is_linear for later in behind for operator in later.operators
    )


def _ends_features(graph: Graph, operator: Operator) -> bool:
    """Return whether a linear operator makes logits, not a part of a hidden state: its layer has the loss or gives its
    result without adding the hidden state, or its width is another one."""
    hidden = graph.hidden_input
    taken = graph.find_tensor(hidden).shape if hidden else ()
    if not taken or graph.loss_output is not None:
        return True
    makers = {name: maker for maker in graph.operators for name in maker.outputs}
    result = graph.outputs[0]
    while result in makers and makers[result] is not operator and not any(makers[result].inputs[1:]):
        result = makers[result].inputs[0]
    return makers.get(result) is operator or graph.find_tensor(operator.outputs[0]).shape[-1] != taken[-1]
