"""The cost tables from which schedules are built and on which the simulator runs.

A cost is a duration and a change of memory. Tables are arrays over [stage, microbatch, slice]. An axis of length 1
holds the same value for all its indices, which keeps uniform work small and allows ragged work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ActionCost:
    """The cost of one action."""

    time_s: float
    held_bytes: float = 0.0
    "Bytes still allocated after the action, minus those before (negative: freed bytes)."
    peak_bytes: float = 0.0
    "Additional bytes while the action runs, including its inputs and outputs that are not held."


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTable:
    """The costs of one kind of action: arrays that broadcast over [stage, microbatch, slice]."""

    time_s: Array
    held_bytes: Array
    peak_bytes: Array

    def cost_of(self, stage: int, microbatch: int, slice_: int) -> ActionCost:
        """Return the cost of one action; axes of length 1 are broadcast."""
        return ActionCost(
            _entry_at(self.time_s, stage, microbatch, slice_),
            _entry_at(self.held_bytes, stage, microbatch, slice_),
            _entry_at(self.peak_bytes, stage, microbatch, slice_),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCost:
    """The cost of moving one tensor between two stages: arrays that broadcast over [microbatch, slice]."""

    source: int
    target: int
    tensor: str = ""
    "'' is the hidden state."
    forward_s: Array
    "Seconds from the start of the send until the tensor can be used, without waiting for a port."
    backward_s: Array
    forward_port_s: Array
    "The part of `forward_s` during which the sender's port is busy (no latency)."
    backward_port_s: Array
    forward_bytes: Array
    """The receive buffer, held from posting the receive until the consumer starts. From then on the consumer's memory
    includes it."""
    backward_bytes: Array
    forward_sent_bytes: Array = field(default_factory=lambda: np.zeros((1, 1)))
    "Bytes held by the sender from the end of the producer until the tensor is sent (on one lane: until it is used)."
    backward_sent_bytes: Array = field(default_factory=lambda: np.zeros((1, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """All costs of one iteration of a pipeline, by stage, edge and lane."""

    actions: Mapping[str, ActionTable]
    "Keys F, I, W, B. Schedules without W use B, the fused backward."
    edges: tuple[EdgeCost, ...]
    reduce_s: Array
    "Per stage: gradient reduction, once an iteration."
    tied_s: Array = field(default_factory=lambda: np.zeros(1))
    "Per stage: gradient sum over all stages that hold the same layers in turns. It starts when all have finished."
    gather_s: Array
    "Per stage: parameter all-gather after the optimizer step (ZeRO-1), once an iteration."
    step_s: Array
    "Per lane: optimizer step, including the gradient norm."
    static_bytes: Array
    "Per lane: parameters, gradients, optimizer state, workspace."
    kv_gradient_bytes: Array = field(default_factory=lambda: np.zeros((1, 1, 1)))
    """Gradients that a slice's backward leaves for the keys and values of earlier slices, over [stage, microbatch,
    slice]. Held until the next backward of the microbatch starts, whose memory includes them."""
    reduce_copy_bytes: Array = field(default_factory=lambda: np.zeros(1))
    "Per stage: bytes held by the reduction from the last backward on (gloo reduce-scatter sums a copy)."
    reduce_hidden_s: Mapping[str, Array] = field(default_factory=dict)
    """Key: kind of the stage's last backward (B or W). Per stage: the part of `reduce_s` that overlaps it. Empty:
    reductions start after the last backward."""
    overhead_s: float = 0.0
    "Interpreter overhead, added to every compute action."
    receives_ahead: bool = False
    "Whether a receive is posted before the preceding message is used (gloo: the sender then writes at once)."
    kinds: tuple[KindMemory, ...] = ()
    "Memory of each device kind, where kinds hold different amounts; empty: all hold the same."
    contention: PortContention | None = None
    "Contention of concurrent transfers; None: every lane has its own port, and all replicas run in step."
    notes: tuple[str, ...] = field(default=())
    "The measurements and assumptions behind the numbers."


@dataclass(frozen=True, slots=True, kw_only=True)
class KindMemory:
    """The memory of one device kind: per lane, of the fullest device of that kind."""

    name: str
    devices: frozenset[int]
    "Cluster indices of all devices of the kind."
    limit_bytes: Array
    "Per lane: the bytes that a process may use; infinite on a lane without such a device."
    table: CostTable
    "Only the bytes of this table are read."
    parts: tuple[Mapping[str, float], ...]
    "Per lane: static bytes by part."
    end_bytes: Array
    "Per lane: bytes at the end of an iteration beside the static bytes (`cost/memory/step_end.py`)."


@dataclass(frozen=True, slots=True)
class PortFlow:
    """The port usage of a transfer, of a collective, or of an action with collectives inside."""

    ports: tuple[int, ...]
    use: tuple[float, ...]
    "The share of each port that the flow uses when it is alone, at most 1."
    bytes_per_s: float
    "Rate of one message of the flow, alone. Flows that share a port get equal parts of it per message."
    queue: int = -1
    "Flows with the same number run one at a time, in the order in which they are ready; -1: no queue."


FlowKey = tuple[str, int, int, int]
"""("SEND_F" or "SEND_B", index of the edge in `CostTable.edges`, slice, pipeline), ("REDUCE" or "GATHER", stage, 0, 0),
or (F, I, W or B, stage, slice, pipeline)."""


@dataclass(frozen=True, slots=True)
class PortContention:
    """Pipelines that run at their own pace between reductions, and the ports that their transfers share."""

    pipelines: tuple[CostTable, ...]
    "The times of each replica alone (only `actions` and `edges` are read); one table if replicas run in step."
    flows: Mapping[FlowKey, PortFlow]
    ports: int
    queues: int


def _entry_at(array: Array, stage: int, microbatch: int, slice_: int) -> float:
    index = tuple(i if length > 1 else 0 for i, length in zip((stage, microbatch, slice_), array.shape, strict=True))
    return float(array[index])
