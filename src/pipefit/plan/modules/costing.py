"""Profiles of the modules of a captured model, from the same cost models as all other plans.

Every layer is costed for one and for two average samples; the part that does not grow counts as fixed. A frozen layer
has no weight gradient (the graphs say so), and no backward at all if no layer before it is trained either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import stage_overhead_s
from pipefit.cost.compute.packed_rows import with_equal_rows
from pipefit.cost.compute.roofline import LayerCost, LayerCosts
from pipefit.cost.pipeline.table import ACTION_OVERHEAD_S, layer_costs
from pipefit.cost.static_memory import GRADIENT_BYTES, WORKSPACE_BYTES, static_parts
from pipefit.cost.types import Array
from pipefit.cost.work import ParameterCounts, StageWork
from pipefit.errors import PlanError
from pipefit.layout import Mesh, MeshAxis, TensorForm
from pipefit.model.analysis.saved import Recompute
from pipefit.model.graph import ModelModule
from pipefit.optimizers import find_optimizer
from pipefit.plan.assemble.packed_rows import CONDITIONS, frozen_layers
from pipefit.plan.assemble.shard_programs import LayerProgram, ProgramCache
from pipefit.plan.assemble.structure import can_transfer
from pipefit.plan.modules.profile import ModuleProfile, ModuleVariant
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig, Sharding
from pipefit.plan.request.sampled_batches import SampledBatches
from pipefit.plan.types import Job, SampleLoad

SHARDINGS: tuple[Sharding, ...] = ("megatron-sp", "megatron")
"""Programs over a shard axis, in order of preference."""

UNSHARDED_STYLES: tuple[Sharding, ...] = ("none",)

MODULE_RECOMPUTES: tuple[Recompute, ...] = ("none", "full")

NO_PARAMETERS = ParameterCounts(trainable=(0,), frozen=(0,), whole=(0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedVariant:
    """The choices behind a variant of a module's profile."""

    sharding: Sharding
    shards: int
    recompute: Recompute
    takes: TensorForm
    gives: TensorForm
    load: SampleLoad
    "Load of all layers together."

    def matches_decisions(self, own: ParallelConfig) -> bool:
        """Return whether a module with these decisions runs this variant."""
        return (self.shards, self.recompute) == (len(own.shards), own.recompute[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedModule:
    """A module's profile with the choices behind its variants."""

    profile: ModuleProfile
    ways: tuple[CostedVariant, ...]


class ModuleCosting:
    """Builds profiles of modules for one network, job and set of samples."""

    def __init__(
        self, programs: ProgramCache, network: Network, layers: LayerCosts, job: Job, samples: SampledBatches
    ) -> None:
        self.programs, self.network, self.layers, self.job, self.samples = programs, network, layers, job, samples
        self.frozen = frozen_layers(programs.model)
        self.means = {name: float(table.mean()) for name, table in samples.tokens.items()}

    def profile_module(self, module: ModelModule, constraints: Constraints) -> CostedModule:
        """Return the profile of a module, in the variants its constraints allow. Raises PlanError if there are none."""
        variants, meant = [], []
        for sharding, shards, programs in self._layer_programs(module, constraints):
            for recompute in [constraints.recompute[0]] if constraints.recompute is not None else MODULE_RECOMPUTES:
                layer_costs_by_samples = [
                    self._layer_costs(module, programs, shards, recompute, samples) for samples in (1, 2)
                ]
                variants.append(self._build_variant(module, sharding, shards, recompute, layer_costs_by_samples))
                meant.append(
                    CostedVariant(
                        sharding=sharding,
                        shards=shards,
                        recompute=recompute,
                        takes=programs[0].takes,
                        gives=programs[-1].gives,
                        load=self._sample_load(module, programs, shards, recompute, layer_costs_by_samples[0]),
                    )
                )
        if not variants:
            raise PlanError(
                "A module cannot be split over this many shards.",
                where=f"--fix {module.name}.shards",
                seen=len(constraints.shards or ()),
                next_step="fix fewer shards, or none",
            )
        profile = ModuleProfile(
            name=module.name,
            ways=tuple(variants),
            weights=self._sample_weights(module, meant[0].load),
            overhead_s=2 * (ACTION_OVERHEAD_S + stage_overhead_s(self.network.cluster)),
            reduce_s_per_byte=self.network.ring_time([(0, self.network.devices - 1)]).s_per_byte,
            workspace_bytes=float(WORKSPACE_BYTES),
            parts=self.samples.images_per_sample(module.space) if constraints.divide == "images" else 0.0,
        )
        return CostedModule(profile=profile, ways=tuple(meant))

    def _layer_programs(
        self, module: ModelModule, constraints: Constraints
    ) -> Iterator[tuple[Sharding, int, list[LayerProgram]]]:
        """Yield (sharding, shards, program of every layer) for one shard and every power of two up to a host's
        devices."""
        host_devices = max(host.devices for host in self.network.cluster.hosts)
        counts = [1 << n for n in range(host_devices.bit_length())]
        counts = counts if constraints.shards is None else [constraints.shard_count]
        for count in counts:
            for sharding in SHARDINGS if count > 1 else UNSHARDED_STYLES:
                try:
                    programs = [self.programs.layer_program(layer, sharding, (1,) * count) for layer in module.layers]
                except PlanError:
                    continue
                if _tied_forms_equal(module, programs):
                    yield sharding, count, programs
                    break

    def _layer_costs(
        self,
        module: ModelModule,
        programs: Sequence[LayerProgram],
        shards: int,
        recompute: Recompute,
        samples: int,
        squared: float = 1.0,
    ) -> list[LayerCost]:
        """Return the cost of every layer with `samples` average samples, on the slowest kind of device.

        `squared` scales the sum of squared lengths, which attention within images depends on.
        """
        costs_by_kind = []
        for first in self._first_devices(shards):
            group = Mesh(
                axes=(MeshAxis(name="replica", shares=(1,)), MeshAxis(name="shard", shares=(1,) * shards)),
                devices=tuple(range(first, first + shards)),
            )
            stage = StageWork(
                lane=0,
                group=group,
                layers=tuple(program.graphs for program in programs),
                rows=(samples,),
                slices=(self.job.sequence,),
                recompute=recompute,
                parameters=NO_PARAMETERS,
                sharded_state="none",
                symbols=tuple(
                    (symbol, round(samples * self.means[name]))
                    for symbol, name in CONDITIONS.items()
                    if name in self.means
                ),
                frozen=self.frozen[module.name],
            )
            if module.space in self.means:
                squares = float(self.samples.squares[module.space].mean())
                stage = with_equal_rows(
                    stage, round(samples * self.means[module.space]), round(samples * squares * squared)
                )
            costs_by_kind.append(layer_costs(stage, self.job.precision, self.network, self.layers)[""])
        return max(costs_by_kind, key=lambda costs: fsum(cost.forward_s for cost in costs))

    def _first_devices(self, shards: int) -> list[int]:
        """Return the first device of a host of every kind that has at least `shards` devices."""
        first_devices: dict[str, int] = {}
        first = 0
        for host in self.network.cluster.hosts:
            if host.devices >= shards:
                first_devices.setdefault(host.kind, first)
            first += host.devices
        return list(first_devices.values())

    def _build_variant(
        self,
        module: ModelModule,
        sharding: Sharding,
        shards: int,
        recompute: Recompute,
        each: Sequence[list[LayerCost]],
    ) -> ModuleVariant:
        one_s, two_s = (np.array([cost.forward_s + cost.backward_s for cost in costs]) for costs in each)
        sample_s = np.maximum(two_s - one_s, 0.0)
        counts = [self.programs.parameter_counts([layer], sharding, (1,) * shards, self.job) for layer in module.layers]
        precision, optimizer = self.job.precision, find_optimizer(self.job.optimizer)
        parts = [static_parts(max(entry.trainable), max(entry.frozen), 1.0, precision, optimizer) for entry in counts]
        shared_bytes = np.array([entry.shared_state_bytes for entry in counts])
        return ModuleVariant(
            shards=shards,
            recompute=recompute,
            fixed_s=np.maximum(one_s - sample_s, 0.0),
            sample_s=sample_s,
            static_bytes=np.array([entry["parameters"] + entry["gradients"] for entry in parts]) + shared_bytes,
            state_bytes=np.array([entry["optimizer"] for entry in parts]),
            saved_bytes=np.array([float(cost.saved_bytes) for cost in each[0]]),
            passing_bytes=np.array([_transient_bytes(cost) for cost in each[0]]),
            gradient_bytes=np.array([float(max(entry.trainable) * GRADIENT_BYTES[precision]) for entry in counts]),
        )

    def _sample_load(
        self,
        module: ModelModule,
        programs: Sequence[LayerProgram],
        shards: int,
        recompute: Recompute,
        one: Sequence[LayerCost],
    ) -> SampleLoad:
        """Return the cost of samples on the module: in packed rows attention within images costs by squares, the rest
        by tokens."""
        forward_s = fsum(cost.forward_s for cost in one)
        backward = fsum(cost.backward_s for cost in one) / forward_s if forward_s else 0.0
        if module.space not in self.means:
            return SampleLoad(space=module.space, row_s=forward_s, backward=backward)
        half_s = fsum(cost.forward_s for cost in self._layer_costs(module, programs, shards, recompute, 1, 0.5))
        by_squares_s = min(forward_s, max(0.0, 2 * (forward_s - half_s)))
        return SampleLoad(
            space=module.space,
            token_s=(forward_s - by_squares_s) / max(1.0, self.means[module.space]),
            square_s=by_squares_s / max(1.0, float(self.samples.squares[module.space].mean())),
            backward=backward,
        )

    def _sample_weights(self, module: ModelModule, load: SampleLoad) -> Array:
        """[sampled batch, sample]: cost of each sample relative to an average one."""
        if module.space not in self.means:
            return np.ones((1, 0))
        tokens, squares = self.samples.tokens[module.space], self.samples.squares[module.space]
        cost: Array = load.token_s * tokens + load.square_s * squares
        return cost / cost.mean() if cost.any() else np.ones((1, 0))


def _tied_forms_equal(module: ModelModule, programs: Sequence[LayerProgram]) -> bool:
    """Return whether layers that use the same parameter store it in the same form."""
    forms: dict[str, str] = {}
    for layer, program in zip(module.layers, programs, strict=True):
        for name, form in program.parameters.items():
            if forms.setdefault(layer.parameters[name], str(form)) != str(form):
                return False
    return True


def _transient_bytes(cost: LayerCost) -> float:
    """Return the memory of a layer while it runs, besides the activations kept from its forward to its backward."""
    worst = cost.passing
    return 0.0 if worst is None else max(0.0, max(worst.forward, worst.fused_last) - cost.saved_bytes)


def can_pass_hidden(before: CostedModule, behind: CostedModule) -> NDArray[np.bool_]:
    """[variant of one module, variant of the next]: whether the hidden state can go from one to the next."""
    return np.array(
        [
            [can_transfer((giver.gives, giver.shards), (taker.takes, taker.shards)) for taker in behind.ways]
            for giver in before.ways
        ]
    )
