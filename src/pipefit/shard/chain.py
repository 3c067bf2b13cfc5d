"""The cheapest programs for a chain of layers, with the forms of the hidden state between them chosen jointly.

Equal layers are searched once for every incoming form. A shortest path over the forms between layers then gives each
layer its program. Equal layers get the same program, so plans and runs store one per graph. Parameters shared by two
layers get one form; all forms are tried.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import fsum

from pipefit.cost.static_memory import COMPUTE_BYTES
from pipefit.errors import PlanError
from pipefit.layout import IDENTITY, TensorForm, shard_form
from pipefit.model.graph import Graph, Layer, Model, element_count
from pipefit.shard.frontier import solve_between
from pipefit.shard.pricing import PricedLayer, ShardSetting, is_hidden_state, number_of, price_layer
from pipefit.shard.recipe import DeviceShares, ShardRecipe, recipe_of
from pipefit.shard.template import ChosenProgram, PricedTemplate, choose_program, held_fractions

Pinned = tuple[tuple[str, TensorForm, bool], ...]
"""For each parameter of a layer that other layers share: local name, form, and whether this layer counts it. The first
such layer, whose gradient is complete last, counts the costs per iteration and the bytes on a device.
"""


@dataclass(frozen=True, kw_only=True)
class ChainLink:
    """The program of one layer in a chain."""

    takes: TensorForm
    gives: TensorForm
    layer: PricedLayer
    choice: ChosenProgram
    cost_s: float
    "Cost in the search, for the shares of the search: devices are synchronised after every operator."
    shares: tuple[int, ...] = ()
    "Shares that determine the lowerings of collectives; empty: they are padded."
    around: tuple[DeviceShares, ...] = ()
    "Shares of the incoming hidden state, the layer, and the outgoing hidden state, if layers differ; else empty."

    @property
    def layer_recipe(self) -> ShardRecipe:
        recipe = recipe_of(self.layer, self.choice, self.takes, self.gives, self.shares)
        return replace(recipe, shares=self.around)


@dataclass
class _LayerAnswer:
    """The cheapest program of a layer between two forms; its link is built when a path uses it."""

    cost_s: float
    build: Callable[[], ChainLink]

    @cached_property
    def link(self) -> ChainLink:
        return self.build()


_Met = tuple[TensorForm, tuple[tuple[str, tuple[TensorForm, TensorForm]], ...]]


@dataclass
class ChainSearch:
    """Searches of one model's layers on the devices of one setting; templates are built once for all shares."""

    model: Model
    setting: ShardSetting
    byte_price_s: float = 0.0
    "Price of a byte held on a device: above 0 if memory is scarce."
    exposed: float = 1.0
    "The part of gradient reductions that counts; the rest overlaps the backward."
    streams: tuple[TensorForm, ...] = ()
    "The allowed forms of the outgoing hidden state; empty: any."
    tied_whole: bool = False
    "Whether parameters shared by layers stay replicated, because other device groups use them too."
    _templates: dict[tuple[str, Pinned], PricedLayer] = field(default_factory=dict)
    _priced: dict[object, PricedTemplate] = field(default_factory=dict)
    _solved: dict[object, Mapping[tuple[TensorForm, TensorForm], _LayerAnswer]] = field(default_factory=dict)
    _outgoing: dict[object, Mapping[TensorForm, _LayerAnswer]] = field(default_factory=dict)
    "Programs by the incoming form, the allowed outgoing forms, and the key of `_solved`."

    def search_programs(
        self, layers: Sequence[Layer], shares: Sequence[int], own: Sequence[DeviceShares] = ()
    ) -> tuple[ChainLink, ...]:
        """Return the cheapest programs of consecutive layers for these shares, or for the shares `own` of every layer.

        The first layer takes its hidden state and the last one returns it in the cheapest form. Raises PlanError if
        there is no program.
        """
        best: tuple[float, tuple[ChainLink, ...]] | None = None
        layer_shares = own or (tuple(shares),) * len(layers)
        for forms in self._tied_forms(layers):
            candidate = self._cheapest_path(layers, layer_shares, forms)
            if candidate is not None and (best is None or candidate[0] < best[0]):
                best = candidate
        if best is None:
            raise PlanError(
                "There is no program for these layers and shares.",
                where="shard program",
                seen=f"shares {':'.join(map(str, shares))}",
                next_step="make the shares more even",
            )
        return best[1]

    def layer_template(self, graph: Graph, takes: TensorForm, pinned: Pinned) -> PricedLayer:
        """Return the template of one layer."""
        forms = {name: form for name, form, _ in pinned}
        return price_layer(graph, self.setting, takes, forms, {name for name, _, counted in pinned if not counted})

    def _cheapest_path(
        self, layers: Sequence[Layer], shares: Sequence[DeviceShares], tied: Mapping[str, TensorForm]
    ) -> tuple[float, tuple[ChainLink, ...]] | None:
        """Return the cheapest path through the forms between layers; `tied` are the forms of shared parameters.

        The state is the form after a layer, and the program of every graph that occurred and will occur again.
        """
        first = self.model.layer_graph(layers[0])
        states: dict[_Met, tuple[float, tuple[_LayerAnswer, ...]]] = {
            (form, ()): (0.0, ()) for form in hidden_state_forms(first, True)
        }
        owners = {name: layer.graph for layer in reversed(layers) for name in layer.parameters.values()}
        comes_again = {layer.graph: index for index, layer in enumerate(layers)}
        for index, layer in enumerate(layers):
            pinned = tuple(
                (local, tied[name], owners[name] == layer.graph)
                for local, name in layer.parameters.items()
                if name in tied
            )
            after: dict[_Met, tuple[float, tuple[_LayerAnswer, ...]]] = {}
            for (form, met), (cost, path) in states.items():
                cost += resharing_s(self, layers, index, form, shares)
                if cost == float("inf"):
                    continue
                before = dict(met).get(layer.graph)
                if before is not None and before[0] != form:
                    continue
                for gives, answer in self._layer_programs(layer.graph, pinned, form, shares[index]).items():
                    if before is not None and before[1] != gives:
                        continue
                    new = met if before is not None else (*met, (layer.graph, (form, gives)))
                    state = gives, tuple(entry for entry in new if comes_again[entry[0]] > index)
                    if state not in after or cost + answer.cost_s < after[state][0]:
                        after[state] = cost + answer.cost_s, (*path, answer)
            states = after
        if not states:
            return None
        cost, path = min(states.values(), key=lambda entry: entry[0])
        return cost, tuple(answer.link for answer in path)

    def _layer_programs(
        self, name: str, pinned: Pinned, takes: TensorForm, shares: Sequence[int]
    ) -> Mapping[TensorForm, _LayerAnswer]:
        """Return the cheapest program of one layer for every outgoing form."""
        key = name, pinned, tuple(shares), self.byte_price_s, self.exposed
        outgoing_key = key, takes, self.streams
        if outgoing_key not in self._outgoing:
            if key not in self._solved:
                self._solved[key] = self._all_layer_programs(name, pinned, shares)
            able = self._output_forms(self.model.graphs[name])
            self._outgoing[outgoing_key] = {
                gives: answer
                for (input_form, gives), answer in self._solved[key].items()
                if input_form == takes and gives in able
            }
        return self._outgoing[outgoing_key]

    def _all_layer_programs(
        self, name: str, pinned: Pinned, shares: Sequence[int]
    ) -> Mapping[tuple[TensorForm, TensorForm], _LayerAnswer]:
        """Return the cheapest program of one layer for every pair of incoming and outgoing forms."""
        graph = self.model.graphs[name]
        if (name, pinned) not in self._templates:
            self._templates[name, pinned] = self.layer_template(graph, IDENTITY, pinned)
        layer = self._templates[name, pinned]
        template = layer.template
        fractions = held_fractions(template.cuts, shares, self.setting.axis_members)
        hidden_inputs = [tensor.name for tensor in graph.inputs if is_hidden_state(tensor)]
        takes = [
            form
            for form in hidden_state_forms(graph, True)
            if not hidden_inputs or layer.can_hand_on(hidden_inputs[0], form, fractions)
        ]
        gives = [
            form for form in hidden_state_forms(graph, False) if layer.can_hand_on(graph.outputs[0], form, fractions)
        ]
        if not takes or not gives:
            return {}
        layers = [layer.with_input_form(graph, form) for form in takes]
        result = layer.values.index(graph.outputs[0])
        priced_key = name, pinned, tuple(shares)
        if priced_key not in self._priced:
            self._priced[priced_key] = PricedTemplate(template, fractions)
        problem, numbers = self._priced[priced_key].problem_at(self.byte_price_s, self.exposed)
        solutions = solve_between(
            problem,
            [variant.template.given for variant in layers],
            [{**template.wanted, result: number_of(form)} for form in gives],
        )

        def build_link(first: int, second: int) -> ChainLink:
            solution = solutions[first, second].build_solution()
            return ChainLink(
                takes=takes[first],
                gives=gives[second],
                layer=layers[first],
                choice=choose_program(layers[first].template, numbers, solution),
                cost_s=solution.cost_s,
                shares=tuple(shares),
            )

        return {
            (takes[first], gives[second]): _LayerAnswer(pending.cost_s, partial(build_link, first, second))
            for (first, second), pending in solutions.items()
        }

    def _output_forms(self, graph: Graph) -> tuple[TensorForm, ...]:
        """Return the allowed outgoing forms of a layer."""
        forms = hidden_state_forms(graph, False)
        return tuple(form for form in forms if form in self.streams) if self.streams and len(forms) > 1 else forms

    def _tied_forms(self, layers: Sequence[Layer]) -> list[dict[str, TensorForm]]:
        """Return every assignment of forms to the parameters shared by several different layers."""
        uses: dict[str, list[Layer]] = {}
        for layer in layers:
            for name in layer.parameters.values():
                uses.setdefault(name, []).append(layer)
        shared = {name: readers for name, readers in uses.items() if len({layer.graph for layer in readers}) > 1}
        ranks = {}
        for name, readers in shared.items():
            local = next(local for local, parameter in readers[0].parameters.items() if parameter == name)
            ranks[name] = len(self.model.layer_graph(readers[0]).find_parameter(local).shape)
        split = () if self.tied_whole else range(max(ranks.values(), default=0))
        options = [
            [(name, form) for form in (IDENTITY, *(shard_form(dim) for dim in split if dim < rank))]
            for name, rank in ranks.items()
        ]
        return [dict(assignment) for assignment in itertools.product(*options)]


def resharing_s(
    chains: ChainSearch, layers: Sequence[Layer], place: int, form: TensorForm, shares: Sequence[DeviceShares]
) -> float:
    """Return the seconds to change the hidden state from the previous layer's shares to this layer's, forward and
    backward.

    The result is infinite if both layers occur several times: equal layers have one program, which cannot reshare.
    """
    if place == 0 or form.kind != "G" or shares[place - 1] == shares[place]:
        return 0.0
    used = Counter(layer.graph for layer in layers)
    if chains.setting.reshare_s is None or min(used[layers[place - 1].graph], used[layers[place].graph]) > 1:
        return float("inf")
    graph = chains.model.layer_graph(layers[place - 1])
    shape = next(tensor.shape for tensor in graph.tensors if tensor.name == graph.outputs[0])
    setting = chains.setting
    size = float(element_count(shape, setting.symbol_sizes) * COMPUTE_BYTES[setting.precision])
    old, new = shares[place - 1], shares[place]
    return chains.setting.reshare_s(size, old, new) + chains.setting.reshare_s(size, new, old)


def total_resharing_s(
    chains: ChainSearch, layers: Sequence[Layer], links: Sequence[ChainLink], shares: Sequence[DeviceShares]
) -> float:
    """Return the sum of `resharing_s` over all layers."""
    return fsum(resharing_s(chains, layers, index, link.takes, shares) for index, link in enumerate(links))


def with_shares(
    layers: Sequence[Layer], links: Sequence[ChainLink], shares: Sequence[DeviceShares], group: DeviceShares
) -> tuple[ChainLink, ...]:
    """Return these programs with their own shares.

    Of two neighbouring layers, the first reshares if it occurs once, else the second. An unsplit hidden state needs no
    resharing.
    """
    used = Counter(layer.graph for layer in layers)
    reshared = []
    for index, link in enumerate(links):
        before, layer_shares, after = shares[max(0, index - 1)], shares[index], shares[min(len(links) - 1, index + 1)]
        gives = after if used[layers[index].graph] == 1 and link.gives.kind == "G" else layer_shares
        takes = before if index and used[layers[index - 1].graph] > 1 and link.takes.kind == "G" else layer_shares
        around = () if {takes, layer_shares, gives} == {group} else (takes, layer_shares, gives)
        reshared.append(replace(link, shares=layer_shares, around=around))
    return tuple(reshared)


def hidden_state_forms(graph: Graph, incoming: bool) -> tuple[TensorForm, ...]:
    """Return the possible forms of a layer's hidden state, incoming or outgoing.

    It is replicated, or split along a dimension that all parts of a run cut equally: rows, tokens, or features in units
    of one.
    """
    tensors = {tensor.name: tensor for tensor in (*graph.inputs, *graph.tensors)}
    if incoming:
        hidden = [tensor for tensor in graph.inputs if tensor.role == "activation"]
    else:
        hidden = [tensors[graph.outputs[0]]]
    if not hidden or not is_hidden_state(hidden[0]):
        return (IDENTITY,)
    return (IDENTITY, *(shard_form(dim) for dim in range(len(hidden[0].shape))))
