"""The shard axis of the search space: how many devices split each layer, and by which programs.

The axis is free unless it is constrained. Its sizes fill every host with groups of adjacent devices, because a layer
that is split between hosts sends every hidden state over their links. `--fix shards=N` reaches every other size. Each
size has Megatron's programs, and programs that are searched for the model (`plan/assemble/shard_recipes.py`): one set
for each number of lanes that share the layers, because fewer lanes leave less memory for faster programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, inf

from pipefit.errors import PlanError
from pipefit.plan.assemble.shard_recipes import RecipeRequest, recipe_chains, searched_recipes
from pipefit.plan.cutting.cutter import LayerCutter
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import Sharding
from pipefit.plan.request.expert_parts import (
    EXPERT,
    TENSOR_SHARDING,
    program_key,
    row_parts,
    smallest_expert_count,
)
from pipefit.plan.request.sequence_length import fixed_length
from pipefit.plan.request.sliceable import check_slices
from pipefit.plan.types import Job
from pipefit.shard.chain import ChainSearch

FIXED_PROGRAMS: tuple[Sharding, ...] = ("megatron-sp", "megatron")
"""Programs that are written for any layer, without a search."""

ALL_STYLES_DEVICES = 64
"""On more devices only the first of `FIXED_PROGRAMS` is searched: it stores less than the second, and moves as many
bytes without recomputation. With selective recomputation it gathers once more, and the second may be faster."""

NEAR_LANES = 4
"""Programs that were found for some number of lanes are tried for up to this many times more or fewer."""


@dataclass(frozen=True, slots=True)
class ShardChoice:
    """A choice of the shard axis."""

    shares: tuple[int, ...]
    sharding: Sharding
    recipes: tuple[str, ...] = ()
    "Name of the recipe set of searched programs; empty: the unnamed set, or none."
    lanes: tuple[float, float] = (1, inf)
    "Smallest and largest number of lanes for which the choice is tried."
    expert: int = 1
    "Size of the expert axis."

    @property
    def program(self) -> tuple[str, tuple[int, ...]]:
        """(key of the layer programs in `ProgramCache`, shares)."""
        return program_key("/".join((self.sharding, *self.recipes)), self.expert), self.shares

    @property
    def row_parts(self) -> int:
        """Number of parts of the rows of a replica: of an expert axis, or of a shard axis that divides rows."""
        return row_parts(self.sharding, self.shares, self.expert)

    def fix_in(self, constraints: Constraints) -> Constraints:
        """Return the constraints with this choice fixed."""
        return replace(constraints, shards=self.shares, sharding=self.sharding, expert=self.expert)


def shard_choices(job: Job, constraints: Constraints, cutter: LayerCutter | None) -> Iterator[ShardChoice]:
    """Yield every choice of the shard axis that the constraints leave open. Without a cutter the only free choice is a
    single shard."""
    if constraints.shards is not None:
        yield from _fixed_choices(job, constraints, constraints.shards, cutter)
        return
    if constraints.sharding in (None, "none"):
        yield ShardChoice((1,), "none")
    for size in shard_sizes(constraints, cutter):
        assert cutter is not None, "sizes follow from the hosts"
        for choice in _choices_of_size(job, constraints, size, cutter):
            if _has_programs(job, constraints, choice, cutter):
                yield choice
    if cutter is not None and constraints.sharding is None:
        yield from (ShardChoice((1,) * size, EXPERT) for size in expert_sizes(constraints, cutter))
    if cutter is not None and constraints.sharding is None and constraints.expert is None:
        yield from _axis_choices(job, constraints, cutter)


def _axis_choices(job: Job, constraints: Constraints, cutter: LayerCutter) -> Iterator[ShardChoice]:
    """Yield tensor parallelism inside of hosts beside an expert axis. Both together have a size of expert parallelism
    that a search tries."""
    shard_counts = shard_sizes(constraints, cutter)
    for size in expert_sizes(constraints, cutter):
        for shards in shard_counts:
            choice = ShardChoice((1,) * shards, TENSOR_SHARDING, expert=size // shards)
            if size % shards == 0 and size > shards and _has_programs(job, constraints, choice, cutter):
                yield choice


def _fixed_choices(
    job: Job, constraints: Constraints, shards: tuple[int, ...], cutter: LayerCutter | None
) -> list[ShardChoice]:
    """Return the choices with these shards: one, or every set of searched programs."""
    style = fixed_style(shards, constraints)
    if style != "searched" or cutter is None or cutter.programs.has_unnamed_recipes:
        return [ShardChoice(shards, style, expert=constraints.expert_size)]
    names = recipe_sets(job, constraints, cutter, len(shards))
    return [ShardChoice(shards, style, (name,)) for name in names] or [ShardChoice(shards, style)]


def fixed_style(shards: tuple[int, ...], constraints: Constraints) -> Sharding:
    """Return the sharding of fixed shards: the constrained one, or the first that is searched."""
    return "none" if len(shards) == 1 else constraints.sharding or FIXED_PROGRAMS[0]


def _choices_of_size(job: Job, constraints: Constraints, size: int, cutter: LayerCutter) -> Iterator[ShardChoice]:
    """Yield the programs over `size` devices of a host that the constraints leave open."""
    shares = (1,) * size
    if constraints.sharding is not None:
        yield ShardChoice(shares, constraints.sharding)
        return
    styles = FIXED_PROGRAMS if cutter.network.devices <= ALL_STYLES_DEVICES else FIXED_PROGRAMS[:1]
    yield from (ShardChoice(shares, style) for style in styles)
    for name, lanes in recipe_sets(job, constraints, cutter, size).items():
        yield ShardChoice(shares, "searched", (name,), (min(lanes) / NEAR_LANES, max(lanes) * NEAR_LANES))


def shard_sizes(constraints: Constraints, cutter: LayerCutter | None) -> list[int]:
    """Return the sizes of the shard axis above one that a search tries: divisors of the devices of every host."""
    if constraints.shards is not None:
        return [len(constraints.shards)] if len(constraints.shards) > 1 else []
    searched = constraints.mapping in (None, "search", "hostname") and constraints.sharding != "none"
    if cutter is None or not searched or fixed_length(cutter.programs.model) is not None:
        return []
    common = gcd(*(host.devices for host in cutter.network.cluster.hosts))
    return [size for size in range(2, common + 1) if cutter.fleet.fills_hosts(size)]


def expert_sizes(constraints: Constraints, cutter: LayerCutter) -> list[int]:
    """Return the sizes of expert parallelism that a search tries: divisors of the number of experts that divide the
    devices of every host, or are whole hosts. None on unlike devices."""
    searched = constraints.mapping in (None, "search", "hostname") and not constraints.state_group
    experts = smallest_expert_count(cutter.programs.model) if searched and not cutter.fleet.is_mixed else 0
    common = gcd(*(host.devices for host in cutter.network.cluster.hosts))
    limit = min(constraints.devices or cutter.network.devices, cutter.network.devices)
    sizes = [size for size in range(2, min(experts, limit) + 1) if experts % size == 0]
    return [size for size in sizes if (common % size == 0 or size % common == 0) and limit % size == 0]


def recipe_sets(job: Job, constraints: Constraints, cutter: LayerCutter, size: int) -> dict[str, list[int]]:
    """Return the searched programs for groups of `size` equal devices: name of a set -> numbers of lanes for which it
    was found."""
    programs, network = cutter.programs, cutter.network
    if cutter.fleet.is_mixed or cutter.fleet.context_parts > 1:
        return {}
    lanes_of_set: dict[str, list[int]] = {}
    chains: ChainSearch | None = None
    layers = len(programs.modules[cutter.module].layers)
    lanes = min(layers, network.devices // (size * constraints.replica_count))
    while lanes >= 1:
        request = RecipeRequest(
            shares=(1,) * size,
            devices=tuple(range(size)),
            rows=1,
            microbatches=constraints.microbatches or max(1, job.batch // constraints.replica_count),
            lanes=min(lanes, constraints.stage_count or lanes),
        )
        key = (job, request)
        if key not in cutter.recipe_names:
            chains = chains or recipe_chains(programs.model, network, cutter.layers, job, request)
            try:
                recipes = searched_recipes(chains, programs.modules[cutter.module], request)
            except PlanError:
                return {}
            cutter.recipe_names[key] = programs.add_recipes(recipes)
        lanes_of_set.setdefault(cutter.recipe_names[key], []).append(lanes)
        lanes //= 2
    return lanes_of_set


def _has_programs(job: Job, constraints: Constraints, choice: ShardChoice, cutter: LayerCutter) -> bool:
    """Return whether every layer has its program, with even shares and one form of every parameter."""
    slices = constraints.slices if isinstance(constraints.slices, tuple) else ()
    layers = cutter.programs.modules[cutter.module].layers
    try:
        check_slices(slices, job.sequence // constraints.context_size, choice.shares, choice.sharding)
        programs = [cutter.programs.layer_program(layer, *choice.program) for layer in layers]
    except PlanError:
        return False
    forms: dict[str, object] = {}
    stored_alike = all(
        forms.setdefault(layer.parameters[name], form) == form
        for layer, program in zip(layers, programs, strict=True)
        for name, form in program.parameters.items()
    )
    return stored_alike and all(program.shares in ((), choice.shares) for program in programs)
