"""The programs of a model's layers over a shard axis: one graph per layer and position, each distinct graph once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import fsum, prod
from typing import NamedTuple

from pipefit.codec import content_digest
from pipefit.cost.static_memory import shared_state_bytes
from pipefit.cost.work import ParameterCounts
from pipefit.errors import PlanError
from pipefit.layout import Mesh, TensorForm, split_by_shares
from pipefit.model.graph import Graph, Layer, Model, ModelModule
from pipefit.model.ops.linear_factors import reduced_nowhere
from pipefit.optimizers import find_optimizer
from pipefit.plan.request.expert_parts import EXPERT, parts_of_key, program_key, splits_rows
from pipefit.plan.types import Job, MeshPlan, Stage
from pipefit.shard.program import ShardedGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProgram:
    """The graphs that the devices of a shard axis run for one layer."""

    graphs: tuple[Graph, ...]
    "One per position of the shard axis; a single entry without sharding."
    hash: str
    "Digest of all graphs."
    parameters: Mapping[str, TensorForm]
    "Local parameter name -> form along the shard axis."
    takes: TensorForm
    "Form of the hidden state along the shard axis at the layer's input."
    gives: TensorForm
    "Form at its output."
    shares: tuple[int, ...] = ()
    "Shares along the shard axis; empty without sharding."
    taken_shares: tuple[int, ...] = ()
    "Shares by which the input hidden state is sharded."
    given_shares: tuple[int, ...] = ()
    "Shares by which the output hidden state is sharded."
    expert_forms: Mapping[str, TensorForm] = field(default_factory=dict)
    "Local name -> form along the expert axis, for the parameters that it divides. The graphs hold one position's part."
    expert_parts: int = 1
    "Size of the expert axis."


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """Storage of one parameter on the devices of a stage."""

    elements: tuple[int, ...]
    "Elements per shard position."
    trainable: bool
    whole: bool
    "True if every position stores all of it, and its gradient is summed over them."
    shape: tuple[int, ...]
    "Global shape."
    spread: bool = False
    """True if devices that divide rows and experts with each other hold all of it. Its gradient and state are summed
    and sharded over them, too."""


class ShardedCounts(NamedTuple):
    """The elements of layers whose gradients or values the replicas may shard, as in `StageWork`."""

    elements: tuple[tuple[int, ...], ...] = ()
    "[layer][position of the shard axis]."
    spread: tuple[int, ...] = ()
    "[layer]: the ones replicated over the axis that divides rows and experts."
    frozen: tuple[tuple[int, ...], ...] = ()
    "[layer][position of the shard axis]: frozen elements, whose values replicas may shard; () without any."
    frozen_spread: tuple[int, ...] = ()


class ProgramCache:
    """The layer programs of a model under every requested sharding, each built once."""

    def __init__(self, model: Model, recipes: Mapping[str, str] | None = None) -> None:
        """Start with the recipes of searched shardings, as a plan stores them."""
        self.model = model
        self.recipes: dict[str, str] = dict(recipes or {})
        self.modules: Mapping[str, ModelModule] = {module.name: module for module in model.modules}
        self._programs: dict[tuple[str, str, tuple[int, ...]], LayerProgram] = {}
        self._split_graphs: dict[frozenset[int], frozenset[str]] = {}
        "Sizes of vocabularies with too few words -> the graphs whose vocabulary is split nonetheless."
        self._uses: dict[str, Counter[str]] = {}
        self._counts: dict[tuple[str, str, tuple[int, ...]], Mapping[str, StoredParameter]] = {}

    @property
    def has_unnamed_recipes(self) -> bool:
        """Return whether there is a set without a name, which `searched` alone means."""
        return any("/" not in key for key in self.recipes)

    def add_recipes(self, recipes: Mapping[str, str]) -> str:
        """Add a set of recipes, by graph. Returns its name, a digest of its contents."""
        name = content_digest(dict(sorted(recipes.items())))[:8]
        self.recipes.update({f"{name}/{graph}": text for graph, text in recipes.items()})
        return name

    def recipes_in(self, names: Collection[str]) -> dict[str, str]:
        """Return the recipes of the sets with these names."""
        return {key: text for key, text in self.recipes.items() if key.rpartition("/")[0] in names}

    def layer_program(self, layer: Layer, sharding: str, shares: tuple[int, ...]) -> LayerProgram:
        """Return the program of a layer. `shares` are those of the shard axis; `sharding` is a sharding of plans,
        `searched/NAME` for a named recipe set, or `megatron-sp/ep4` beside an expert axis.

        Raises PlanError if the sharding is impossible (heads or sizes that the shares do not divide).
        """
        key = (layer.graph, sharding, shares)
        if key not in self._programs:
            graph = self.model.graphs[layer.graph]
            if len(shares) == 1:
                self._programs[key] = _replicated_program(graph)
            elif sharding.partition("/")[0] == "searched":
                self._programs[key] = _searched_program(
                    graph, shares, self._recipe_for(layer, sharding.partition("/")[2])
                )
            elif sharding == EXPERT:
                self._programs[key] = _expert_program(graph, shares)
            elif (parts := parts_of_key(sharding)) > 1:
                self._programs[key] = _expert_axis_program(
                    graph, shares, parts, layer.graph in self.vocabulary_graphs(shares)
                )
            else:
                self._programs[key] = _megatron_program(
                    graph, shares, sharding == "megatron-sp", layer.graph in self.vocabulary_graphs(shares)
                )
        return self._programs[key]

    def vocabulary_graphs(self, shares: tuple[int, ...]) -> frozenset[str]:
        """Return the graphs whose vocabulary Megatron's programs split over these shares."""
        from pipefit.shard.vocabulary import LayerUse, vocabulary_graphs

        undivided = frozenset(
            size for size in self._vocabularies if any(a == b for a, b in split_by_shares(size, shares))
        )
        if undivided not in self._split_graphs:
            graphs = self.model.graphs
            self._split_graphs[undivided] = vocabulary_graphs(
                [
                    [LayerUse(layer.graph, graphs[layer.graph], layer.parameters) for layer in module.layers]
                    for module in self.model.modules
                ],
                undivided,
            )
        return self._split_graphs[undivided]

    @cached_property
    def _vocabularies(self) -> frozenset[int]:
        """The numbers of words of all token tables and logits."""
        from pipefit.shard.vocabulary import layer_vocabularies

        sizes = {size for graph in self.model.graphs.values() for size in layer_vocabularies(graph)}
        return frozenset(size for size in sizes if isinstance(size, int))

    def _recipe_for(self, layer: Layer, name: str) -> str:
        key = f"{name}/{layer.graph}" if name else layer.graph
        if key not in self.recipes:
            raise PlanError(
                "The plan has no recipe for a layer whose sharding was searched.",
                where=f"recipes, layer {layer.name!r}",
                seen=", ".join(self.recipes) or "none",
                allowed=f"one for the graph {layer.graph!r}" + (f" in the set {name!r}" if name else ""),
                next_step="make the plan again: pipefit plan ... --fix sharding=searched",
            )
        return self.recipes[key]

    def module_layers(self, module: str, run: tuple[int, int]) -> tuple[Layer, ...]:
        """Return layers [start, stop) of a module. Raises PlanError if the model has no such module."""
        if module not in self.modules:
            raise PlanError(
                "The model has no such module.", where="stages", seen=module, allowed=", ".join(self.modules)
            )
        return self.modules[module].layers[run[0] : run[1]]

    def named_parameters(
        self, layers: Sequence[Layer], sharding: str, shares: tuple[int, ...]
    ) -> Mapping[str, StoredParameter]:
        """Return the parameters of these layers by global name; a tensor shared by two layers occurs once."""
        named: dict[str, StoredParameter] = {}
        for layer in layers:
            key = (layer.graph, sharding, shares)
            if key not in self._counts:
                self._counts[key] = _stored_parameters(self.layer_program(layer, sharding, shares), sharding)
            for local, count in self._counts[key].items():
                named[layer.parameters[local]] = count
        return named

    def layer_uses(self, module: str) -> Mapping[str, int]:
        """Return the number of layers of a module that use each parameter."""
        if module not in self._uses:
            self._uses[module] = Counter(
                name for layer in self.modules[module].layers for name in layer.parameters.values()
            )
        return self._uses[module]

    def sharded_counts(
        self, module: str, layers: Sequence[Layer], sharding: str, shares: tuple[int, ...]
    ) -> ShardedCounts:
        """Return the counts of layers of a module whose replicas shard gradients."""
        named = [self.named_parameters((layer,), sharding, shares) for layer in layers]
        uses, count = self.layer_uses(module), len(shares)
        spread = [{name: stored for name, stored in layer.items() if stored.spread} for layer in named]
        elements, frozen = (sharded_elements(named, uses, count, trained) for trained in (True, False))
        has_frozen = any(map(any, frozen))
        return ShardedCounts(
            elements,
            tuple(max(counts) for counts in sharded_elements(spread, uses, count)),
            frozen if has_frozen else (),
            tuple(max(counts) for counts in sharded_elements(spread, uses, count, False)) if has_frozen else (),
        )

    def parameter_counts(
        self, layers: Sequence[Layer], sharding: str, shares: tuple[int, ...], job: Job | None = None
    ) -> ParameterCounts:
        """Return the elements that the devices of a stage with these layers store.

        With a job, the bytes of its optimizer's state that is not sharded are included.
        """
        return count_parameters(self.named_parameters(layers, sharding, shares).values(), len(shares), job)


def sharded_elements(
    layers: Sequence[Mapping[str, StoredParameter]], uses: Mapping[str, int], num_shards: int, trained: bool = True
) -> tuple[tuple[int, ...], ...]:
    """Return [layer][position of the shard axis]: the trained, or the frozen, elements that only this layer uses.
    `layers` holds the parameters of each layer, `uses` the number of layers of the module that use a parameter."""
    alone = [[p for name, p in named.items() if p.trainable == trained and uses[name] == 1] for named in layers]
    return tuple(tuple(sum(p.elements[shard] for p in layer) for shard in range(num_shards)) for layer in alone)


def count_parameters(stored: Collection[StoredParameter], num_shards: int, job: Job | None = None) -> ParameterCounts:
    """Return the sums of `ProgramCache.parameter_counts` over these parameters."""
    places = range(num_shards)
    return ParameterCounts(
        trainable=tuple(sum(c.elements[p] for c in stored if c.trainable) for p in places),
        frozen=tuple(sum(c.elements[p] for c in stored if not c.trainable) for p in places),
        whole=tuple(sum(c.elements[p] for c in stored if c.trainable and c.whole) for p in places),
        spread=tuple(sum(c.elements[p] for c in stored if c.trainable and c.spread) for p in places),
        shared_state_bytes=kept_state_bytes(stored, job) if job else 0.0,
    )


def kept_state_bytes(stored: Iterable[StoredParameter], job: Job) -> float:
    """Return the bytes of optimizer state that every device with a part of these parameters keeps."""
    optimizer = find_optimizer(job.optimizer)
    return fsum(shared_state_bytes(optimizer, p.shape, job.precision, p.trainable) for p in stored)


def whole_shape(program: LayerProgram, name: str) -> tuple[int, ...]:
    """Return the global shape: the sum of the local sizes along the sharded dimension, times the size of an expert
    axis along the one that it divides."""
    shape = list(program.graphs[0].find_parameter(name).shape)
    form, outer = program.parameters[name], program.expert_forms.get(name)
    if form.kind == "G" and form.dim is not None:
        shape[form.dim] = sum(graph.find_parameter(name).shape[form.dim] for graph in program.graphs)
    if outer is not None and outer.dim is not None:
        shape[outer.dim] *= program.expert_parts
    return tuple(shape)


def sharding_key(stage: Stage, group: Mesh | MeshPlan | None) -> str:
    """Return the sharding of a stage as a key of `ProgramCache`, with the name of its recipe set or the size of the
    expert axis of its mesh, if it has one. None: a mesh without that axis."""
    if stage.recipes:
        return f"{stage.sharding}/{stage.recipes}"
    axes = group.axes if group is not None else ()
    return program_key(stage.sharding, next((len(axis.shares) for axis in axes if axis.name == "expert"), 1))


def program_hash(programs: Sequence[LayerProgram]) -> str:
    """Return the digest of a stage's programs in layer order: ranks with equal digests run the same programs."""
    return content_digest([program.hash for program in programs])


def _stored_parameters(program: LayerProgram, sharding: str) -> Mapping[str, StoredParameter]:
    alike = reduced_nowhere(program.graphs[0])

    def is_whole(name: str) -> bool:
        return program.parameters[name].kind == "I" and name not in alike

    def is_spread(name: str) -> bool:
        return (
            is_whole(name) if splits_rows(sharding) else program.expert_parts > 1 and name not in program.expert_forms
        )

    return {
        spec.name: StoredParameter(
            elements=tuple(prod(graph.find_parameter(spec.name).shape) for graph in program.graphs),
            trainable=spec.trainable,
            whole=is_whole(spec.name),
            shape=whole_shape(program, spec.name),
            spread=is_spread(spec.name),
        )
        for spec in program.graphs[0].parameters
    }


def _replicated_program(graph: Graph) -> LayerProgram:
    replicated = TensorForm("I")
    forms = {parameter.name: replicated for parameter in graph.parameters}
    return LayerProgram(graphs=(graph,), hash=graph.hash, parameters=forms, takes=replicated, gives=replicated)


def _megatron_program(
    graph: Graph, shares: tuple[int, ...], sequence_parallel: bool, split_vocabulary: bool
) -> LayerProgram:
    from pipefit.shard.megatron import shard_program

    return _to_layer_program(shard_program(graph, shares, sequence_parallel, split_vocabulary))


def _expert_program(graph: Graph, shares: tuple[int, ...]) -> LayerProgram:
    from pipefit.shard.experts import expert_program

    return _to_layer_program(expert_program(graph, shares))


def _expert_axis_program(graph: Graph, shares: tuple[int, ...], parts: int, split_vocabulary: bool) -> LayerProgram:
    from pipefit.shard.experts import divide_experts

    one_part, forms = divide_experts(graph, parts, shares)
    program = _megatron_program(one_part, shares, True, split_vocabulary)
    return replace(program, expert_forms=forms, expert_parts=parts)


def _searched_program(graph: Graph, shares: tuple[int, ...], recipe: str) -> LayerProgram:
    from pipefit.shard.recipe import parse_recipe, write_program

    return _to_layer_program(write_program(graph, shares, parse_recipe(recipe)))


def _to_layer_program(sharded: ShardedGraph) -> LayerProgram:
    return LayerProgram(
        graphs=tuple(sharded.graphs),
        hash=content_digest([part.hash for part in sharded.graphs]),
        parameters=dict(sharded.parameter_forms),
        takes=sharded.input_form,
        gives=sharded.output_form,
        shares=sharded.shares,
        taken_shares=sharded.taken_shares,
        given_shares=sharded.given_shares,
    )


def layer_shares(programs: Sequence[LayerProgram], shares: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the shares of every layer of a stage; empty if all have the mesh's."""
    shares_by_layer = tuple(program.shares or shares for program in programs)
    return () if {*shares_by_layer} <= {shares} else shares_by_layer


def check_layer_shares(programs: Sequence[LayerProgram], shares: tuple[int, ...], where: str) -> None:
    """Raise PlanError if a layer takes a hidden state sharded by other shares than the layer before returns. Both ends
    of a stage use the mesh's shares."""
    incoming = shares
    for index, program in enumerate(programs if len(shares) > 1 else ()):
        before = programs[index - 1].gives if index else program.takes
        if program.takes.kind == before.kind == "G" and program.taken_shares != incoming:
            raise _share_mismatch(f"{where}, layer {index} of the stage", program.taken_shares, incoming)
        incoming = program.given_shares
    if programs and len(shares) > 1 and programs[-1].gives.kind == "G" and incoming != shares:
        raise _share_mismatch(f"{where}, its end", incoming, shares)


def _share_mismatch(where: str, seen: Sequence[int], allowed: Sequence[int]) -> PlanError:
    return PlanError(
        "A layer takes the hidden state by other shares than those it is sharded by.",
        where=where,
        seen=":".join(map(str, seen)),
        allowed=":".join(map(str, allowed)),
        next_step="make the plan again: pipefit plan ... --fix sharding=searched",
    )
