"""Operator modules during an export: each calls the custom operator `pipefit::leaf`, after a check.

A mistake in an `OperatorModule` is found here, before a plan exists: a rank would report it as a missing attribute or a
wrong number of arguments. Torch is imported inside the functions.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipefit.errors import ModelError, suggest_name
from pipefit.model.ops import KINDS, OperatorKind

if TYPE_CHECKING:
    from torch import nn

    from pipefit.model.families.common import OperatorModule


def replace_operator_modules(module: nn.Module) -> None:
    """Make every OperatorModule call `pipefit::leaf` instead of its own forward.

    Raises ModelError for an unknown kind, attributes that the kind does not declare or that are no JSON, and parameters
    that are missing or left out. The call itself raises ModelError for a wrong number of inputs.
    """
    from pipefit.model.families.common import OperatorModule
    from pipefit.model.families.leaf import call_operator

    for path, child in module.named_modules():
        if not isinstance(child, OperatorModule):
            continue
        where = f"{type(child).__module__}.{type(child).__qualname__}{f' at {path}' if path else ''}"
        child.forward = _leaf_forward(child, where, call_operator)


def _leaf_forward(child: OperatorModule, where: str, call_operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that calls the custom operator. It has the signature of the module's own, which the export of a
    layer reads, and takes inputs by position or by name."""
    kind, values, names = check_operator_module_fields(child, where)
    attributes, signature = json.dumps(values, sort_keys=True), inspect.signature(child.forward)

    def forward(*args: Any, **named: Any) -> Any:
        tensors = [*args, *(named[name] for name in signature.parameters if name in named)]
        _check_count(len(tensors), names, kind, where)
        return call_operator([*tensors, *map(child.get_parameter, names)], kind.kind, attributes)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def check_operator_module_fields(
    module: OperatorModule, where: str
) -> tuple[OperatorKind, dict[str, Any], tuple[str, ...]]:
    """Return the kind, the attributes and the names of the parameters of a module. Raises the errors of
    `replace_operator_modules`."""
    kind = _check_kind(module, where)
    return kind, _check_attributes(module, kind, where), _check_parameters(module, where)


def _check_kind(module: OperatorModule, where: str) -> OperatorKind:
    """Return the kind of a module. Raises ModelError if none has its name."""
    name = getattr(module, "kind", None)
    if name in KINDS:
        return KINDS[str(name)]
    raise ModelError(
        "An operator module names a kind that is not registered.",
        where=where,
        seen=f"kind = {name!r}",
        allowed=", ".join(sorted(KINDS)),
        next_step=suggest_name(str(name), KINDS, "import the module that registers the kind"),
    )


def _call_method(module: OperatorModule, name: str, where: str) -> Any:
    """Return the result of a method of a module. Raises ModelError if it is a value in place of a method."""
    method = getattr(module, name)
    if callable(method):
        return method()
    raise ModelError(
        f"`{name}` of an operator module is a method.",
        where=where,
        seen=f"{name} = {method!r}",
        allowed=f"def {name}(self): return {method!r}",
    )


def _check_attributes(module: OperatorModule, kind: OperatorKind, where: str) -> dict[str, Any]:
    """Return the attributes of a module. Raises ModelError if the kind declares others."""
    attributes = _call_method(module, "operator_attributes", where)
    declared = "; ".join(f"{name}: {meaning}" for name, meaning in kind.attributes.items()) or "none"
    allowed = f"the attributes of the kind {kind.kind} ({declared}), with JSON values"
    if not isinstance(attributes, Mapping):
        raise ModelError("The attributes of an operator are no dict.", where=where, seen=attributes, allowed=allowed)
    unknown = [name for name in attributes if name not in kind.attributes]
    if unknown:
        raise ModelError(
            "An operator module gives an attribute that its kind does not declare.",
            where=where,
            seen=", ".join(map(repr, unknown)),
            allowed=allowed,
            next_step=suggest_name(str(unknown[0]), kind.attributes, "declare it in OperatorKind.attributes"),
        )
    try:
        json.dumps(dict(attributes), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ModelError(
            "An attribute of an operator is no JSON value.", where=where, seen=error, allowed=allowed
        ) from None
    return dict(attributes)


def _check_parameters(module: OperatorModule, where: str) -> tuple[str, ...]:
    """Return the names of the operator's parameters, which are all parameters of the module."""
    names = tuple(_call_method(module, "operator_parameters", where))
    present = dict(module.named_parameters(remove_duplicate=False))
    if {*names} == {*present}:
        return names
    missing = [f"{name} (no parameter)" for name in names if name not in present]
    left_out = [f"{name} (left out)" for name in present if name not in names]
    raise ModelError(
        "`operator_parameters` of an operator module differs from its parameters.",
        where=where,
        seen=", ".join((*missing, *left_out)),
        allowed=f"all parameters in the order of the operator's inputs: {', '.join(present) or 'none'}",
    )


def _check_count(tensors: int, parameters: tuple[str, ...], kind: OperatorKind, where: str) -> None:
    """Raise ModelError unless the tensors and parameters of a call are the inputs of the kind."""
    count = tensors + len(parameters)
    least = sum(not name.endswith(("?", "*")) for name in kind.inputs)
    if least <= count and (count <= len(kind.inputs) or any(name.endswith("*") for name in kind.inputs)):
        return
    raise ModelError(
        "An operator module is called with another number of inputs than its kind has.",
        where=where,
        seen=f"{tensors} tensors and {len(parameters)} parameters",
        allowed=f"the inputs of the kind {kind.kind}: {', '.join(kind.inputs)}",
        next_step="name every input, parameters included, in OperatorKind.inputs",
    )
