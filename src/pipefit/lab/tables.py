"""Timing tables of emulated devices. They are hidden from the planner, and their form differs from its cost model on
purpose.

The planner fits piecewise linear curves in tokens plus attention. Here the rate saturates along a Hill curve with a
separate exponent for every kind of action, arithmetic and memory traffic combine in a p-norm, and attention slows with
its context. A cool device is faster: the first actions of a step take less time than later ones. Functions are pure.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pipefit.errors import LabError

ACTION_KINDS = ("F", "I", "W", "B")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """The work of one layer in one action."""

    dense_flops: float
    attention_flops: float
    traffic_bytes: float
    tokens: int
    "Rows x length on this device."
    context: int
    "Largest number of keys that a query attends to."
    masked: float = 0.0
    "Share of the scores that a causal mask hides."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTable:
    """Timing table of one kind of emulated device, at the lab's (small) scale."""

    flops_per_s: float
    "Rate of infinitely large matrix products."
    memory_bytes_per_s: float
    knee_tokens: float = 32.0
    "Tokens at which half of the rate is reached."
    sharpness: Mapping[str, float] = field(default_factory=lambda: {"F": 1.2, "I": 1.1, "W": 0.9})
    "Hill exponent of each kind of action."
    factor: Mapping[str, float] = field(default_factory=lambda: {"F": 1.0, "I": 1.04, "W": 0.93})
    "Time of each kind relative to F for the same FLOPs."
    fusion: float = 0.97
    "Time of a fused backward as a share of I + W."
    join: float = 3.0
    "p of the p-norm of arithmetic and traffic: 1 adds them, a large p takes the larger."
    attention_share: float = 0.6
    "Rate of attention relative to matrix products, at a context of 1."
    attention_fade: float = 0.05
    "Exponent with which the attention rate falls in the context."
    masked_share: float = 1.0
    "Share of the causally masked scores that is still computed: 0 for flash kernels, 1 for plain products."
    layer_s: float = 5e-4
    "Overhead per layer."
    action_s: float = 3e-3
    "Overhead per action."
    boost: float = 0.02
    "Relative speed-up of the first action of a step over the steady state."
    boost_actions: float = 8.0
    "Number of actions after which the boost has fallen to 1/e."
    jitter: float = 0.015
    "Sigma of the lognormal factor on every action; its mean is 1."

    def table_problems(self, where: str) -> Iterator[LabError]:
        """Yield an error for each impossible value."""
        for name in ("flops_per_s", "memory_bytes_per_s", "knee_tokens", "join", "attention_share", "boost_actions"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                yield LabError("This figure must be above zero.", where=f"{where}.{name}", seen=getattr(self, name))
        for name in ("layer_s", "action_s", "attention_fade"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                yield LabError("This figure must not be negative.", where=f"{where}.{name}", seen=getattr(self, name))
        for name, largest in (("boost", 0.5), ("jitter", 0.2), ("fusion", 2.0), ("masked_share", 1.0)):
            if not 0 <= getattr(self, name) <= largest:
                yield LabError(
                    "This share is impossible.",
                    where=f"{where}.{name}",
                    seen=getattr(self, name),
                    allowed=f"0 to {largest:g}",
                )
        for name in ("sharpness", "factor"):
            values = getattr(self, name)
            if sorted(values) != ["F", "I", "W"] or min(values.values(), default=0) <= 0:
                yield LabError(
                    "A figure above zero is needed for each of F, I and W.", where=f"{where}.{name}", seen=dict(values)
                )

    def layer_time_s(self, kind: str, facts: Mapping[str, LayerFacts]) -> float:
        """Return the seconds of one layer in an action of `kind`. `facts` is keyed by F, I and W; only the entries that
        `kind` needs are read."""
        if kind == "B":
            return self.fusion * (self.layer_time_s("I", facts) + self.layer_time_s("W", facts))
        work = facts[kind]
        if work.tokens == 0:
            return 0.0
        powered = work.tokens ** self.sharpness[kind]
        rate = self.flops_per_s * powered / (powered + self.knee_tokens ** self.sharpness[kind])
        dense_s = self.factor[kind] * work.dense_flops / rate
        traffic_s = work.traffic_bytes / self.memory_bytes_per_s
        attention_rate = self.flops_per_s * self.attention_share * max(1, work.context) ** -self.attention_fade
        seen = 1.0 - work.masked * (1.0 - self.masked_share)
        joined_s = (dense_s**self.join + traffic_s**self.join) ** (1 / self.join)
        return float(joined_s + seen * work.attention_flops / attention_rate + self.layer_s)

    def drift_factor(self, turn: int) -> float:
        """Return the factor on the `turn`-th compute action of a step (from 0): below 1 at the beginning, approaching 1
        later."""
        return 1.0 - self.boost * math.exp(-turn / self.boost_actions)

    def jitter_factor(self, *key: object) -> float:
        """Return the jitter of one action: lognormal with mean 1, a pure function of `key` (seed, device, step,
        turn)."""
        if not self.jitter:
            return 1.0
        data = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
        first = (int.from_bytes(data[:8], "little") + 1) / (2**64 + 1)
        second = int.from_bytes(data[8:], "little") / 2**64
        normal = math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)
        return math.exp(self.jitter * normal - self.jitter**2 / 2)
