"""The work of a pipeline from which costs are computed: graphs and meshes, without a plan or a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipefit.layout import AxisName, Mesh
from pipefit.model.analysis.saved import Recompute
from pipefit.model.graph import Graph
from pipefit.optimizers import DEFAULT, OptimizerKind, find_optimizer
from pipefit.optimizers.sharded_state import ShardedState, shards_gradients, shards_optimizer, shards_parameters
from pipefit.precision import Precision

BUCKET_BYTES = 32 << 20
"""Bytes of gradients reduced together: the bucket size of `run/worker/build.py`."""

Message = tuple[int, int, float]
"""(source device, target device, bytes)."""

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameter elements stored by the devices of a stage, per position of the shard axis."""

    trainable: tuple[int, ...]
    frozen: tuple[int, ...]
    whole: tuple[int, ...]
    "Trainable elements that are replicated over the shard axis: their gradients are summed over it."
    spread: tuple[int, ...] = (0,)
    """Trainable elements that are replicated over the axis that divides rows and experts (`StageWork.row_axis`): their
    gradients and state are summed and sharded over it, together with the replicas."""
    shared_state_bytes: float = 0.0
    "Bytes of optimizer state that every device keeps, whatever part of a parameter it stores."


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """The work of one stage on its mesh."""

    lane: int
    group: Mesh
    layers: tuple[tuple[Graph, ...], ...]
    "[layer][position of the shard axis]; one entry if the layer is not sharded."
    rows: tuple[int, ...]
    "Rows of one microbatch on each position of the replica axis, those of all positions of an expert axis together."
    slices: tuple[int, ...]
    "Tokens of each slice of one row."
    recompute: Recompute
    parameters: ParameterCounts
    sharded_state: ShardedState
    "The state that the replicas shard, by their shares."
    sharded_elements: tuple[tuple[int, ...], ...] = ()
    """[layer][position of the shard axis]: trained elements of parameters of this layer alone. The replicas shard their
    gradients, and their parameters under ZeRO-3. Empty: gradients are not sharded."""
    sharded_spread: tuple[int, ...] = ()
    "[layer]: those of these elements that are replicated over the axis that divides rows and experts."
    sharded_frozen: tuple[tuple[int, ...], ...] = ()
    "[layer][position of the shard axis]: frozen elements that the replicas shard under ZeRO-3. Empty: none."
    sharded_frozen_spread: tuple[int, ...] = ()
    "[layer]: those of these elements that are replicated over the axis that divides rows and experts."
    shares: tuple[tuple[int, ...], ...] = ()
    "Shares of every layer along the shard axis, where they differ from the mesh's; empty: the mesh's."

    symbols: tuple[tuple[str, int], ...] = ()
    "Other sizes named in the graphs besides rows and tokens, the same in every microbatch."
    packed: tuple[tuple[tuple[int, int], ...], ...] = ()
    """[microbatch][replica] of packed rows: tokens, and the sum of the squared tokens of each image. `rows` and
    `slices` then describe an average microbatch. Empty: all microbatches are equal."""
    frozen: int = 0
    "Number of leading layers without a backward: neither they nor any earlier layer is trained."
    turns: int = 1
    """Number of stages, this one included, that hold the same layers on different lanes and take turns. Their gradients
    are summed over all of them at once (`TiedWork.rings`)."""

    state_group: int = 0
    "Number of neighbouring replicas (and parts of sequences) that shard the state together; 0: all of them."

    splits_rows: bool = False
    """The shard axis divides the rows of a replica (expert parallelism), as an expert axis beside it would. Gradients
    and state of the parameters that are replicated over that axis are summed and sharded over it and the replicas."""

    @property
    def context_parts(self) -> int:
        """Return the number of devices that hold parts of each sequence."""
        return self.group.find_axis("context").size

    @property
    def data_shares(self) -> tuple[int, ...]:
        """Return the shares of the devices that sum gradients together: replicas, and parts of their sequences."""
        shares, parts = self.group.find_axis("replica").shares, self.context_parts
        return tuple(share for share in shares for _ in range(parts))

    @property
    def state_shares(self) -> tuple[int, ...]:
        """Return the shares of the devices that shard the state together."""
        return (1,) * self.state_group or self.data_shares

    @property
    def expert_parts(self) -> int:
        """Return the size of the expert axis."""
        return self.group.find_axis("expert").size

    @property
    def row_axis(self) -> AxisName:
        """Return the axis that divides the rows of a replica and the experts, if one does."""
        return "shard" if self.splits_rows else "expert"

    @property
    def row_parts(self) -> int:
        """Return the number of parts of the rows of a replica: the size of `row_axis`."""
        return self.group.find_axis(self.row_axis).size

    @property
    def spread_part(self) -> float:
        """Return the part of the trained elements that remains on a device if `row_axis` divides the state of those
        that are replicated over it; 1 without such an axis."""
        if self.row_parts == 1 or not max(self.parameters.trainable):
            return 1.0
        away = max(self.parameters.spread) * (1.0 - 1.0 / self.row_parts)
        return 1.0 - away / max(self.parameters.trainable)

    def part_rows(self, replica: int) -> int:
        """Return the rows of a microbatch at one position of a replica's expert axis, the most where they differ."""
        return -(-self.rows[replica] // self.expert_parts)

    @property
    def shards_state(self) -> bool:
        """Return whether the replicas shard the optimizer state."""
        return shards_optimizer(self.sharded_state)

    @property
    def has_sharded_layers(self) -> bool:
        """Return whether the replicas sum gradients in every microbatch, layer by layer (ZeRO-2 and 3)."""
        return bool(self.sharded_elements) and len(self.data_shares) * self.row_parts > 1

    @property
    def reduced_elements(self) -> int:
        """Return the elements on one device whose gradients are summed at the end of the iteration."""
        if not self.has_sharded_layers:
            return max(self.parameters.trainable)
        sharded = [sum(column) for column in zip(*self.sharded_elements, strict=True)]
        left: list[int] = [count - less for count, less in zip(self.parameters.trainable, sharded, strict=True)]
        return max(left)

    @property
    def gathered_elements(self) -> int:
        """Return the elements on one device that are all-gathered after the update."""
        if not self.shards_state:
            return 0
        return self.reduced_elements if shards_parameters(self.sharded_state) else max(self.parameters.trainable)

    @property
    def reduced_spread(self) -> int:
        """Return those of `reduced_elements` that are replicated over `row_axis`."""
        return max(self.parameters.spread) - (sum(self.sharded_spread) if self.has_sharded_layers else 0)

    @property
    def gathered_spread(self) -> int:
        """Return those of `gathered_elements` that are replicated over `row_axis`."""
        if not self.shards_state:
            return 0
        return self.reduced_spread if shards_parameters(self.sharded_state) else max(self.parameters.spread)

    @property
    def copied_elements(self) -> float:
        """Return the elements on one device whose gradients are also summed over other groups that shard the state."""
        return max(self.parameters.trainable) / self.state_group if self.state_group else 0.0

    @property
    def has_equal_shards(self) -> bool:
        """Return whether all positions of the shard axis have equal parts of every layer."""
        return all(len({*shares}) <= 1 for shares in (*self.shares, self.group.find_axis("shard").shares))

    def shares_of(self, layer: int) -> tuple[int, ...]:
        """Return the shares of a layer along the shard axis."""
        return self.shares[layer] if self.shares else self.group.find_axis("shard").shares


class StateShare(NamedTuple):
    """The state that replicas shard, and the part of it on one replica."""

    state: ShardedState = "none"
    part: float = 1.0

    @property
    def gradient_part(self) -> float:
        """Part of the gradients on one replica."""
        return self.part if shards_gradients(self.state) else 1.0

    @property
    def parameter_part(self) -> float:
        """Part of the parameters on one replica."""
        return self.part if shards_parameters(self.state) else 1.0

    def scale_part(self, factor: float) -> StateShare:
        """Return the share of a replica with this part of the rows of the largest one."""
        return self._replace(part=self.part * factor) if self.part < 1 else self


COMPLETE_STATE = StateShare()
"""The state of replicas that shard nothing."""


def state_share(sharded_state: ShardedState, shares: Sequence[int]) -> StateShare:
    """Return the sharded state with its largest part on a replica of these shares."""
    return StateShare(sharded_state, max(shares) / sum(shares)) if shards_optimizer(sharded_state) else COMPLETE_STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeWork:
    """One tensor between two stages: the messages (source device, target device, bytes) per slice and direction."""

    source: int
    target: int
    tensor: str
    forward: tuple[tuple[tuple[int, int, float], ...], ...]
    "[slice] -> messages."
    backward: tuple[tuple[tuple[int, int, float], ...], ...]
    ragged: tuple[tuple[Messages, Messages], ...] = ()
    "[microbatch] -> (forward, backward), if microbatches differ; `forward` and `backward` are then the largest."


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWork:
    """Gradients of parameters shared by several stages, exchanged once an iteration."""

    stages: tuple[int, ...]
    messages: tuple[tuple[int, int, float], ...]
    "(source device, target device, bytes): every stage sends its gradient to each other stage."
    elements: int = 0
    "Elements of the shared parameters on one device."
    shared_state_bytes: float = 0.0
    "Bytes of their optimizer state that every device keeps."
    rings: tuple[tuple[int, ...], ...] = ()
    "For stages that take turns: the device groups that sum their gradients, instead of messages."


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineWork:
    """All stages and edges of one pipeline."""

    stages: tuple[StageWork, ...]
    edges: tuple[EdgeWork, ...]
    tied: tuple[TiedWork, ...] = ()
    precision: Precision
    optimizer: OptimizerKind = field(default_factory=lambda: find_optimizer(DEFAULT))
    bucket_bytes: float = BUCKET_BYTES
    "Bytes of gradients reduced together."

    @property
    def num_lanes(self) -> int:
        return max(stage.lane for stage in self.stages) + 1

    @property
    def distinct_microbatches(self) -> int:
        """The number of microbatches if they differ, else 1."""
        return max([1, *(len(stage.packed) for stage in self.stages)])
