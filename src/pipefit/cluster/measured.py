"""Measurements of `pipefit profile`, kept in the cluster file beside the figures derived from them.

Curves of layers (time over tokens, attention over length and context), of links (time over message size) and of
collectives; overhead of an action; memory. Plain data: `profile/` makes it and `cost/compute/curves.py` predicts from
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Setting = Literal["alone", "together"]
"""`alone`: one process of the host computed at a time. `together`: all of them at once, as in training."""

Action = Literal["F", "I", "W", "B"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCurve:
    """Seconds of one action on one layer: piecewise linear in the tokens, plus attention."""

    tokens: tuple[float, ...]
    "Knots, ascending: tokens of the microbatch on this device (rows x tokens of a row)."
    time_s: tuple[float, ...]
    "Time at the knots without the attention cost beyond them; ascending. Extrapolated with the last slope."
    attention_s: tuple[float, ...] = ()
    "Seconds per unit of each feature of `cost.curves.FEATURES`; empty for a layer without attention."


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPoint:
    """One measured point of a layer."""

    rows: int
    tokens: int
    "Tokens of one row in this slice."
    past: int
    "Tokens of earlier slices."
    earlier: int = 1
    "Number of slices that `past` consists of."
    time_s: Mapping[str, float]
    "Time by action."
    spread: Mapping[str, float]
    "(largest - smallest) / smallest over the repetitions, by action."


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCurve:
    """One layer shape on one kind of device."""

    signature: str
    "`cost.curves.signature` of the layer's graph: its computation, independent of value names."
    name: str
    "Readable name: the layer and the model in which it was first met."
    kind: str
    "Key into the cluster's device kinds."
    dtype: str
    setting: Setting
    processes: int
    "Number of processes of the host that computed at the same time."
    actions: Mapping[str, ActionCurve]
    "Curves of F, I, W and B, without the overhead of an action."
    points: tuple[LayerPoint, ...]
    fit_error: float
    "Largest relative error of the curves at the measured points, for F and B together."
    against_roofline: Mapping[str, float] = field(default_factory=dict)
    """By F, I, W: measured time over the roofline's at the largest unsliced microbatch; only for layers with matrix
    products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCurve:
    """The time of one message inside a host, by size."""

    sizes_bytes: tuple[int, ...]
    "Ascending."
    time_s: tuple[float, ...]
    "Median over the pairs of devices of each pair's fastest repetition."
    spread: tuple[float, ...]
    "Per size: median over pairs of (slowest - fastest repetition) / fastest."
    between_pairs: tuple[float, ...]
    "Per size: (slowest pair - fastest pair) / median."
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMethod:
    """The method by which the links of a rail were measured."""

    rounds: int
    "Number of measured rounds of disjoint host pairs."
    full_rounds: int
    "Number of rounds in a tournament of all pairs."
    repeats: int
    noise: float
    "Relative standard deviation of one measurement of the largest message, without the effect of the order."
    order_share: float
    "Share of the variance of single measurements that is due to their round and not to the link."
    held_out_error: float | None = None
    """Mean relative error, without noise, of links that were predicted before they were measured; None if there were
    none."""
    classes: tuple[int, ...] = ()
    "Class number by host: hosts of one class were found equal. Empty if classes do not help to distinguish links."
    crowded: bool = False
    "Whether pairs of hosts slow each other down, so that fewer were measured at a time."


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUplink:
    """Hosts that share an uplink to all other hosts."""

    hosts: tuple[str, ...]
    up_bytes_per_s: float | None
    "Combined rate of several of these hosts; None if they did not slow each other down."
    down_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSharing:
    """Rates of simultaneous messages, lists by host: they show whether a host's ports, or racks, limit its links."""

    out_bytes_per_s: tuple[float, ...]
    "Combined rate of two messages to two hosts at once."
    out_shared: tuple[bool, ...]
    "Whether the two messages slowed each other down. If so, the rate is the port's; otherwise it is a lower bound."
    in_bytes_per_s: tuple[float, ...]
    in_shared: tuple[bool, ...]
    uplinks: tuple[HostUplink, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RailCurve:
    """The time of one message between hosts, by size: matrices [size][source host][target host]."""

    sizes_bytes: tuple[int, ...]
    time_s: tuple[tuple[tuple[float, ...], ...], ...]
    "Time without noise and without the effect of the measuring order (profile/estimate.py); the diagonal is 0."
    spread: tuple[tuple[tuple[float, ...], ...], ...]
    """(slowest - fastest repetition) / fastest, including the effect of the measuring order; 0 for a link that was not
    measured."""
    error: tuple[tuple[float, ...], ...] = ()
    "[source host][target host]: relative standard error of the time of the largest message; empty if unknown."
    predicted: tuple[tuple[int, ...], ...] = ()
    "By source host: the target hosts (indices) whose times were predicted from other links; empty if there are none."
    method: LinkMethod | None = None
    sharing: PortSharing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCurve:
    """One collective on one group, and its ratio to a ring over the group's links."""

    operation: str
    "all_reduce, all_gather, reduce_scatter or all_to_all; broadcasts (one per part) or reduces."
    devices: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    "Bytes of the full tensor on one device: the output of an all-gather, the input of a reduce-scatter."
    time_s: tuple[float, ...]
    spread: tuple[float, ...]
    latency_factor: float
    "Measured time at zero bytes divided by the ring's time from link latencies (`profile/calibrate.py`)."
    bandwidth_factor: float
    "Measured seconds per byte divided by the ring's seconds per byte from link bandwidths."


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFact:
    """Memory of one kind of device."""

    total_bytes: int
    "Memory of the device, or this process's part of the host's memory."
    process_bytes: int
    "Memory of a process before its first tensor: libraries, the device's context."


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMeasurements:
    """All results of one run of `pipefit profile`, beside the figures in the cluster itself."""

    layers: tuple[LayerCurve, ...] = ()
    links: Mapping[str, LinkCurve] = field(default_factory=dict)
    "By link class."
    rails: Mapping[str, RailCurve] = field(default_factory=dict)
    "By name of the rail."
    collectives: tuple[CollectiveCurve, ...] = ()
    overhead_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    "By device kind and action: time of one action beside its layers."
    memory: Mapping[str, MemoryFact] = field(default_factory=dict)
    "By device kind."
    notes: tuple[str, ...] = ()
    "Remarks on the measurement."
    seconds: float = 0.0
    "Duration of the measurement."
