"""What a piece of work costs: the tables that schedules are built from and simulations run on.

A cost is a duration and what it does to memory. Tables are arrays over [stage, microbatch, slice]; an axis of
length 1 stands for "the same for all", so that uniform work stays small and ragged work is expressible.
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
    """Of one action."""

    time_s: float
    held_bytes: float = 0.0
    "What stays allocated after the action (negative: what it frees)."
    peak_bytes: float = 0.0
    "What it needs beside that while it runs: its inputs and outputs among it, as far as they are not held."


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTable:
    """The costs of one kind of action: arrays that broadcast over [stage, microbatch, slice]."""

    time_s: Array
    held_bytes: Array
    peak_bytes: Array

    def cost_of(self, stage: int, microbatch: int, slice_: int) -> ActionCost:
        """The cost of one action, whatever axes were stored as length 1."""
        return ActionCost(
            _entry_at(self.time_s, stage, microbatch, slice_),
            _entry_at(self.held_bytes, stage, microbatch, slice_),
            _entry_at(self.peak_bytes, stage, microbatch, slice_),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCost:
    """Moving one tensor between two stages: arrays that broadcast over [microbatch, slice]."""

    source: int
    target: int
    tensor: str = ""
    "'' is the hidden state."
    forward_s: Array
    "Time from the send's start until the tensor can be used, without waiting for a port."
    backward_s: Array
    forward_port_s: Array
    "The part of it during which the sender's port is busy (no latency)."
    backward_port_s: Array
    forward_bytes: Array
    "The receive buffer: held from when the receive is posted until the consumer starts, whose own memory it is then."
    backward_bytes: Array
    forward_sent_bytes: Array = field(default_factory=lambda: np.zeros((1, 1)))
    "What the sender keeps of it from the end of its producer until it has left (or, on one lane, until it is used)."
    backward_sent_bytes: Array = field(default_factory=lambda: np.zeros((1, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """All costs of one iteration of a pipeline, by stage, edge and lane."""

    actions: Mapping[str, ActionTable]
    "Keys F, I, W, B. B (fused) is what a schedule without W uses."
    edges: tuple[EdgeCost, ...]
    reduce_s: Array
    "Per stage: reduction of its gradients, once an iteration."
    tied_s: Array = field(default_factory=lambda: np.zeros(1))
    "Per stage: summing its gradients over all stages that take turns with it, once all have come to that."
    gather_s: Array
    "Per stage: parameters gathered after the optimizer step (ZeRO-1), once an iteration."
    step_s: Array
    "Per lane: optimizer step, norm included."
    static_bytes: Array
    "Per lane: parameters, gradients, optimizer state, workspace."
    owed_bytes: Array = field(default_factory=lambda: np.zeros((1, 1, 1)))
    "What a slice's backward leaves for the keys and values of earlier slices, until the next one of the microbatch"
    " starts, whose own memory it is then; over [stage, microbatch, slice]."
    reduce_copy_bytes: Array = field(default_factory=lambda: np.zeros(1))
    "Per stage: what its reduction holds from its last backward on (gloo sums a copy of what it scatters)."
    reduce_hidden_s: Mapping[str, Array] = field(default_factory=dict)
    "Keys B and W, the kind of a stage's last backward; per stage: the part of `reduce_s` that runs beside it. Empty:"
    " reductions start when the last backward is over."
    overhead_s: float = 0.0
    "Added to every compute action: what the interpreter needs per action."
    receives_ahead: bool = False
    "Whether a receive is posted before the message ahead of it is used (gloo: the sender then writes at once)."
    kinds: tuple[KindMemory, ...] = ()
    "What each kind of device holds, where that is less than the rest of the table says; empty: all hold the same."
    contention: PortContention | None = None
    "What transfers at the same time do to each other; None: every lane has a port of its own, and all replicas go in"
    " step."
    notes: tuple[str, ...] = field(default=())
    "Which measurements or assumptions the numbers came from."


@dataclass(frozen=True, slots=True, kw_only=True)
class KindMemory:
    """What the devices of one kind hold: of every lane the fullest one of that kind."""

    name: str
    devices: frozenset[int]
    "All of the kind, by their numbers in the cluster."
    limit_bytes: Array
    "Per lane: what a process may use there; infinite where no such device is."
    table: CostTable
    "Its bytes; nothing else of it is read."
    parts: tuple[Mapping[str, float], ...]
    "Per lane: its static bytes by part."
    end_bytes: Array
    "Per lane: what the end of an iteration needs beside what always stays (`cost/memory/step_end.py`)."


@dataclass(frozen=True, slots=True)
class PortFlow:
    """A transfer, a collective, or an action with collectives of its own, as ports see it."""

    ports: tuple[int, ...]
    use: tuple[float, ...]
    "Of each port: the share of it that the flow takes when it is alone, at most 1."
    bytes_per_s: float
    "Of one of its messages, alone: flows that share a port get equal parts of it for each of their messages."
    queue: int = -1
    "Flows with the same number take turns, in the order in which they are ready; -1: with nobody."


FlowKey = tuple[str, int, int, int]
"""("SEND_F" or "SEND_B", index of the edge in `CostTable.edges`, slice, pipeline), ("REDUCE" or "GATHER", stage, 0, 0),
or (F, I, W or B, stage, slice, pipeline)."""


@dataclass(frozen=True, slots=True)
class PortContention:
    """Pipelines that go at their own pace between reductions, and what their transfers share."""

    pipelines: tuple[CostTable, ...]
    "The times of each replica by itself (`actions`, `edges`; the rest is not read); one for all of them together."
    flows: Mapping[FlowKey, PortFlow]
    ports: int
    queues: int


def _entry_at(array: Array, stage: int, microbatch: int, slice_: int) -> float:
    index = tuple(i if length > 1 else 0 for i, length in zip((stage, microbatch, slice_), array.shape, strict=True))
    return float(array[index])
