"""What `pipefit profile` measured, kept in the cluster file beside the figures that were derived from it.

Curves of layers (time over tokens, attention over length and context), of links (time over message size) and of
collectives; overhead of an action; memory. Plain data: `cost/compute/curves.py` predicts from it, `profile/` makes it.
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
    "At the knots, without what attention costs beyond them; ascending. The last slope goes on beyond the last knot."
    attention_s: tuple[float, ...] = ()
    "Seconds per unit of each feature of `cost.curves.FEATURES`; empty for a layer without attention."


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPoint:
    """One measured point of a layer."""

    rows: int
    tokens: int
    "Of one row, in this slice."
    past: int
    "Tokens of earlier slices."
    earlier: int = 1
    "Slices that `past` came in."
    time_s: Mapping[str, float]
    "By action."
    spread: Mapping[str, float]
    "By action: (largest - smallest) / smallest over the repetitions."


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCurve:
    """One layer shape on one kind of device."""

    signature: str
    "`cost.curves.signature` of the layer's graph: what it computes, whatever its values are called."
    name: str
    "For people: the layer and the model it was met in."
    kind: str
    "Key into the cluster's device kinds."
    dtype: str
    setting: Setting
    processes: int
    "How many processes of the host computed at the same time."
    actions: Mapping[str, ActionCurve]
    "Keys F, I, W, B. The overhead of an action is not in them."
    points: tuple[LayerPoint, ...]
    fit_error: float
    "Largest relative error of the curves at the measured points: of F and B together."
    against_roofline: Mapping[str, float] = field(default_factory=dict)
    "By F, I, W: measured time over the roofline's at the largest whole microbatch; only of layers with products."


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCurve:
    """The time of one message inside a host, by size."""

    sizes_bytes: tuple[int, ...]
    "Ascending."
    time_s: tuple[float, ...]
    "Median over the pairs of devices of each pair's fastest repetition."
    spread: tuple[float, ...]
    "Of each size: median over pairs of (slowest - fastest repetition) / fastest."
    between_pairs: tuple[float, ...]
    "Of each size: (slowest pair - fastest pair) / median."
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMethod:
    """How the links of a rail were measured."""

    rounds: int
    "Of disjoint pairs of hosts."
    full_rounds: int
    "That a tournament of all pairs has."
    repeats: int
    noise: float
    "Relative standard deviation of one measurement of the largest message, beside the order."
    order_share: float
    "Part of the variance of single measurements that was the round in which they were made, not the link."
    held_out_error: float | None = None
    "Mean relative error of links that were predicted before they were measured, noise left out; None without any."
    classes: tuple[int, ...] = ()
    "By host: hosts with the same number were found alike; empty where no classes help to tell links."
    crowded: bool = False
    "Whether pairs of hosts slow each other down, so that fewer were measured at a time."


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUplink:
    """Hosts that share a way to all others."""

    hosts: tuple[str, ...]
    up_bytes_per_s: float | None
    "What several of them reach together; None where they did not slow each other down."
    down_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSharing:
    """What several messages at once reach, lists by host: whether a host's ports, and racks, limit its links."""

    out_bytes_per_s: tuple[float, ...]
    "Of two messages to two hosts at once, together."
    out_shared: tuple[bool, ...]
    "Whether they slowed each other down: the rate is that of a port. Else the port carries at least so much."
    in_bytes_per_s: tuple[float, ...]
    in_shared: tuple[bool, ...]
    uplinks: tuple[HostUplink, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RailCurve:
    """The time of one message between hosts, by size: matrices [size][source host][target host]."""

    sizes_bytes: tuple[int, ...]
    time_s: tuple[tuple[tuple[float, ...], ...], ...]
    "Noise, and what the order of measuring adds, left out (profile/estimate.py); the diagonal is 0."
    spread: tuple[tuple[tuple[float, ...], ...], ...]
    "(slowest - fastest repetition) / fastest, the order of measuring included; 0 for a link that was not measured."
    error: tuple[tuple[float, ...], ...] = ()
    "[source host][target host]: relative standard error of the time of the largest message; empty where unknown."
    predicted: tuple[tuple[int, ...], ...] = ()
    "By source host: the target hosts (indices) whose times were concluded from other links; empty where none were."
    method: LinkMethod | None = None
    sharing: PortSharing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCurve:
    """One collective on one group, and how it compares with a ring over the group's links."""

    operation: str
    "all_reduce, all_gather, reduce_scatter or all_to_all; broadcasts (one of every part) or reduces."
    devices: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    "Of the whole tensor on one device: what an all-gather yields, what a reduce-scatter starts from."
    time_s: tuple[float, ...]
    spread: tuple[float, ...]
    latency_factor: float
    "Measured time without bytes over what the links' latency makes of it (`profile/calibrate.py`)."
    bandwidth_factor: float
    "Measured seconds per byte over what the links' bandwidth makes of them."


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFact:
    """Memory of one kind of device."""

    total_bytes: int
    "Of the device, or this process's part of the host's memory."
    process_bytes: int
    "What a process holds before its first tensor: libraries, the device's context."


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMeasurements:
    """Everything that one run of `pipefit profile` found, beside the figures in the cluster itself."""

    layers: tuple[LayerCurve, ...] = ()
    links: Mapping[str, LinkCurve] = field(default_factory=dict)
    "By link class."
    rails: Mapping[str, RailCurve] = field(default_factory=dict)
    "By name of the rail."
    collectives: tuple[CollectiveCurve, ...] = ()
    overhead_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    "By device kind and action: what one action costs beside its layers."
    memory: Mapping[str, MemoryFact] = field(default_factory=dict)
    "By device kind."
    notes: tuple[str, ...] = ()
    "How it was measured, in words."
    seconds: float = 0.0
    "How long measuring took."
