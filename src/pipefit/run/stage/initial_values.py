"""Initial values of parameters: a function of (seed, global name) alone, independent of the layout.

A tensor is drawn in blocks of rows, each from a generator seeded by (seed, name, block), so a rank draws only its own
blocks. The configuration of a model family states the kind and the standard deviation (`ModelConfig.initial`). In a
saved model of a family that is not installed, the graphs determine a parameter's role: scales of norms start at one,
biases at zero, everything else is normal with `initializer_range` (Hugging Face configurations: 0.02).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pipefit.layout import Box
from pipefit.model.adapters.adapt import adapter_initial
from pipefit.model.adapters.options import read_adapters
from pipefit.model.adapters.targets import is_adapter
from pipefit.model.families import FAMILIES, InitialValue
from pipefit.model.graph import Model
from pipefit.model.ops import KINDS
from pipefit.model.ops.kind import InitialKind
from pipefit.model.registry import USER, build_layers, typed_config
from pipefit.plan.types import Plan
from pipefit.plugins import call_plugin
from pipefit.run.stage.user_module import whole_example

ParameterValue = Callable[[str, Sequence[int], Box], Tensor]
"""(global name, global shape, box) -> that part of the parameter, any float type."""

_BLOCK = 1 << 20
"""Approximate number of elements drawn from one generator: rows are never divided."""


def initial_values(plan: Plan, model: Model) -> ParameterValue:
    """Return values from the plan's seed: the initial values of a user's modules, or those of `initial_value` for a
    family."""
    initials = family_initials(model)
    user_values = _own_values(plan, model) if model.family == USER else {}

    def value_of(name: str, shape: Sequence[int], box: Box) -> Tensor:
        if name in user_values:
            return user_values[name][tuple(slice(start, stop) for start, stop in box)]
        return initial_value(name, shape, initials[name], plan.job.seed, box)

    return value_of


def family_initials(model: Model) -> dict[str, InitialValue]:
    """Return the initial value of every parameter by its global name.

    Raises PluginError if the configuration of a plug-in fails for a name, or returns another type.
    """
    kinds = parameter_kinds(model)
    initials = {name: adapter_initial(name, shape) for name, shape in _adapter_shapes(model).items()}
    kinds = {name: kind for name, kind in kinds.items() if name not in initials}
    if model.family not in FAMILIES:
        further = {name: InitialValue(kind, parameter_deviation(model, name)) for name, kind in kinds.items()}
        return initials | further
    subject, typed = FAMILIES.describe_entry(model.family), typed_config(model.family, model.config)
    return initials | {name: call_plugin(subject, typed.initial, name, returns=InitialValue) for name in kinds}


def _adapter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of adapters; none for a model without them."""
    if read_adapters(model.config) is None:
        return {}
    return {
        layer.parameters[spec.name]: spec.shape
        for layer in model.layers
        for spec in model.layer_graph(layer).parameters
        if is_adapter(layer.parameters[spec.name])
    }


def parameter_deviation(model: Model, name: str) -> float:
    """Return the standard deviation of a parameter's initial value: its module's, if modules have configurations."""
    part = model.config.get(name.split(".", 1)[0])
    fields = part if isinstance(part, Mapping) else model.config
    return float(fields.get("initializer_range", 0.02))


def _own_values(plan: Plan, model: Model) -> dict[str, Tensor]:
    """Return the parameters of the user's modules, created under the plan's seed: the same on every rank."""
    example = whole_example(model.config, plan.job.seed)
    if example is not None:
        return {name: parameter.detach() for name, parameter in example.module.named_parameters()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.job.seed)
        layers = build_layers(model.family, model.config, device="cpu")
    return {
        str(layer.parameter_names[local]): parameter.detach()
        for layer in layers
        for local, parameter in layer.named_parameters()
    }


def parameter_kinds(model: Model) -> dict[str, InitialKind]:
    """Return global name -> kind of initial value, from the operators that read it."""
    kinds: dict[str, InitialKind] = {}
    for layer in model.layers:
        graph = model.layer_graph(layer)
        local = {spec.name: layer.parameters[spec.name] for spec in graph.parameters}
        for name in local.values():
            kinds.setdefault(name, "normal")
        for operator in graph.operators:
            for position, value in enumerate(operator.inputs):
                roles = KINDS[operator.kind].initial_values
                if value in local and position < len(roles) and roles[position] != "normal":
                    kinds[local[value]] = roles[position]
    return kinds


def initial_value(name: str, shape: Sequence[int], initial: InitialValue, seed: int, box: Box) -> Tensor:
    """Return the part `box` of the initial value of a parameter of global `shape`: float32, of the box's sizes."""
    sizes = [stop - start for start, stop in box]
    if initial.fixed_number is not None:
        return torch.full(sizes, initial.fixed_number)
    if not shape:
        return _draw_values((), initial, _block_generator(seed, name, 0))
    inner = math.prod(shape[1:])
    rows = max(1, _BLOCK // max(1, inner))
    result = torch.empty(sizes)
    start, stop = box[0]
    columns = tuple(slice(low, high) for low, high in box[1:])
    for block in range(start // rows, -(-stop // rows)):
        first, last = block * rows, min((block + 1) * rows, shape[0])
        values = _draw_values((last - first, *shape[1:]), initial, _block_generator(seed, name, block))
        low, high = max(first, start), min(last, stop)
        result[low - start : high - start] = values[(slice(low - first, high - first), *columns)]
    return result


def _draw_values(shape: Sequence[int], initial: InitialValue, generator: torch.Generator) -> Tensor:
    """Return float32 values of a normal or uniform distribution of mean 0."""
    values = torch.empty(tuple(shape))
    if initial.kind == "normal":
        return values.normal_(0.0, initial.std, generator=generator)
    bound = math.sqrt(3.0) * initial.std
    return values.uniform_(-bound, bound, generator=generator)


def _block_generator(seed: int, name: str, block: int) -> torch.Generator:
    key = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
