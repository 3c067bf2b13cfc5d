"""Rules about forms: tensors and gradients that cross edges, parameters and their optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from pipefit.errors import PlanError
from pipefit.layout import FLAT, Mesh, MeshAxis, TensorForm, parse_form
from pipefit.optimizers.sharded_state import form_layout
from pipefit.plan.types import Edge, EdgeTransfer, Plan


def edge_problems(plan: Plan) -> Iterator[PlanError]:
    seen: set[tuple[int, int, str]] = set()
    for index, edge in enumerate(plan.edges):
        where = f"edges[{index}]"
        if not 0 <= edge.source < edge.target < len(plan.stages):
            yield PlanError(
                "An edge leads from a stage to a later one.", where=where, seen=f"{edge.source} to {edge.target}"
            )
            continue
        if (edge.source, edge.target, edge.tensor) in seen:
            yield PlanError("The edge is listed twice.", where=where, seen=f"{edge.source} to {edge.target}")
        seen.add((edge.source, edge.target, edge.tensor))
        source, target = (plan.groups[plan.stages[stage].group].to_mesh() for stage in (edge.source, edge.target))
        yield from _transfer_problems(edge.forward, source, target, f"{where}.forward")
        yield from _transfer_problems(edge.gradient, target, source, f"{where}.gradient")
        yield from _gradient_problems(edge, source, target, where)
    for index, (current, successor) in enumerate(pairwise(plan.stages)):
        if current.module == successor.module and current.turns == 1 and (index, index + 1, "") not in seen:
            yield PlanError(
                "Neighbouring stages of a module need an edge for the hidden state.",
                where="edges",
                seen=f"none from stage {index} to {index + 1}",
            )


def _transfer_problems(wire: EdgeTransfer, source: Mesh, target: Mesh, where: str) -> Iterator[PlanError]:
    for name, texts, group in (
        ("sent", wire.sent, source),
        ("wire", wire.wire, source),
        ("received", wire.received, target),
    ):
        if len(texts) != len(group.axes):
            yield PlanError(
                "One form is needed for each axis of the group.",
                where=f"{where}.{name}",
                seen=texts,
                allowed=", ".join(axis.name for axis in group.axes) or "none",
            )
            return
        error = _bad_form([form_layout(text) for text in texts] if name == "state" else texts, f"{where}.{name}")
        if error is not None:
            yield error
            return
    for axis, sent, wired in zip(source.axes, wire.sent, wire.wire, strict=True):
        if sent != wired and wired == "P":
            yield PlanError(
                "A transfer cannot turn a tensor into partial sums.", where=f"{where}.wire", seen=f"{sent} to {wired}"
            )
        received = {a.name: form for a, form in zip(target.axes, wire.received, strict=True)}.get(axis.name, "I")
        if wired == "P" and axis.size > 1 and (received != "P" or target.find_axis(axis.name).size != axis.size):
            yield PlanError(
                "Partial sums can only move between equal grids that keep them partial.",
                where=f"{where}.wire",
                seen=f"P along {axis.name!r} of {axis.size} to {received} of {target.find_axis(axis.name).size}",
                next_step="give the edge a wire layout without P: it is reduced before it leaves",
            )


def _gradient_problems(edge: Edge, source: Mesh, target: Mesh, where: str) -> Iterator[PlanError]:
    for group, forward, gradient, name in (
        (source, edge.forward.sent, edge.gradient.received, "gradient.received"),
        (target, edge.forward.received, edge.gradient.sent, "gradient.sent"),
    ):
        for axis, ahead, back in zip(group.axes, forward, gradient, strict=False):
            if axis.size > 1 and back not in _gradient_forms(ahead):
                yield PlanError(
                    "The gradient's form does not follow from the tensor's form.",
                    where=f"{where}.{name} ({axis.name})",
                    seen=f"{back} for a tensor that is {ahead}",
                    allowed=" or ".join(_gradient_forms(ahead)),
                )


def _gradient_forms(form: str) -> tuple[str, ...]:
    """Return the valid gradient forms: partial for replicated tensors, replicated for partial ones, sharded for sharded
    ones."""
    return {"I": ("P",), "P": ("I",)}.get(form, (form,))


def parameter_problems(plan: Plan) -> Iterator[PlanError]:
    names: set[str] = set()
    for index, parameter in enumerate(plan.parameters):
        where = f"parameters[{index}] ({parameter.name})"
        if parameter.name in names:
            yield PlanError("The parameter is listed twice.", where=where)
        names.add(parameter.name)
        uses = parameter.uses
        if not uses or list(uses) != sorted({*uses}) or not 0 <= uses[0] <= uses[-1] < len(plan.stages):
            yield PlanError(
                "The uses are rising numbers of stages.",
                where=f"{where}.uses",
                seen=uses,
                allowed=f"0 to {len(plan.stages) - 1}",
            )
            continue
        if parameter.owner not in uses:
            yield PlanError(
                "The owner must be one of the stages that use the parameter.",
                where=f"{where}.owner",
                seen=parameter.owner,
                allowed=", ".join(map(str, uses)),
            )
            continue
        group = plan.groups[plan.stages[parameter.owner].group].to_mesh()
        yield from _forms_of_parameter(parameter.shape, parameter.stored, parameter.state, group.axes, where)


def _forms_of_parameter(
    shape: Sequence[int], stored: Sequence[str], state: Sequence[str], axes: Sequence[MeshAxis], where: str
) -> Iterator[PlanError]:
    for name, texts in (("stored", stored), ("state", state)):
        if len(texts) != len(axes):
            yield PlanError(
                "One form is needed for each axis of the owner's group.",
                where=f"{where}.{name}",
                seen=texts,
                allowed=", ".join(axis.name for axis in axes),
            )
            return
        error = _bad_form([form_layout(text) for text in texts] if name == "state" else texts, f"{where}.{name}")
        if error is not None:
            yield error
            return
    for stored_form, state_form in zip(
        map(parse_form, stored), (parse_form(form_layout(text)) for text in state), strict=True
    ):
        if (
            stored_form.kind == "P"
            or state_form.kind == "P"
            or stored_form.dim == FLAT
            or _exceeds_shape(stored_form, shape)
        ):
            yield PlanError(
                "A parameter is stored replicated, or split along one of its dimensions.",
                where=f"{where}.stored",
                seen=f"{stored_form} of shape {tuple(shape)}",
                allowed="I, G0, ... in `stored`; Gflat only in `state`",
            )
        elif state_form != stored_form and not (stored_form.kind == "I" and state_form.dim == FLAT):
            yield PlanError(
                "The optimizer state has the parameter's form, or is split flat along an axis where it is replicated.",
                where=f"{where}.state",
                seen=f"{state_form} where the parameter is {stored_form}",
                allowed=f"{stored_form}" + (" or Gflat" if stored_form.kind == "I" else ""),
            )


def _exceeds_shape(form: TensorForm, shape: Sequence[int]) -> bool:
    return form.kind == "G" and form.dim is not None and form.dim >= len(shape)


def _bad_form(texts: Sequence[str], where: str) -> PlanError | None:
    for text in texts:
        try:
            parse_form(text)
        except PlanError as error:
            return PlanError(error.what, where=where, seen=repr(text), allowed=error.allowed)
    return None
