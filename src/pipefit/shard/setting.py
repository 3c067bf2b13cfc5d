"""The devices of a shard axis and the size of a microbatch, from which prices are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum
from typing import Any, TypeVar, cast

from pipefit.cluster.types import DeviceKind
from pipefit.cost.comm.lowerings import LoweredCollective
from pipefit.cost.compute.operator_times import CollectiveTime
from pipefit.cost.static_memory import (
    optimizer_traffic_bytes,
    shared_state_bytes,
    static_parts,
)
from pipefit.cost.work import BUCKET_BYTES
from pipefit.model.graph import ParameterSpec
from pipefit.optimizers import DEFAULT, OptimizerKind, find_optimizer
from pipefit.precision import PRODUCT_TYPE, Precision
from pipefit.shard.template import AxisMembers

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class ShardSetting:
    """The devices of a shard axis, and the work of one microbatch."""

    kinds: tuple[DeviceKind, ...]
    "Device kind of every position."
    collective: CollectiveTime
    "Seconds of collectives over these devices, with even parts."
    rows: int
    tokens: int
    precision: Precision
    microbatches: int
    "Microbatches per iteration: gradients are reduced and parameters updated once per iteration."
    optimizer: OptimizerKind = field(default_factory=lambda: find_optimizer(DEFAULT))
    slowness: Mapping[str, float] = field(default_factory=dict)
    "Device kind -> measured compute time / roofline time, if measured."
    lowered: Callable[[str, float], tuple[LoweredCollective, ...]] | None = None
    """(all_gather, reduce_scatter or all_to_all, bytes of the full tensor) -> its lowerings on these devices. None:
    parts are padded, and there is no all_to_all."""
    reshare_s: Callable[[float, Sequence[float], Sequence[float]], float] | None = None
    "(bytes of the full tensor, old shares, new shares) -> seconds, one direction. None: all layers have equal shares."
    lanes: int = 1
    "Number of device groups over which the layers are distributed: each holds 1 / lanes of them."

    @cached_property
    def distinct_kinds(self) -> tuple[DeviceKind, ...]:
        return tuple({kind.name: kind for kind in self.kinds}.values())

    @cached_property
    def axis_members(self) -> AxisMembers:
        names = [kind.name for kind in self.distinct_kinds]
        return AxisMembers(tuple(names.index(kind.name) for kind in self.kinds))

    @property
    def device_speeds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The compute rate (FLOP/s) and the memory rate (bytes/s) of every device, as measured if known."""
        slow = [self.slowness.get(kind.name, 1.0) for kind in self.kinds]
        rates = [kind.peak_flops_per_s[PRODUCT_TYPE[self.precision]] * kind.efficiency for kind in self.kinds]
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
        """The part of the overlapped reduction that costs the backward nothing."""
        return min(kind.overlap for kind in self.kinds)

    @cached_property
    def _made_values(self) -> dict[object, Any]:
        return {}

    def make_once(self, key: object, made: Callable[[], Found]) -> Found:
        """Return the result of `made`, cached in this setting by `key`, so that repeated layers are priced once."""
        if key not in self._made_values:
            self._made_values[key] = made()
        return cast(Found, self._made_values[key])

    def update_bytes(self, elements: float) -> float:
        """Return the bytes that the norm and the update of these parameter elements move."""
        return optimizer_traffic_bytes(elements, 1.0, self.precision, self.optimizer)

    def stored_bytes(self, elements: int, spec: ParameterSpec) -> tuple[float, float]:
        """Return the bytes of a parameter of this many elements: of state that every device keeps whatever its part,
        and of everything that is sharded with the parameter."""
        counts = (elements, 0) if spec.trainable else (0, elements)
        parts = static_parts(*counts, 1.0, self.precision, self.optimizer)
        shared_bytes = shared_state_bytes(self.optimizer, spec.shape, self.precision, spec.trainable)
        return shared_bytes, fsum(parts.values()) - parts["workspace"]

    @property
    def symbol_sizes(self) -> dict[str, int]:
        return {"B": self.rows, "T": self.tokens, "P": 0}
