"""Sharded graphs: from the split label of each operator to one local graph per device, with collectives inserted.

`megatron.py` (a fixed rule) or `recipe.py` (a search) makes the choices. This file converts forms: `G` to `I` by
all_gather, `P` to `I` by all_reduce, `P` to `G` by reduce_scatter, `I` to `G` by a local slice, once per value and
form. The symbols S and R are a device's tokens and rows: the runtime cuts T and B by the same shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from pipefit.errors import PlanError
from pipefit.layout import IDENTITY, PARTIAL, Run, TensorForm, shard_form, split_by_shares
from pipefit.model.graph import Graph, Operator, ParameterSpec, Shape, TensorSpec, shapes_of
from pipefit.model.ops import KINDS
from pipefit.model.ops.reshare import KIND as RESHARE
from pipefit.model.ops.reshare import shares_of
from pipefit.shard.choice import (
    CONVERSIONS,
    LOCAL,
    REPLICATED_HELD,
    SEQUENCES,
    Chooser,
    FormConversion,
    HeldForm,
    OperatorChoice,
)
from pipefit.shard.rules import DevicePart, Labels, OperatorLabels, labels_of

SIDE_BY_SIDE = 4
"""Largest number of devices with equal shapes that a program text lists one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedGraph:
    """One layer over a shard axis."""

    graphs: tuple[Graph, ...]
    "One per position of the axis: local shapes, collectives as operators, the same operators in the same order."
    parameter_forms: Mapping[str, TensorForm]
    "Local parameter name -> form along the shard axis."
    input_form: TensorForm
    "Form of the incoming hidden state (I if the layer takes none)."
    output_form: TensorForm
    "Form of the first output."
    shares: tuple[int, ...]
    forms: Mapping[str, TensorForm]
    "Form of every value produced by an operator."
    taken_shares: tuple[int, ...]
    "Shares of the incoming hidden state."
    given_shares: tuple[int, ...]
    "Shares of the outgoing hidden state."

    def program_text(self) -> str:
        """Return the program as text: parameters with their forms, then one line per operator with all local shapes."""
        first = self.graphs[0]
        lines = [f"shares {' '.join(map(str, self.shares))}"]
        lines += [f"takes {self.input_form}, gives {self.output_form}"]
        for spec in first.parameters:
            shapes = _shape_columns(graph.find_parameter(spec.name).shape for graph in self.graphs)
            lines.append(f"parameter {spec.name}: {self.parameter_forms[spec.name]} {shapes}")
        for operator in first.operators:
            shapes = _shape_columns(graph.find_tensor(operator.outputs[0]).shape for graph in self.graphs)
            inputs = ", ".join(name or "-" for name in operator.inputs)
            how = operator.attributes.get("lowering", "")
            if operator.kind == RESHARE:
                how = ">".join(":".join(map(str, shares)) for shares in shares_of(operator))
            lines.append(f"{operator.outputs[0]} = {operator.kind}{how and '/'}{how}({inputs}): {shapes}")
        return "\n".join([*lines, f"return {', '.join(first.outputs)}"]) + "\n"


class ProgramWriter:
    """Writes the local graphs of all positions side by side, operator by operator."""

    def __init__(self, graph: Graph, shares: Sequence[int], stream: HeldForm) -> None:
        self.graph, self.shares, self.stream = graph, tuple(shares), stream.form
        self.taken_shares = stream.shares or self.shares
        self.arriving: dict[str, str] = {}
        "Input that arrives with other shares -> the name of the arriving value; its own name is the reshared value."
        self.shapes = shapes_of(graph)
        self.dtypes = {tensor.name: tensor.dtype for tensor in (*graph.inputs, *graph.tensors)}
        self.parameters = {spec.name: spec for spec in graph.parameters}
        self.held: dict[str, HeldForm] = dict.fromkeys(self.parameters, REPLICATED_HELD)
        self.converted: dict[tuple[str, HeldForm], str] = {}
        self.gathered: dict[tuple[str, str], str] = {}
        "(parameter with several readers, result of the reader that gathers it) -> the name of the gathered value."
        self.operators: list[list[Operator]] = [[] for _ in self.shares]
        self.tensors: list[list[TensorSpec]] = [[] for _ in self.shares]
        for tensor in graph.inputs:
            on_stream = tensor.role == "activation" and len(tensor.shape) > 1
            self.held[tensor.name] = stream if on_stream else REPLICATED_HELD
        self.input_held = dict(self.held)
        for tensor in graph.inputs if stream.shares else ():
            if self.held[tensor.name] == stream:
                arriving = self.arriving[tensor.name] = f"{tensor.name}.taken"
                self.shapes[arriving], self.dtypes[arriving], self.held[arriving] = tensor.shape, tensor.dtype, stream
                self._write_reshare(arriving, tensor.name, replace(stream, shares=()))

    def add_operator(self, operator: Operator, labelled: OperatorLabels, choice: OperatorChoice) -> None:
        """Convert the inputs and write the operator. A partial result is reduced at once unless the choice keeps it; a
        bias is added once, after the reduction."""
        for conversion in choice.before:
            self.convert_value(conversion, operator)
        labelled = labelled.for_label(choice.label)
        partial = choice.label is not None and not any(choice.label in labels for labels in labelled.outputs)
        settles = partial and choice.settle != PARTIAL
        inputs, late = self._prepare_inputs(operator, labelled, choice, partial)
        assert settles or not late, f"the bias of {operator.outputs} would be added once a device"
        results = tuple(f"{name}.partial" for name in operator.outputs) if settles else operator.outputs
        for name, source, labels in zip(results, operator.outputs, labelled.outputs, strict=True):
            self.shapes[name], self.dtypes[name] = self.shapes[source], self.dtypes[source]
            self.held[name] = (
                HeldForm(PARTIAL) if partial or choice.linear >= 0 else self._wanted_form(name, labels, choice)
            )
        self._write_operator(operator, inputs, results, labelled, choice, partial)
        if settles:
            biases = [self._align_bias(name, labels, operator, labelled) for name, labels in late]
            self._reduce_partial(operator, biases, choice.settle, choice.how)

    def _prepare_inputs(
        self, operator: Operator, labelled: OperatorLabels, choice: OperatorChoice, partial: bool
    ) -> tuple[tuple[str, ...], list[tuple[str, Labels | None]]]:
        """Return the inputs as the choice needs them, and the inputs added after the reduction of a partial result."""
        inputs = []
        late = []
        sums = labelled.linear[choice.linear] if choice.linear >= 0 else ()
        for index, (name, labels) in enumerate(zip(operator.inputs, labelled.inputs, strict=True)):
            if name and partial and index in labelled.once:
                late.append((self.hold_as(name, REPLICATED_HELD), labels))
                inputs.append("")
            else:
                want = HeldForm(PARTIAL) if index in sums else self._wanted_form(name, labels, choice)
                gathered = self.gathered.get((name, operator.outputs[0])) if want == REPLICATED_HELD else None
                inputs.append(gathered or (self.hold_as(name, want) if name else ""))
        return tuple(inputs), late

    def convert_value(self, conversion: FormConversion, reader: Operator | None = None) -> None:
        """Write one conversion from a form in which the value is held. A parameter with several readers is gathered for
        each `reader` (the next operator) that gathers it for itself. Raises PlanError if the value is not held in the
        source form, or if there is no such conversion."""
        name, source, target = conversion.name, conversion.source, conversion.target
        if name in self.parameters and self.held[name] == REPLICATED_HELD:
            self.held[name] = source
        held = name if self.held.get(name) == source else self.converted.get((name, source))
        able = (source.form.kind, target.form.kind) in CONVERSIONS and source.form != target.form
        if name in self.parameters:
            able = source.form.kind == "G" and target == REPLICATED_HELD
        if held is None or not able:
            raise PlanError(
                "This conversion of the value is not possible.",
                where=f"recipe, {name}",
                seen=f"{source.form}>{target.form}",
                allowed="from a form in which it is held: " + ", ".join(f"{a}>{b}" for a, b in CONVERSIONS),
            )
        if reader is not None and self._gathers_alone(reader, name):
            new = f"{name}.{target.form}.{reader.outputs[0]}"
            self.gathered[name, reader.outputs[0]] = self._write_conversion(held, target, name, conversion.how, new)
        else:
            self.converted[name, target] = self._write_conversion(held, target, name, conversion.how)

    def _gathers_alone(self, reader: Operator, name: str) -> bool:
        """Return whether a parameter has several readers and this one gathers it for itself."""
        readers = [operator for operator in self.graph.operators if name in operator.inputs]
        shared = name in self.parameters and len(readers) > 1 and reader in readers
        return shared and KINDS[reader.kind].gathers.get(reader.inputs.index(name), 0) > 0

    def hold_as(self, name: str, want: HeldForm) -> str:
        """Return the name under which `name` is held as `want`; parameters take the form, values are converted."""
        have = self.held[name]
        if name in self.parameters and (name, want) not in self.converted:
            assert have in (want, REPLICATED_HELD), f"{name} is used as {have} and as {want}"
            self.held[name] = want
            return name
        if have == want:
            return name
        if (name, want) not in self.converted:
            if have.form.kind == "G" and want.form.kind == "G":
                self.converted[name, want] = self._write_conversion(self.hold_as(name, REPLICATED_HELD), want, name)
            else:
                self.converted[name, want] = self._write_conversion(name, want, name)
        return self.converted[name, want]

    def finish_graphs(self, gives: HeldForm) -> ShardedGraph:
        """Return the local graphs, with the outputs in the form `gives` (scalars replicated)."""
        outputs = []
        for name in self.graph.outputs:
            on_stream = len(self.shapes[name]) > 1
            result = self.hold_as(name, replace(gives, shares=()) if on_stream else REPLICATED_HELD)
            if on_stream and gives.shares:
                result = self._write_reshare(result, f"{name}.given", gives)
            outputs.append(result)
        hidden = self.graph.hidden_input
        return ShardedGraph(
            graphs=tuple(self._local_graph(position, tuple(outputs)) for position in range(len(self.shares))),
            parameter_forms={name: self.held[name].form for name in self.parameters},
            input_form=IDENTITY if hidden is None else self.input_held[hidden].form,
            output_form=self.held[outputs[0]].form,
            shares=self.shares,
            forms={tensor.name: self.held[tensor.name].form for tensor in self.tensors[0]},
            taken_shares=self.taken_shares,
            given_shares=gives.shares or self.shares,
        )

    def local_shape(self, name: str, position: int) -> Shape:
        """Return the shape of a value or parameter on one device."""
        held, shape = self.held[name], self.shapes[name]
        if held.form.kind != "G":
            return shape
        dim = held.form.dim
        assert dim is not None
        if shape[dim] in LOCAL:
            return (*shape[:dim], LOCAL[shape[dim]], *shape[dim + 1 :])
        start, stop = self.device_runs(name)[position]
        return (*shape[:dim], stop - start, *shape[dim + 1 :])

    def device_runs(self, name: str) -> tuple[Run, ...]:
        """Return all devices' runs of the split dimension of `name`. Raises PlanError if a device gets none."""
        held = self.held[name]
        assert held.form.dim is not None
        size = self.shapes[name][held.form.dim]
        if not isinstance(size, int) or held.units == 0 or size % held.units:
            raise PlanError("This dimension cannot be split.", where=name, seen=f"{size} in {held.units} units")
        shares = held.shares or self.shares
        runs = split_by_shares(size, shares, size // held.units)
        if any(start == stop for start, stop in runs):
            raise PlanError(
                "A device of the shard axis would get nothing: there are too few units for these shares.",
                where=f"{name}, dimension {held.form.dim} of {size}",
                seen=f"{held.units} units for shares {' '.join(map(str, shares))}",
                allowed=f"at most {held.units} devices, with shares that give each at least one unit",
                next_step="make the shares more even"
                if len(self.shares) <= held.units
                else f"use fewer shards: --fix shards={held.units}",
            )
        return runs

    def _wanted_form(self, name: str, labels: Labels | None, choice: OperatorChoice) -> HeldForm:
        if choice.label is None or labels is None or choice.label not in labels:
            return REPLICATED_HELD
        dim = labels.index(choice.label)
        size = self.shapes[name][dim]
        if size in LOCAL:
            return HeldForm(shard_form(dim))
        assert isinstance(size, int), f"cannot split {name} {self.shapes[name]} along {dim}"
        return HeldForm(shard_form(dim), choice.units or size)

    def _write_conversion(self, name: str, want: HeldForm, origin: str, how: str = "", new: str = "") -> str:
        have = self.held[name]
        dim = want.form.dim if want.form.kind == "G" else have.form.dim
        kind = "unshard" if name in self.parameters else CONVERSIONS[have.form.kind, want.form.kind]
        new = new or f"{origin}.{want.form}" + (f"x{want.units}" if want.units else "")
        self.shapes[new], self.held[new] = self.shapes[name], want
        self.dtypes[new] = self.dtypes.get(name, "compute")
        for position in range(len(self.shares)):
            attributes: dict[str, Any] = {}
            if dim is not None:
                attributes = {"dim": dim, "size": self.local_shape(new, position)[dim]}
                units = want.units if want.form.kind == "G" else have.units
                if units and units != self.shapes[name][dim]:
                    attributes["units"] = units
            if kind == "all_to_all":
                old = have.form.dim
                assert old is not None
                total = self.shapes[name][old]
                attributes |= {"from": old, "whole": total, "from_units": have.units if have.units != total else 0}
            if how:
                attributes["lowering"] = how
            operator = Operator(kind=kind, inputs=(name,), outputs=(new,), attributes=attributes)
            self._append_operator(position, operator)
        return new

    def _write_reshare(self, name: str, new: str, want: HeldForm) -> str:
        """Convert a split value from its shares to those of `want`, as the value `new`."""
        have, dim = self.held[name], want.form.dim
        assert dim is not None and have.form == want.form, f"{name} is {have.form}, not {want.form}"
        self.shapes[new], self.dtypes[new], self.held[new] = self.shapes[name], self.dtypes[name], want
        full_size = self.shapes[name][dim]
        for position in range(len(self.shares)):
            attributes = {
                "dim": dim,
                "size": self.local_shape(new, position)[dim],
                "whole": full_size,
                "from": list(have.shares or self.shares),
                "to": list(want.shares or self.shares),
            } | ({"units": want.units} if want.units not in (0, full_size) else {})
            self._append_operator(
                position, Operator(kind=RESHARE, inputs=(name,), outputs=(new,), attributes=attributes)
            )
        return new

    def _reduce_partial(self, operator: Operator, late: list[str], form: TensorForm | None, how: str) -> None:
        """Reduce a partial result, then add the inputs that must be added once."""
        for name in operator.outputs:
            on_stream = self.shapes[name][1:2] and self.shapes[name][1] in SEQUENCES and self.stream.kind == "G"
            want = HeldForm(form or (self.stream if on_stream else IDENTITY))
            summed = self._write_conversion(f"{name}.partial", want, name, how)
            self.held[name] = want
            for bias in late:
                result = f"{name}.biased"
                self.shapes[result], self.dtypes[result] = self.shapes[name], self.dtypes[name]
                self.held[result] = want
                for position in range(len(self.shares)):
                    add = Operator(kind="add", inputs=(summed, bias), outputs=(result,), source=operator.source)
                    self._append_operator(position, add)
                summed = result
            self._rename_output(summed, name)

    def _align_bias(self, bias: str, labels: Labels | None, operator: Operator, labelled: OperatorLabels) -> str:
        """Return a replicated bias, reshaped with trailing 1s if the result has more dimensions (convolution)."""
        out = labelled.outputs[0]
        if labels is None or out[len(out) - len(labels) :] == labels:
            return bias
        size = dict(zip(labels, self.shapes[bias], strict=True))
        shape = tuple(size[label] if label in labels else 1 for label in out)
        name = f"{operator.outputs[0]}.bias"
        self.shapes[name], self.dtypes[name], self.held[name] = shape, "compute", REPLICATED_HELD
        for position in range(len(self.shares)):
            reshape = Operator(
                kind="reshape",
                inputs=(bias,),
                outputs=(name,),
                attributes={"shape": list(shape)},
                source=operator.source,
            )
            self._append_operator(position, reshape)
        return name

    def _rename_output(self, old: str, new: str) -> None:
        """Give the newest operator's output the name used by the rest of the graph."""
        for operators, tensors in zip(self.operators, self.tensors, strict=True):
            last = operators[-1]
            assert last.outputs == (old,)
            operators[-1] = Operator(
                kind=last.kind, inputs=last.inputs, outputs=(new,), attributes=last.attributes, source=last.source
            )
            tensors[-1] = TensorSpec(name=new, shape=tensors[-1].shape, dtype=tensors[-1].dtype)

    def _write_operator(
        self,
        operator: Operator,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        labelled: OperatorLabels,
        choice: OperatorChoice,
        partial: bool,
    ) -> None:
        kind = labelled.kinds.get(choice.label or "", operator.kind)
        factors: Mapping[str, Any] = {}
        if choice.factors:
            kind, factors = KINDS[operator.kind].factors_kind, self._factor_attributes(operator, choice)
        held = self.held[outputs[0]]
        split_inputs = [name for name in inputs if name and self.held[name].form.kind == "G"]
        for position in range(len(self.shares)):
            attributes: Mapping[str, Any] = {**operator.attributes, **factors}
            if labelled.local is not None and held.form.kind == "G":
                attributes = labelled.local(
                    attributes, self.local_shape(outputs[0], position), self._device_part(outputs[0], position)
                )
            if labelled.addend is not None and partial:
                attributes = labelled.addend(attributes, self._device_part(split_inputs[0], position))
            self._append_operator(
                position,
                Operator(kind=kind, inputs=inputs, outputs=outputs, attributes=attributes, source=operator.source),
            )

    def _factor_attributes(self, operator: Operator, choice: OperatorChoice) -> Mapping[str, Any]:
        """Return the attributes of a linear layer with gathered factors. Raises PlanError for other operators."""
        held = self.held[operator.outputs[0]].form
        if not KINDS[operator.kind].factors_kind or held.kind != "G" or held.dim is None:
            raise PlanError(
                "The factors of this operator cannot be gathered.",
                where=f"recipe, {operator.kind}",
                seen=f"{choice.label}*",
                allowed="linear layers that are split along rows or tokens",
            )
        full_size = self.shapes[operator.outputs[0]][held.dim]
        return {"dim": held.dim, "whole": full_size} | ({"lowering": choice.how} if choice.how else {})

    def _device_part(self, name: str, position: int) -> DevicePart:
        held = self.held[name]
        assert held.form.dim is not None
        total = self.shapes[name][held.form.dim]
        return DevicePart(held.form.dim, -1 if total in LOCAL else self.device_runs(name)[position][0], total)

    def _append_operator(self, position: int, operator: Operator) -> None:
        self.operators[position].append(operator)
        for name in operator.outputs:
            shape = self.local_shape(name, position)
            self.tensors[position].append(TensorSpec(name=name, shape=shape, dtype=self.dtypes[name]))

    def _local_graph(self, position: int, outputs: tuple[str, ...]) -> Graph:
        inputs = tuple(
            TensorSpec(name=name, shape=self.local_shape(name, position), dtype=t.dtype, role=t.role)
            for t in self.graph.inputs
            for name in [self.arriving.get(t.name, t.name)]
        )
        parameters = []
        for spec in self.graph.parameters:
            shape = tuple(int(size) for size in self.local_shape(spec.name, position))
            parameters.append(ParameterSpec(name=spec.name, shape=shape, trainable=spec.trainable))
        return Graph(
            inputs=inputs,
            outputs=outputs,
            operators=tuple(self.operators[position]),
            parameters=tuple(parameters),
            tensors=tuple(self.tensors[position]),
        )


def shard_graph(
    graph: Graph,
    shares: Sequence[int],
    takes: HeldForm,
    choose: Chooser,
    gives: HeldForm | None = None,
    after: Sequence[FormConversion] = (),
) -> ShardedGraph:
    """Return the program described by `choose`, from hidden state form `takes` to `gives` (default: `takes`); `after`
    converts results at the end."""
    program = ProgramWriter(graph, shares, takes)
    for index, operator in enumerate(graph.operators):
        labelled = labels_at(program.shapes, operator)
        program.add_operator(operator, labelled, choose(index, operator, labelled, program.held) or OperatorChoice())
    for conversion in after:
        program.convert_value(conversion)
    return program.finish_graphs(takes if gives is None else gives)


def labels_at(shapes: Mapping[str, Shape], operator: Operator) -> OperatorLabels:
    """Return the labels of an operator, given the full shapes of its inputs and outputs."""
    inputs = tuple(shapes[name] if name else None for name in operator.inputs)
    return labels_of(operator, inputs, tuple(shapes[name] for name in operator.outputs))


def _shape_columns(shapes: Iterable[Shape]) -> str:
    """Return one shape per device, or `8 x (B, T, 512)` for more than SIDE_BY_SIDE neighbours with equal shapes."""
    columns = []
    for shape, run in groupby(shapes):
        count = len([*run])
        columns += [f"{count} x {_shape_text(shape)}"] if count > SIDE_BY_SIDE else [_shape_text(shape)] * count
    return " | ".join(columns)


def _shape_text(shape: Shape) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
