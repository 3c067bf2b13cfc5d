"""Who works together along a shard axis, and on how much: what prices are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

from pipefit.cluster.types import DeviceKind
from pipefit.cost.comm.lowerings import LoweredCollective
from pipefit.cost.compute.operator_times import CollectiveTime
from pipefit.cost.static_memory import Precision
from pipefit.cost.work import BUCKET_BYTES
from pipefit.shard.template import AxisMembers

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class ShardSetting:
    """The devices of a shard axis, and what one microbatch brings them."""

    kinds: tuple[DeviceKind, ...]
    "Of every position."
    collective: CollectiveTime
    "Over these devices, for even parts."
    rows: int
    tokens: int
    precision: Precision
    microbatches: int
    "Of an iteration: gradients are reduced and parameters updated once in so many microbatches."
    slowness: Mapping[str, float] = field(default_factory=dict)
    "Kind of device -> what its computing takes against the roofline, where that was measured."
    lowered: Callable[[str, float], tuple[LoweredCollective, ...]] | None = None
    "(all_gather, reduce_scatter or all_to_all, bytes of the whole tensor) -> its lowerings over these devices; None:"
    " parts are padded, and nothing goes from one split to another at once."
    reshare_s: Callable[[float, Sequence[float], Sequence[float]], float] | None = None
    "(bytes of the whole tensor, shares before, shares afterwards) -> seconds, one way; None: all layers have the same."
    lanes: int = 1
    "Groups of devices over which the layers are spread: one of them holds so small a part."

    @cached_property
    def distinct_kinds(self) -> tuple[DeviceKind, ...]:
        return tuple({kind.name: kind for kind in self.kinds}.values())

    @cached_property
    def axis_members(self) -> AxisMembers:
        names = [kind.name for kind in self.distinct_kinds]
        return AxisMembers(tuple(names.index(kind.name) for kind in self.kinds))

    @property
    def device_speeds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """How fast every device computes, and how fast it moves: FLOP/s and bytes/s as far as it reaches them."""
        slow = [self.slowness.get(kind.name, 1.0) for kind in self.kinds]
        rates = [kind.peak_flops_per_s[self.precision] * kind.efficiency for kind in self.kinds]
        moves = [kind.memory_bandwidth_bytes_per_s for kind in self.kinds]
        return (
            tuple(rate / by for rate, by in zip(rates, slow, strict=True)),
            tuple(move / by for move, by in zip(moves, slow, strict=True)),
        )

    @cached_property
    def bucket_s(self) -> float:
        """Seconds to reduce a full bucket of gradients."""
        return self.collective("all_reduce", float(BUCKET_BYTES))

    @property
    def overlap_share(self) -> float:
        """What part of what hides under a backward costs it nothing."""
        return min(kind.overlap for kind in self.kinds)

    @cached_property
    def _made_values(self) -> dict[object, Any]:
        return {}

    def make_once(self, key: object, made: Callable[[], Found]) -> Found:
        """What `made` gives, made once in this setting for everything with this key: repeated layers cost one."""
        if key not in self._made_values:
            self._made_values[key] = made()
        return cast(Found, self._made_values[key])

    @property
    def symbol_sizes(self) -> dict[str, int]:
        return {"B": self.rows, "T": self.tokens, "P": 0}
