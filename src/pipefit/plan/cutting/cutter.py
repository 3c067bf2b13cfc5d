"""Cuts of a chain of layers into stages: the exact partition, over the costs of every layer on every stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from pipefit.cost.comm.network import Network
from pipefit.cost.compute.roofline import LayerCosts
from pipefit.cost.memory.lanes import stage_holdings
from pipefit.cost.pipeline.state_traffic import largest_pair
from pipefit.cost.pipeline.table import layer_costs
from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES, WORKSPACE_BYTES, state_bytes
from pipefit.cost.types import Array
from pipefit.cost.work import COMPLETE_STATE, ParameterCounts, StageWork, StateShare, state_share
from pipefit.layout import Mesh, split_by_shares
from pipefit.model.analysis.saved import Recompute
from pipefit.optimizers import find_optimizer
from pipefit.optimizers.sharded_state import ShardedState, shards_gradients, shards_optimizer, shards_parameters
from pipefit.plan.assemble.packed_rows import frozen_layers
from pipefit.plan.assemble.shard_programs import (
    ProgramCache,
    ShardedCounts,
    StoredParameter,
    count_parameters,
    kept_state_bytes,
    layer_shares,
)
from pipefit.plan.assemble.structure import make_groups
from pipefit.plan.cutting.layer_cut import (
    Balance,
    LayerCut,
    best_cut,
    lanes_in_flight,
    leanest_bounds,
    measure_cut,
    stages_in_flight,
)
from pipefit.plan.cutting.rows import (
    LayerRow,
    kind_rows,
    most_bytes,
    passing_bytes,
)
from pipefit.plan.devices.device_kinds import DeviceKinds
from pipefit.plan.devices.fleet import DeviceFleet, KindRows
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.expert_parts import parts_of_key, program_row_parts, splits_rows
from pipefit.plan.types import Job

ShardProgram = tuple[str, tuple[int, ...]]
"""(key of the layer programs in `ProgramCache`, shares of the shard axis)."""

UNSHARDED: ShardProgram = ("none", (1,))


class LayerCutter:
    """Cuts of one module on one cluster. The costs of layers on a kind of stage are computed once."""

    def __init__(
        self, programs: ProgramCache, module: str, network: Network, layers: LayerCosts, context_parts: int = 1
    ) -> None:
        """`context_parts`: number of devices that hold parts of each sequence."""
        self.programs = programs
        self.module = module
        self.network = network
        self.layers = layers
        self.fleet = DeviceFleet(network, context_parts)
        self.slicers: dict[object, Any] = {}
        "Sequence slicers of searches on these costs: see `plan/candidates/slicings.py`, which needs a cutter."
        self.recipe_names: dict[object, str] = {}
        "Names of searched recipe sets by their requests: see `plan/candidates/shard_choices.py`."
        self._rows: dict[object, LayerRow] = {}
        self._plain: dict[object, LayerRow] = {}
        self._counted: dict[object, tuple[Array, Array]] = {}
        self._sharded: dict[object, ShardedCounts] = {}
        self._sharded_arrays: dict[object, Array] = {}
        self._parameters: dict[object, ParameterCounts] = {}
        self._spread: dict[object, tuple[Array, Array]] = {}
        self._shared_state: dict[object, Array] = {}
        self._cuts: dict[object, LayerCut | None] = {}
        self._balances: dict[object, Balance] = {}
        self._least: dict[tuple[int, ...], tuple[float, float, float]] = {}

    def cut_layers(self, job: Job, decisions: ParallelConfig, spare_bytes: Sequence[float] = ()) -> LayerCut | None:
        """Return the cut that makes the slowest stage as fast as possible within memory, or the fixed cut; None if no
        cut fits.

        If lanes hold several stages, a cut with a less busy lane (`plan/cutting/balance.py`) is preferred if it fits.
        Memory is the closed form, a lower bound: the simulator may still find that the plan does not fit. `spare_bytes`
        of every lane, if set, are reserved on top of the closed form.
        """
        rows = self.stage_rows(job, decisions)
        held = lanes_in_flight(decisions)
        placement = decisions.lane_of_stage
        key = (tuple(map(id, rows)), held, placement, decisions.cuts, tuple(spare_bytes))
        if key not in self._cuts:
            lean = rows
            if spare_bytes:
                stage_spare = [spare_bytes[lane] for lane in placement]
                lean = [row.with_less_memory(spare) for row, spare in zip(rows, stage_spare, strict=True)]
            cut = best_cut(lean, held, placement, decisions.cuts, self._balances)
            if cut is not None and spare_bytes:
                cut = measure_cut((0, *cut.cuts, len(rows[0].forward_s)), rows, held, placement)
            self._cuts[key] = cut
        return self._cuts[key]

    def leanest_cut(self, job: Job, decisions: ParallelConfig) -> LayerCut:
        """Return the cut whose fullest stage needs the least memory, even if it does not fit."""
        rows, placement = self.stage_rows(job, decisions), decisions.lane_of_stage
        held = lanes_in_flight(decisions)
        fixed = (0, *decisions.cuts, len(rows[0].forward_s))
        bounds = fixed if decisions.cuts else leanest_bounds(rows, held, placement)
        return measure_cut(bounds, rows, held, placement)

    def least_bytes(self, job: Job, decisions: ParallelConfig) -> float:
        """Return a lower bound of the memory of any cut's fullest stage: an equal part of all memory. For ranking
        without cuts."""
        rows = self.stage_rows(job, decisions)
        held = lanes_in_flight(decisions)
        least = min(stages_in_flight(held, decisions.lane_of_stage))
        distinct = {id(row): row for row in rows}.values()
        return min(float(row.filled_bytes(least)[-1]) for row in distinct) / len(rows)

    def stage_rows(self, job: Job, decisions: ParallelConfig) -> list[LayerRow]:
        """Return the costs of every layer on the devices of every stage."""
        share = state_share(decisions.sharded_state, decisions.state_shares)
        if not self.fleet.has_host_groups(decisions):
            groups = [group.to_mesh() for group in make_groups(decisions)]
            return [
                self._sharded_row(job, decisions, stage, lane, groups[lane], share)
                for stage, lane in enumerate(decisions.lane_of_stage)
            ]
        pairs = self.fleet.lane_pairs(decisions, _replica_rows(job.batch // decisions.microbatches, decisions.replicas))
        known: dict[tuple[frozenset[KindRows], Recompute, str], LayerRow] = {}
        row_of_stage = []
        for stage, lane in enumerate(decisions.lane_of_stage):
            key = pairs[lane], decisions.recompute_of(stage), decisions.sharding_key(lane)
            if key not in known:
                known[key] = self.layer_row(job, *key[:2], share, (key[2], decisions.shards))
            row_of_stage.append(known[key])
        return row_of_stage

    def layer_row(
        self,
        job: Job,
        pairs: frozenset[KindRows],
        recompute: Recompute,
        share: StateShare,
        program: ShardProgram = UNSHARDED,
    ) -> LayerRow:
        """Return the costs on a stage whose shard groups lie in one host each, have these kinds and rows, and keep
        `share` of the sharded state.

        Equal arguments return the same object.
        """
        plain = (job.precision, job.sequence, pairs, recompute, program)
        key = (*plain, share, job.optimizer)
        if key not in self._rows:
            if plain not in self._plain:
                group, rows = self.fleet.sample_group(pairs, program[1], parts_of_key(program[0]))
                self._plain[plain] = self._make_row(self.probe_stage(job, group, rows, recompute, *program), job)
            self._rows[key] = self._with_statics(self._plain[plain], job, share, *program)
        return self._rows[key]

    def floor_bytes(self, job: Job, decisions: ParallelConfig) -> tuple[float, float, float]:
        """Return (least static memory of all layers, least memory kept by one microbatch, largest memory of a
        device)."""
        rows = self.stage_rows(job, decisions)
        key = tuple(dict.fromkeys(map(id, rows)))
        if key not in self._least:
            static = np.minimum.reduce([row.static_bytes for row in rows]).sum()
            saved = np.minimum.reduce([row.saved_bytes for row in rows]).sum()
            self._least[key] = (float(static), float(saved), max(row.limit_bytes for row in rows))
        return self._least[key]

    def rows_of(self, job: Job, microbatches: int, replicas: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rows of one microbatch on each replica."""
        return _replica_rows(job.batch // microbatches, replicas)

    def row_time(
        self, job: Job, recompute: Recompute, program: ShardProgram = UNSHARDED
    ) -> Callable[[int, int], float]:
        """Return a function (kind, rows) -> seconds of all layers of a microbatch, forward and backward, on one such
        device or shard group.

        It is exact for powers of two and linear between them. It guides the division of rows, which the simulator then
        judges.
        """
        known: dict[tuple[int, int], float] = {}

        def exact_s(kind: int, rows: int) -> float:
            if (kind, rows) not in known:
                row = self.layer_row(
                    job, frozenset({(self.fleet.names[kind], rows)}), recompute, COMPLETE_STATE, program
                )
                known[kind, rows] = float(row.forward_s.sum() + row.backward_s.sum())
            return known[kind, rows]

        def time_s(kind: int, rows: int) -> float:
            low = 1 << (rows.bit_length() - 1)
            if low == rows:
                return exact_s(kind, rows)
            part = (rows - low) / low
            return exact_s(kind, low) * (1 - part) + exact_s(kind, 2 * low) * part

        return time_s

    def interpolated_row(
        self, job: Job, pairs: frozenset[KindRows], recompute: Recompute, program: ShardProgram = UNSHARDED
    ) -> LayerRow:
        """Return a lower bound of `layer_row`, read between the numbers of rows that are powers of two. It holds if
        time rises with the rows and time per row falls. It prunes divisions of rows among replicas."""
        bounding_rows = []
        for name, rows in pairs:
            low = 1 << (rows.bit_length() - 1)
            lower = self.layer_row(job, frozenset({(name, low)}), recompute, COMPLETE_STATE, program)
            if low < rows:
                upper = self.layer_row(job, frozenset({(name, 2 * low)}), recompute, COMPLETE_STATE, program)
                part = rows / (2 * low)
                lower = replace(
                    lower,
                    forward_s=np.maximum(lower.forward_s, part * upper.forward_s),
                    backward_s=np.maximum(lower.backward_s, part * upper.backward_s),
                    saved_bytes=np.maximum(lower.saved_bytes, part * upper.saved_bytes),
                )
            bounding_rows.append(lower)
        if len(bounding_rows) == 1:
            return bounding_rows[0]
        saved = np.maximum.reduce([row.saved_bytes for row in bounding_rows])
        return replace(
            bounding_rows[0],
            forward_s=np.maximum.reduce([row.forward_s for row in bounding_rows]),
            backward_s=np.maximum.reduce([row.backward_s for row in bounding_rows]),
            saved_bytes=saved,
            limit_bytes=min(row.limit_bytes * saved.sum() / max(row.saved_bytes.sum(), 1.0) for row in bounding_rows),
        )

    def compare_kinds(self, job: Job, shards: int) -> DeviceKinds:
        """Return the comparison of the device kinds, for places of `shards` devices for each part of a sequence."""
        time_s, kind_indices = self.row_time(job, "none"), range(len(self.fleet.names))
        memory = [self.network.kinds[devices[0]].memory_bytes for devices in self.fleet.devices]
        return DeviceKinds(
            counts=tuple(len(devices) // (shards * self.fleet.context_parts) for devices in self.fleet.devices),
            fastest=tuple(sorted(kind_indices, key=lambda kind: time_s(kind, 1))),
            largest=tuple(sorted(kind_indices, key=lambda kind: (-memory[kind], time_s(kind, 1)))),
        )

    def _sharded_row(
        self, job: Job, decisions: ParallelConfig, stage: int, lane: int, group: Mesh, share: StateShare
    ) -> LayerRow:
        """Return the row of one stage whose devices run one sharded program."""
        rows = _replica_rows(job.batch // decisions.microbatches, decisions.replicas)
        recompute = decisions.recompute_of(stage)
        program = (decisions.sharding_key(lane), decisions.shards_of(lane))
        devices = self.network.representative_devices(group.devices)
        plain = (job.precision, job.sequence, rows, decisions.replicas, program, recompute, devices)
        key = (*plain, share, job.optimizer)
        if key not in self._rows:
            probe = self.probe_stage(job, group, rows, recompute, *program)
            self._rows[key] = self._with_statics(self._make_row(probe, job), job, share, *program)
        return self._rows[key]

    def probe_stage(
        self,
        job: Job,
        group: Mesh,
        rows: tuple[int, ...],
        recompute: Recompute,
        sharding: str = "none",
        shards: tuple[int, ...] = (1,),
    ) -> StageWork:
        """Return a stage of all layers on these devices."""
        layers = self.programs.modules[self.module].layers
        layer_programs = [self.programs.layer_program(layer, sharding, shards) for layer in layers]
        return StageWork(
            lane=0,
            group=group,
            layers=tuple(program.graphs for program in layer_programs),
            shares=layer_shares(layer_programs, shards),
            rows=rows,
            slices=(job.sequence,),
            recompute=recompute,
            parameters=self._module_parameters(sharding, shards),
            sharded_state="none",
            frozen=frozen_layers(self.programs.model)[self.module],
            splits_rows=splits_rows(sharding),
        )

    def _make_row(self, probe: StageWork, job: Job) -> LayerRow:
        """Return the row without static bytes."""
        by_kind = layer_costs(probe, job.precision, self.network, self.layers)
        costs = by_kind[""]
        kinds = {kind.name: kind for kind in (self.network.kinds[device] for device in probe.group.devices)}
        limits = {name: float(kind.memory_bytes - WORKSPACE_BYTES) for name, kind in kinds.items()}
        rows = {name: held.rows for name, held in stage_holdings(probe, self.network).items()}
        return LayerRow(
            forward_s=np.array([cost.forward_s for cost in costs]),
            backward_s=np.array([cost.least_backward_s for cost in costs]),
            input_s=np.array([cost.input_s for cost in costs]),
            saved_bytes=np.array([cost.saved_bytes for cost in costs]),
            pending_bytes=np.array([cost.pending_bytes for cost in costs]),
            static_bytes=np.zeros(len(costs)),
            passing_bytes=passing_bytes(costs),
            limit_bytes=min(limits.values()),
            layers=tuple(costs),
            kinds=kind_rows(by_kind, limits, rows),
        )

    def _with_statics(
        self, row: LayerRow, job: Job, share: StateShare, sharding: str = "none", shards: tuple[int, ...] = (1,)
    ) -> LayerRow:
        """Return the row with its static bytes. Replicas split the optimizer state as they split rows."""
        static = self.layer_static_bytes(job, share, sharding, shards)
        gathered = self._complete_layer_bytes(job, share.state, sharding, shards)
        row = replace(row, static_bytes=static, passing_bytes=row.passing_bytes + gathered)
        if not row.kinds:
            return row
        kinds = tuple(
            replace(
                kind,
                static_bytes=self.layer_static_bytes(job, share.scale_part(kind.part), sharding, shards),
                passing_bytes=kind.passing_bytes + gathered,
            )
            for kind in row.kinds
        )
        return replace(row, kinds=kinds, limit_bytes=most_bytes(kinds, static, row.saved_bytes))

    def layer_static_bytes(
        self, job: Job, share: StateShare, sharding: str = "none", shards: tuple[int, ...] = (1,)
    ) -> Array:
        """Return the static bytes of each layer, on the shard position that stores most of it."""
        width = COMPUTE_BYTES[job.precision]
        per_state = state_bytes(find_optimizer(job.optimizer), job.precision)
        per_element = width + GRADIENT_BYTES[job.precision] + per_state * share.part
        trainable, frozen = self._element_counts(sharding, shards)
        held = trainable * per_element + frozen * width
        if shards_gradients(share.state):
            away = (1 - share.gradient_part) * GRADIENT_BYTES[job.precision] + (1 - share.parameter_part) * width
            held = held - self._sharded_array(sharding, shards) * away
            frozen_counts = self.sharded_counts(sharding, shards).frozen
            if frozen_counts:
                held = held - np.array(frozen_counts, dtype=float) * ((1 - share.parameter_part) * width)
        if program_row_parts(sharding, shards) > 1 and shards_optimizer(share.state):
            held = held - self._spread_bytes(job, share, sharding, shards)[:, None]
        fullest: Array = held.max(axis=1)
        return fullest + self._shared_state_bytes(job, sharding, shards)

    def _spread_bytes(self, job: Job, share: StateShare, sharding: str, shards: tuple[int, ...]) -> Array:
        """Return the bytes of each layer's state that an axis which divides rows and experts takes off a device."""
        spread_all, sharded = self._spread_counts(sharding, shards)
        parts = program_row_parts(sharding, shards)
        per_element = state_bytes(find_optimizer(job.optimizer), job.precision)
        more = GRADIENT_BYTES[job.precision] * shards_gradients(share.state)
        more += COMPUTE_BYTES[job.precision] * shards_parameters(share.state)
        spread: Array = (spread_all * per_element + sharded * more) * share.part * (1 - 1 / parts)
        return spread

    def _complete_layer_bytes(self, job: Job, state: ShardedState, sharding: str, shards: tuple[int, ...]) -> float:
        """Return the bytes of the two neighbouring layers that an action of ZeRO-2 or 3 holds complete, at most."""
        if not shards_gradients(state):
            return 0.0
        trained = self._sharded_array(sharding, shards).max(axis=1)
        bytes_of_layers = trained * GRADIENT_BYTES[job.precision]
        if shards_parameters(state):
            frozen = self.sharded_counts(sharding, shards).frozen
            complete = trained + (np.array(frozen, dtype=float).max(axis=1) if frozen else 0.0)
            bytes_of_layers = bytes_of_layers + complete * COMPUTE_BYTES[job.precision]
        return float(largest_pair(bytes_of_layers.tolist()))

    def _sharded_array(self, sharding: str, shards: tuple[int, ...]) -> Array:
        """Return [layer, shard position] of `sharded_counts`."""
        if (sharding, shards) not in self._sharded_arrays:
            elements = self.sharded_counts(sharding, shards).elements
            self._sharded_arrays[sharding, shards] = np.array(elements, dtype=float)
        return self._sharded_arrays[sharding, shards]

    def _spread_counts(self, sharding: str, shards: tuple[int, ...]) -> tuple[Array, Array]:
        """Return [layer] of trained elements that are replicated over the axis that divides rows and experts: all, and
        the ones of parameters without another layer. A shared parameter counts at its first layer."""
        if (sharding, shards) not in self._spread:
            counts = [
                sum(max(stored.elements) for stored in new if stored.trainable and stored.spread)
                for new in self._new_parameters(sharding, shards)
            ]
            sharded = self.sharded_counts(sharding, shards).spread
            self._spread[sharding, shards] = np.array(counts, dtype=float), np.array(sharded, dtype=float)
        return self._spread[sharding, shards]

    def sharded_counts(self, sharding: str, shards: tuple[int, ...]) -> ShardedCounts:
        """Return the elements of all layers whose gradients the replicas may shard."""
        if (sharding, shards) not in self._sharded:
            layers = self.programs.modules[self.module].layers
            self._sharded[sharding, shards] = self.programs.sharded_counts(self.module, layers, sharding, shards)
        return self._sharded[sharding, shards]

    def _module_parameters(self, sharding: str, shards: tuple[int, ...]) -> ParameterCounts:
        """Return the elements of all layers of the module."""
        if (sharding, shards) not in self._parameters:
            layers = self.programs.modules[self.module].layers
            self._parameters[sharding, shards] = self.programs.parameter_counts(layers, sharding, shards)
        return self._parameters[sharding, shards]

    def _shared_state_bytes(self, job: Job, sharding: str, shards: tuple[int, ...]) -> Array:
        """Return the bytes of optimizer state of each layer that every device keeps. A shared parameter counts at its
        first layer."""
        key = (job.optimizer, job.precision, sharding, shards)
        if key not in self._shared_state:
            sizes = [kept_state_bytes(new, job) for new in self._new_parameters(sharding, shards)]
            self._shared_state[key] = np.array(sizes, dtype=float)
        return self._shared_state[key]

    def _element_counts(self, sharding: str, shards: tuple[int, ...]) -> tuple[Array, Array]:
        """Return [layer, shard position]: trainable and frozen elements. A shared parameter counts at its first
        layer."""
        if (sharding, shards) not in self._counted:
            counts = [count_parameters(new, len(shards)) for new in self._new_parameters(sharding, shards)]
            trainable = np.array([count.trainable for count in counts], dtype=float)
            frozen = np.array([count.frozen for count in counts], dtype=float)
            self._counted[sharding, shards] = (trainable, frozen)
        return self._counted[sharding, shards]

    def _new_parameters(self, sharding: str, shards: tuple[int, ...]) -> list[list[StoredParameter]]:
        """Return the parameters of each layer that no earlier layer of the module has."""
        layers, seen = [], set[str]()
        for layer in self.programs.modules[self.module].layers:
            named = self.programs.named_parameters((layer,), sharding, shards)
            layers.append([stored for name, stored in named.items() if name not in seen])
            seen |= named.keys()
        return layers


@lru_cache(maxsize=4096)
def _replica_rows(rows: int, replicas: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rows of one microbatch on each replica."""
    return tuple(stop - start for start, stop in split_by_shares(rows, replicas))
