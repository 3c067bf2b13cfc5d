"""A priced template of a layer on a device group: all options of every operator with their costs.

The rules give the options: replicated, split along a label, passing partial sums on. Compute is priced by the roofline
of each device kind (times the factor of measured layers of that kind), collectives by the links of the group, each
together with the collective of its backward (the duality of forms).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES
from pipefit.cost.work import BUCKET_BYTES
from pipefit.layout import IDENTITY, PARTIAL, TensorForm, shard_form
from pipefit.model.analysis.narrow_products import narrow_outputs
from pipefit.model.analysis.saved import kept_values
from pipefit.model.graph import Graph, Operator, ParameterSpec, Shape, TensorSpec, element_count, shapes_of
from pipefit.model.ops import KINDS
from pipefit.model.ops.unshard import gathers_of
from pipefit.shard import frontier
from pipefit.shard.conversion_costs import ConversionCosts, price_conversions, price_unshardings
from pipefit.shard.cuts import cut_units
from pipefit.shard.operator_work import OperatorPricing
from pipefit.shard.program import labels_at
from pipefit.shard.rules import Labels, OperatorLabels
from pipefit.shard.setting import ShardSetting as ShardSetting
from pipefit.shard.template import WHOLE_CUT, ConversionCost, HeldFractions, LayerTemplate, Lines, OpenOption, OpenStep


@dataclass(frozen=True, slots=True)
class OptionPick:
    """The meaning of a template option: a choice in words, without its units."""

    label: str = ""
    "The split label; '' for none."
    linear: int = -1
    settle: TensorForm = PARTIAL
    "The form to which a partial result is reduced at once."
    how: str = ""
    "Lowerings of that reduction for uneven parts (`ConversionCost.lowering_names`)."
    factors: bool = False
    "Whether every device computes the full weight gradient of a linear layer from gathered factors."


ALIAS = -2
"""Operator index of a step that stands for a parameter as read by one of several operators."""

Offered = tuple[tuple[OpenOption, ...], tuple[OptionPick, ...]]
"""The options of a step, and their meanings."""


@dataclass(frozen=True, kw_only=True)
class PricedLayer:
    """A template with the meaning of its numbers."""

    template: LayerTemplate
    values: tuple[str, ...]
    "The names of its values and parameters, by number."
    operators: tuple[int, ...]
    "Operator index of every step; -1 for a parameter that chooses its form, ALIAS for a parameter as read."
    picks: tuple[tuple[OptionPick, ...], ...]
    "The meaning of every option of every step."
    units: Mapping[tuple[str, int], int]
    "Units of every dimension that can be split (`cuts.cut_units`)."
    cuts: Mapping[tuple[str, int], int]
    "Cuts of the dimensions that can be split among these devices."
    shapes: Mapping[str, Shape]

    def can_hand_on(self, name: str, form: TensorForm, fractions: HeldFractions) -> bool:
        """Return whether a value can pass between layers in this form. Layers share only the cuts of rows, of tokens,
        and of features in units of one."""
        if form.dim is None:
            return form.kind == "I"
        dimension = name, form.dim
        return self.cuts.get(dimension) in fractions.worst and self.units[dimension] in (0, self.shapes[name][form.dim])

    def with_input_form(self, graph: Graph, takes: TensorForm) -> PricedLayer:
        """Return the layer for another form of the incoming hidden state."""
        input_forms = {self.values.index(t.name): number_of(takes) for t in graph.inputs if is_hidden_state(t)}
        return replace(self, template=replace(self.template, given={**self.template.given, **input_forms}))


def price_layer(
    graph: Graph,
    setting: ShardSetting,
    takes: TensorForm,
    pinned: Mapping[str, TensorForm] | None = None,
    elsewhere: Collection[str] = (),
) -> PricedLayer:
    """Return the template of a layer with the incoming hidden state in form `takes`. `pinned`: forms of parameters
    shared with other layers. `elsewhere`: parameters with their reduction, update and memory counted in another layer.
    """
    return _LayerPricing(graph, setting, takes, pinned or {}, elsewhere).build_layer()


def number_of(form: TensorForm) -> int:
    """Return the number of a form in the frontier."""
    if form.kind == "G":
        assert form.dim is not None
        return frontier.form_number_along(form.dim)
    return frontier.PARTIAL if form.kind == "P" else frontier.REPLICATED


def form_of(number: int) -> TensorForm:
    """Return the form of a number in the frontier."""
    if number == frontier.REPLICATED:
        return IDENTITY
    return PARTIAL if number == frontier.PARTIAL else shard_form(number - 2)


def is_hidden_state(tensor: TensorSpec) -> bool:
    """Return whether a value is the hidden state, which may be split between layers; the loss is not."""
    return tensor.role == "activation" and len(tensor.shape) > 1


class _LayerPricing:
    def __init__(
        self,
        graph: Graph,
        setting: ShardSetting,
        takes: TensorForm,
        pinned: Mapping[str, TensorForm],
        elsewhere: Collection[str],
    ) -> None:
        self.graph, self.setting, self.takes, self.pinned, self.elsewhere = graph, setting, takes, pinned, elsewhere
        self.shapes = shapes_of(graph)
        self.units = cut_units(graph)
        self.parameters = {spec.name: spec for spec in graph.parameters}
        self.tensors = {tensor.name: tensor for tensor in (*graph.inputs, *graph.tensors)}
        narrow = narrow_outputs(graph, setting.precision)
        self.work = OperatorPricing(setting, self.shapes, self.tensors, self.parameters, narrow)
        self.width = COMPUTE_BYTES[setting.precision]
        self.kept = {*kept_values(graph, "none", self.width).values, *graph.outputs}
        self.values: dict[str, int] = {}
        self.aliases: dict[str, tuple[str, int]] = {}
        "Names from `read_name`: name -> (parameter, number of gathers by its reader)."
        self.steps: list[OpenStep] = []
        self.operators: list[int] = []
        self.picks: list[tuple[OptionPick, ...]] = []

    def build_layer(self) -> PricedLayer:
        for tensor in self.graph.inputs:
            self.value_number(tensor.name)
        for index, operator in enumerate(self.graph.operators):
            for name in operator.inputs:
                if name in self.parameters and name not in self.values:
                    self.add_parameter(self.parameters[name])
            self.add_operator(index, operator)
        input_forms = {
            self.values[t.name]: number_of(self.takes if is_hidden_state(t) else IDENTITY) for t in self.graph.inputs
        }
        wanted = {self.values[name]: frontier.REPLICATED for name in self.graph.outputs}
        names = tuple(self.values)
        cuts = {dimension: cut for dimension in self.units if (cut := self.dimension_units(*dimension)) is not None}
        template = LayerTemplate(
            members=self.setting.axis_members,
            steps=tuple(self.steps),
            conversion_costs=tuple(self.conversion_costs(name) for name in names),
            cuts=tuple(sorted({*cuts.values()})),
            given=input_forms,
            wanted=wanted,
        )
        return PricedLayer(
            template=template,
            values=tuple(self.aliases[name][0] if name in self.aliases else name for name in names),
            operators=tuple(self.operators),
            picks=tuple(self.picks),
            units=self.units,
            cuts=cuts,
            shapes=self.shapes,
        )

    def value_number(self, name: str) -> int:
        return self.values.setdefault(name, len(self.values))

    def add_parameter(self, spec: ParameterSpec) -> None:
        """Add the step of a parameter's form: replicated, with one gradient reduction per iteration; or split."""
        like = (spec.shape, spec.trainable, self.value_units(spec.name), self.pinned.get(spec.name))
        options, picks = self.setting.make_once(
            (*like, spec.name in self.factored_parameters), lambda: self.parameter_options(spec)
        )
        if spec.name in self.elsewhere:
            nothing = (((),) * len(self.setting.distinct_kinds),) * 3
            options = tuple(replace(option, passes=nothing, once_s=0.0, held=(0.0, 0.0)) for option in options)
        self._add_step((), spec.name, options, picks, -1)

    def parameter_options(self, spec: ParameterSpec) -> Offered:
        """Return the possible forms of a parameter."""
        elements = element_count(spec.shape, {})
        options, picks = [], []
        forms = [
            IDENTITY,
            *(shard_form(dim) for dim in range(len(spec.shape)) if self.dimension_units(spec.name, dim) is not None),
        ]
        if spec.name in self.pinned:
            forms = [form for form in forms if form == self.pinned[spec.name]]
        for form in forms:
            cut = WHOLE_CUT if form.dim is None else self.dimension_units(spec.name, form.dim)
            assert cut is not None
            once_s = 0.0
            if form == IDENTITY and spec.trainable:
                gradient = elements * GRADIENT_BYTES[self.setting.precision]
                once_s = self.setting.bucket_s * gradient / BUCKET_BYTES / self.setting.microbatches  # in full buckets
            update = self.setting.update_bytes(elements) if spec.trainable else 0.0
            seconds = [
                update / kind.memory_bandwidth_bytes_per_s / self.setting.microbatches
                for kind in self.setting.distinct_kinds
            ]
            lines = tuple(((0.0, s) if form.kind == "G" else (s, 0.0),) for s in seconds)
            nothing: tuple[Lines, ...] = ((),) * len(seconds)
            shared_bytes, size = self.setting.stored_bytes(elements, spec)
            held = (shared_bytes, size) if form.kind == "G" else (size + shared_bytes, 0.0)
            options.append(OpenOption((), number_of(form), cut, (nothing, nothing, lines), None, once_s, held))
            picks.append(OptionPick())
            if form == IDENTITY and spec.name in self.factored_parameters:
                options.append(replace(options[-1], gives=frontier.EVERYWHERE, once_s=0.0))
                picks.append(OptionPick())
        return tuple(options), tuple(picks)

    def unsharding_costs(self, spec: ParameterSpec, often: int) -> ConversionCosts:
        """Return the prices of a sharded parameter (FSDP): gathered in the forward and again for the input gradient,
        with its gradient reduced in every microbatch."""
        cuts = self.value_units(spec.name)
        like = ("unshard", spec.shape, cuts, spec.trainable, often)
        return self.setting.make_once(
            like, lambda: price_unshardings(self.setting, spec.shape, cuts, spec.trainable, often)
        )

    def read_name(self, operator: Operator, index: int) -> str:
        """Return the name under which an operator reads an input. A parameter with several readers has one name per
        operator that gathers it for itself, and one for all other readers, so each gather is paid once."""
        name = operator.inputs[index]
        if name not in self.parameters or self.reader_counts[name] < 2:
            return name
        often = KINDS[operator.kind].gathers.get(index, 0)
        alias = f"{name} {operator.outputs[0] if often else 'kept'}"
        if alias not in self.values:
            number = self.values[name]
            step = next(step for step in self.steps if step.output == number)
            options = tuple(OpenOption((option.gives,), option.gives) for option in step.ways)
            self.aliases[alias] = name, often
            self._add_step((name,), alias, options, (OptionPick(),) * len(options), ALIAS)
        return alias

    def add_operator(self, place: int, operator: Operator) -> None:
        assert len(operator.outputs) == 1, f"{operator.kind} has several outputs"
        like = (operator.kind, repr(operator.attributes), *map(self.operand_key, (*operator.inputs, *operator.outputs)))
        options, picks = self.setting.make_once(like, lambda: self.operator_options(operator))
        inputs = tuple(self.read_name(operator, index) for index, name in enumerate(operator.inputs) if name)
        self._add_step(inputs, operator.outputs[0], options, picks, place)

    def operand_key(self, name: str) -> object:
        """Return the properties of an operand that determine its operator's options."""
        if not name:
            return None
        if name in self.parameters:
            like: tuple[object, ...] = (self.parameters[name].trainable, name in self.factored_parameters)
        else:
            like = (self.tensors[name].dtype, self.tensors[name].role)
        return self.shapes[name], like, self.value_units(name), self.held_bytes(name)

    def operator_options(self, operator: Operator) -> Offered:
        """Return the options to compute an operator."""
        labelled = labels_at(self.shapes, operator)
        present = [index for index, name in enumerate(operator.inputs) if name]
        all_whole = (0,) * len(present)
        plain = self.work.pass_lines(operator, labelled, "")
        size = self.held_bytes(operator.outputs[0])
        options = [OpenOption(all_whole, frontier.REPLICATED, WHOLE_CUT, plain, held=(size, 0.0))]
        picks = [OptionPick()]
        for number, sums in enumerate(labelled.linear):
            needs = tuple(frontier.PARTIAL if index in sums else frontier.REPLICATED for index in present)
            options.append(OpenOption(needs, frontier.PARTIAL, WHOLE_CUT, plain, held=(size, 0.0)))
            picks.append(OptionPick(linear=number))
        tables = labelled
        for label, (cut, earlier) in self.splittable_labels(operator, tables).items():
            labelled = tables.for_label(label)
            passes = self.work.pass_lines(operator, labelled, label)
            talk = self.work.price_exchanges(operator, labelled, label, cut, earlier)
            gives = _form_along(labelled.outputs[0], label)
            partial = gives == frontier.REPLICATED
            once = {index for index in labelled.once if partial and operator.inputs[index]}
            inputs = (None if index in once else labelled.inputs[index] for index in present)
            needs = tuple(_form_along(labels, label) for labels in inputs)
            if not partial:
                options.append(OpenOption(needs, gives, cut, passes, held=(0.0, size), talk=talk))
                picks.append(OptionPick(label))
            elif not once:
                options.append(OpenOption(needs, frontier.PARTIAL, cut, passes, held=(size, 0.0), talk=talk))
                picks.append(OptionPick(label))
            else:
                for form, conversion in self.settlement_forms(operator, labelled, once):
                    options.append(OpenOption(needs, number_of(form), cut, passes, conversion, held=(size, 0.0)))
                    picks.append(OptionPick(label, settle=form))
        if operator.inputs[1:2] and operator.inputs[1] in self.factored_parameters:
            for option, pick in self.factored_options(operator, tables, plain[2], size):
                options.append(option)
                picks.append(pick)
        return tuple(options), tuple(picks)

    @cached_property
    def reader_counts(self) -> Counter[str]:
        """The number of reads of every value."""
        return Counter(name for operator in self.graph.operators for name in operator.inputs)

    @cached_property
    def factored_parameters(self) -> frozenset[str]:
        """Parameters of linear layers without other readers, whose gradient factors may be gathered."""
        lowered = self.setting.lowered
        factored: set[str] = set()
        for operator in self.graph.operators if lowered is not None else ():
            weights = {name for name in operator.inputs[1:] if name}
            free = all(
                self.reader_counts[name] == 1
                and name in self.parameters
                and self.parameters[name].trainable
                and name not in self.pinned
                for name in weights
            )
            if KINDS[operator.kind].factors_kind and free:
                factored |= weights
        return frozenset(factored)

    def factored_options(
        self, operator: Operator, labelled: OperatorLabels, whole: tuple[Lines, ...], size: float
    ) -> Iterator[tuple[OpenOption, OptionPick]]:
        """Yield a linear layer split along rows or tokens, with both factors of the weight gradient gathered. Every
        device computes the full weight gradient (`whole`) in every microbatch, so there is no reduction once an
        iteration."""
        x, y = operator.inputs[0], operator.outputs[0]
        weights = tuple(frontier.EVERYWHERE for name in operator.inputs[1:] if name)
        assert self.setting.lowered is not None
        for dim, symbol in enumerate(self.shapes[x][:2]):
            cut, label = self.dimension_units(x, dim), f"d{dim}"
            if (
                symbol not in ("B", "T")
                or cut is None
                or cut != self.dimension_units(y, dim)
                or len(self.shapes[x]) < dim + 2
            ):
                continue
            forward, back, _ = self.work.pass_lines(operator, labelled, label)
            all_of_it = tuple(tuple((first + second, 0.0) for first, second in lines) for lines in whole)
            ahead, behind = (
                self.setting.lowered(
                    "all_gather", float(element_count(self.shapes[name], self.setting.symbol_sizes) * self.width)
                )
                for name in (x, y)
            )
            talk = ConversionCost((0.0, 0.0), cut, ahead=ahead, back=behind)
            along = frontier.form_number_along(dim)
            passes = (forward, back, all_of_it)
            option = OpenOption((along, *weights), along, cut, passes, held=(0.0, size), talk=talk)
            yield option, OptionPick(label, factors=True)

    def splittable_labels(self, operator: Operator, labelled: OperatorLabels) -> Mapping[str, tuple[int, int]]:
        """Return splittable labels -> (cut, earlier cut); the earlier cut is that of a joint label's first input."""
        cuts_by_label: dict[str, int] = {}
        barred = set()
        names = (*operator.inputs, *operator.outputs)
        for name, labels in zip(names, (*labelled.inputs, *labelled.outputs), strict=True):
            for dim, label in enumerate(labels or ()):
                if name and label is not None:
                    cut = self.dimension_units(name, dim)
                    if cut is None or cuts_by_label.setdefault(label, cut) != cut:
                        barred.add(label)
        able = {label: (cut, WHOLE_CUT) for label, cut in cuts_by_label.items() if label not in barred}
        for label, (inputs, _) in labelled.joint.items():
            cuts = [
                self.dimension_units(name, labels.index(label))
                for name, labels in zip(operator.inputs, inputs, strict=True)
                if labels is not None and label in labels
            ]
            if None not in cuts:
                able[label] = cuts[-1] or 0, cuts[0] or 0
        return able

    def settlement_forms(
        self, operator: Operator, labelled: OperatorLabels, once: set[int]
    ) -> list[tuple[TensorForm, ConversionCost]]:
        """Return the forms in which a replicated bias can be added after the reduction."""
        output = operator.outputs[0]
        barred = {label for index in once for label in labelled.inputs[index] or ()}
        settlements = []
        for (source, target), conversion in self.tensor_costs(self.tensors[output]).items():
            form = form_of(target)
            split = labelled.outputs[0][form.dim] if form.dim is not None else None
            runs_late = form.dim is None or self.shapes[output][form.dim] in ("B", "T")
            if source == frontier.PARTIAL and split not in barred - {None} and runs_late:
                settlements.append((form, conversion))
        return settlements

    def conversion_costs(self, name: str) -> ConversionCosts:
        """Return all conversions of a value; a parameter with several readers is converted where it is read."""
        if name in self.aliases:
            parameter, often = self.aliases[name]
            return self.unsharding_costs(self.parameters[parameter], often)
        if name in self.parameters:
            often = gathers_of(self.graph, name)
            return self.unsharding_costs(self.parameters[name], often) if self.reader_counts[name] < 2 else {}
        return self.tensor_costs(self.tensors[name])

    def tensor_costs(self, tensor: TensorSpec) -> ConversionCosts:
        """Return all conversions of a value, with their backward."""
        bytes_kept, cuts = self.held_bytes(tensor.name), self.value_units(tensor.name)
        activation = tensor.role == "activation"
        like = ("convert", tensor.shape, cuts, bytes_kept, activation)
        return self.setting.make_once(
            like, lambda: price_conversions(self.setting, tensor.shape, cuts, bytes_kept, activation)
        )

    def held_bytes(self, name: str) -> float:
        """Return the bytes of a value saved for the backward; a layer's result is held by the next layer."""
        if name not in self.kept:
            return 0.0
        return float(element_count(self.shapes[name], self.setting.symbol_sizes) * self.width)

    def dimension_units(self, name: str, dim: int) -> int | None:
        """Return the units of a dimension, or None if it cannot be split among these devices."""
        if (name, dim) not in self.units:
            return None
        units = self.units[name, dim] or self.setting.symbol_sizes[str(self.shapes[name][dim])]
        return units if units >= len(self.setting.kinds) else None

    def value_units(self, name: str) -> tuple[int | None, ...]:
        """Return the units of every dimension of a value."""
        return tuple(self.dimension_units(name, dim) for dim in range(len(self.shapes[name])))

    def _add_step(
        self,
        inputs: tuple[str, ...],
        output: str,
        ways: tuple[OpenOption, ...],
        picks: tuple[OptionPick, ...],
        place: int,
    ) -> None:
        self.steps.append(OpenStep(tuple(self.values[name] for name in inputs), self.value_number(output), ways))
        self.picks.append(picks)
        self.operators.append(place)


def _form_along(labels: Labels | None, label: str) -> int:
    if labels is None or label not in labels:
        return frontier.REPLICATED
    return frontier.form_number_along(labels.index(label))
