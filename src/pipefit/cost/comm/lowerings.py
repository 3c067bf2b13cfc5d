"""Three lowerings of a collective with uneven parts, each priced over the links of a given device group.

- `padded`: parts are padded to the longest, and the even collective runs (`cost/comm/collectives.py`: rings).
- `grouped`: one broadcast per part, or one reduce per part of a sum, each of its own size. NCCL launches them
  together and sends each part along the ring, so a hop carries every part but one. gloo's broadcasts are binomial
  trees, its reduces a ring and a gather to the root (gloo/broadcast.cc, gloo/reduce.cc).
- `alltoallv`: every device sends every other the part it needs, directly and all at once (NCCL's point-to-point
  pairs; over gloo `run/transfers/comms.py`).

The price of a tensor is a constant plus a sum over rounds of the busiest port's load, which is linear in the parts. The
same figures therefore price a program for given parts and bound the parts in a linear program. If `pipefit profile`
measured an operation, factors multiply latency and bytes. `padded` uses the factors of its ring, the others those of
messages of this size (`cost/comm/direct.py`); a linear program uses the factors of an even cut.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np

from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from pipefit.cost.comm.direct import DirectCurve, SizeCorrection
from pipefit.cost.comm.network import Network, Port, opposite_port
from pipefit.cost.compute.curves import collective_curves
from pipefit.cost.compute.operator_times import CollectiveTime
from pipefit.cost.types import Array
from pipefit.layout import overlap_lengths, split_by_shares

Lowering = Literal["padded", "grouped", "alltoallv"]
LOWERINGS: tuple[Lowering, ...] = ("padded", "grouped", "alltoallv")
"""All lowerings; among equal prices the first one is chosen."""

EVEN: Mapping[str, Callable[[Network, Sequence[Sequence[int]], float], float]] = {
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
    "all_reduce": all_reduce_s,
}
"""Collectives of even parts, and all-reduce, which has no parts."""

GROUPED_OVER_EVEN: Mapping[tuple[str, bool], float] = {
    ("all_gather", True): 9.46 / 9.15,
    ("all_gather", False): 0.815 / 0.550,
    ("reduce_scatter", True): 9.74 / 8.76,
    ("reduce_scatter", False): 0.876 / 0.512,
}
"""(operation, inside a host) -> time of NCCL's grouped calls / time of the even kernel for the same bytes.

From the bandwidths in GB/s that HAP's authors measured on one host and between hosts at 10.4 Gbit/s (profiled constants
in their released code). Used only for clusters without measurements of grouped calls.
"""

GROUPED: Mapping[str, str] = {"all_gather": "broadcasts", "reduce_scatter": "reduces"}
"""Operation names of the grouped calls in `pipefit profile`."""

DIRECT: Mapping[str, tuple[str, Lowering]] = {
    "broadcasts": ("all_gather", "grouped"),
    "reduces": ("reduce_scatter", "grouped"),
    "all_to_all": ("all_gather", "alltoallv"),
}
"""Operation measured by `pipefit profile` -> the collective and lowering with the same messages, with even parts.

The measurement is compared with that lowering; all other operations are compared with a ring.
"""

TURN = 1 / 32
"""Resolution (1/32) at which the reverse-direction load is quantised."""

SplitFractions = tuple[float, ...]
"""The fraction of the split dimension at every position."""

PartMessage = tuple[int, int, int]
"""(source, target, position whose part the message carries)."""


class PortLoads:
    """Port loads of a group, per part of the full tensor.

    Each round has an array [port, position] of seconds per byte, or [port, position, position] for two cuts
    (all-to-all).
    """

    def __init__(self, *loads: Array) -> None:
        self.loads = loads
        self._known: dict[tuple[SplitFractions, ...], float] = {}

    def s_per_byte(self, *parts: SplitFractions) -> float:
        """Return the seconds per byte of the full tensor with these parts (fractions by position; two lists for two
        cuts).
        """
        if parts not in self._known:
            total = 0.0
            for round_load in self.loads:
                load = (round_load * np.asarray(parts[-1])).sum(axis=-1)
                if load.ndim > 1:
                    load = (load * np.asarray(parts[0])).sum(axis=-1)
                total += float(load.max(initial=0.0))
            self._known[parts] = total
        return self._known[parts]

    def exchange_s_per_byte(self, matrix: Array) -> float:
        """Return the seconds per byte of the full tensor if [i, j] of it goes from i to j; for rounds with two cuts."""
        return fsum(float((round_load * matrix).sum(axis=(1, 2)).max(initial=0.0)) for round_load in self.loads)

    def as_lines(self, count: int) -> list[tuple[Array, float]]:
        """Return (load [port, position], constant) of every round as linear functions of the parts of `count` devices.

        Rounds with one cut are linear already; rounds with two cuts are replaced by their tangents at even parts.
        """
        lines: list[tuple[Array, float]] = []
        for round_load in self.loads:
            if round_load.ndim == 2:
                lines.append((round_load, 0.0))
            else:
                constant = -float(round_load.sum(axis=(1, 2)).max(initial=0.0)) / count**2
                lines.append(((round_load.sum(axis=1) + round_load.sum(axis=2)) / count, constant))
        return lines


@dataclass(frozen=True, slots=True)
class LoweredCollective:
    """One lowering of one collective of a tensor."""

    name: Lowering
    constant_s: float
    slope: float
    "Factor of the rounds: bytes of the full tensor; for padding, seconds for n times the longest part."
    rounds: PortLoads
    bend: SizeCorrection | None = None
    "The correction by measurements, if any."

    def lowered_s(self, *parts: SplitFractions) -> float:
        """Return the seconds with these parts: fractions by position; two lists for two cuts."""
        if self.name == "padded" and len(parts) > 1:
            parts = tuple((max(fractions),) * len(fractions) for fractions in parts)
        times = 1.0 if self.bend is None else self.bend.relative_factor(*parts)
        return self.constant_s + self.slope * times * self.rounds.s_per_byte(*parts)


class DuplexLoads:
    """Port loads of an exchange in which traffic in one direction slows down the other.

    Over TCP, the acknowledgements of incoming messages queue behind outgoing messages, which delays further incoming
    messages, and vice versa. If a port serves several connections, windows do not compensate for that (two-way traffic:
    Zhang, Shenker and Clark, SIGCOMM 1991). The size of the effect depends on socket buffers and on shared links, so it
    is measured: even parts load both directions equally and take longer than their links need for one direction. A port
    then serves its own load plus a fraction of the reverse load, at most all of it. Uneven parts use the same fraction.
    The remaining difference is a factor.
    """

    def __init__(self, own: Array, back: Array, one_way: PortLoads) -> None:
        """Take the loads [port, position] or [port, position, position] of the ports (`own`) and of the reverse ports
        (`back`).
        """
        self._own, self._back = own, back
        self._even = _even_loads(own), _even_loads(back)
        self._rounds: dict[int, PortLoads] = {0: one_way}

    def loads_at(self, factor: float) -> tuple[float, PortLoads]:
        """Return (remaining factor, rounds) if even parts take `factor` times their one-way time."""
        carried, back = self._even
        wanted = factor * float(carried.max(initial=0.0))
        slowed = (wanted - carried[back > 0]) / back[back > 0]
        turns = int(min(1.0, max(0.0, float(slowed.min(initial=1.0)))) / TURN)
        if turns not in self._rounds:
            self._rounds[turns] = PortLoads(self._own + turns * TURN * self._back)
        return wanted / float((carried + turns * TURN * back).max(initial=0.0)), self._rounds[turns]


class CollectiveLowerings:
    """The lowerings of collectives on concurrent groups; loads are cached.

    In every other group, each device has the part of the first group's device at its position.
    """

    def __init__(self, network: Network, rings: Sequence[Sequence[int]]) -> None:
        self.network, self.rings = network, tuple(tuple(ring) for ring in rings)
        self.size = len(self.rings[0])
        self._known: dict[tuple[str, Lowering], tuple[float, PortLoads]] = {}
        self._ways: dict[tuple[str, Lowering], DuplexLoads] = {}
        self._padding = PortLoads(self.size * np.eye(self.size))

    def all_of(self, operation: str, total_bytes: float) -> tuple[LoweredCollective, ...]:
        """Return all lowerings of all_gather, reduce_scatter or all_to_all of a tensor with `total_bytes` in all."""
        return tuple(self.one_named(operation, name, total_bytes) for name in LOWERINGS)

    def one_named(self, operation: str, name: Lowering, total_bytes: float) -> LoweredCollective:
        """Return one lowering."""
        if name == "padded" and operation in EVEN:
            once_s, twice_s = (
                EVEN[operation](self.network, self.rings, size) for size in (total_bytes, 2 * total_bytes)
            )
            return LoweredCollective(name, 2 * once_s - twice_s, twice_s - once_s, self._padding)
        if (operation, name) not in self._known:
            self._known[operation, name] = self.plain_lowering(operation, name)
        steps_s, rounds = self._known[operation, name]
        latency, per_byte, bend = self._measured_factors(operation, name, total_bytes)
        if bend is not None and self.network.over_gloo and name != "grouped" and self.size > 1:
            if (operation, name) not in self._ways:
                self._ways[operation, name] = DuplexLoads(*self._duplex_loads(operation), rounds)
            per_byte, rounds = self._ways[operation, name].loads_at(per_byte)
        return LoweredCollective(name, latency * steps_s, per_byte * total_bytes, rounds, bend)

    def reshare_s(self, total_bytes: float, old: Sequence[float], new: Sequence[float]) -> float:
        """Return the seconds to change the shares of a split dimension: each pair sends its overlap directly
        (`reshare`).
        """
        lowering = self.one_named("all_to_all", "alltoallv", total_bytes)
        times = 1.0 if lowering.bend is None else lowering.bend.relative_factor(_as_fractions(old), _as_fractions(new))
        return lowering.constant_s + lowering.slope * times * lowering.rounds.exchange_s_per_byte(
            np.array(overlap_lengths(_share_intervals(old), _share_intervals(new)))
        )

    def collective_time_s(self, operation: str, name: str, total_bytes: float, *parts: SplitFractions) -> float:
        """Return the seconds of one lowering with these parts; an all_reduce has no parts."""
        if operation == "all_reduce":
            return all_reduce_s(self.network, self.rings, total_bytes)
        if name == "padded" and operation in EVEN:
            return EVEN[operation](self.network, self.rings, total_bytes * self.size * max(parts[0]))
        assert name in LOWERINGS, f"no lowering {name!r}"
        return self.one_named(operation, name, total_bytes).lowered_s(*parts)

    def sent_messages(
        self, operation: str, name: str, total_bytes: float, *parts: SplitFractions
    ) -> Iterator[tuple[int, int, float]]:
        """Yield (source, target, bytes) by position for the messages of one lowering; not for a padded ring."""
        n = self.size
        if operation == "reshare":
            both = overlap_lengths(*map(_share_intervals, parts))
            yield from ((i, j, total_bytes * both[i][j]) for i, j in itertools.permutations(range(n), 2) if both[i][j])
            return
        if operation == "all_to_all" and name != "grouped":
            old, new = ((max(fractions),) * n for fractions in parts) if name == "padded" else parts
            yield from ((i, j, total_bytes * old[i] * new[j]) for i, j in itertools.permutations(range(n), 2))
            return
        operation = "all_gather" if operation == "all_to_all" else operation
        for messages, share in self._message_rounds(operation, name):
            yield from ((i, j, total_bytes * share * parts[0][part]) for i, j, part in messages)

    def _measured_factors(
        self, operation: str, name: Lowering, total_bytes: float
    ) -> tuple[float, float, SizeCorrection | None]:
        """Return (latency factor, factor of the seconds per byte of even parts, correction of other parts) for this
        size.
        """
        gathers = "all_gather" if operation == "all_to_all" else operation
        called = GROUPED[gathers] if name == "grouped" else "all_to_all"
        inside = self.network.stays_in_hosts(self.rings)
        curves = _direct_curves(self.network, called, self.size, inside)
        if not curves:
            unknown = name == "grouped" and not self.network.over_gloo
            return 1.0, GROUPED_OVER_EVEN[gathers, inside] if unknown else 1.0, None
        bend = SizeCorrection(
            curves, total_bytes, self.size, 2 if operation == "all_to_all" and name != "grouped" else 1
        )
        return self.network.collective_factors(called, self.size, inside)[0], bend.even_factor, bend

    def plain_lowering(self, operation: str, name: Lowering) -> tuple[float, PortLoads]:
        """Return (latency, port loads) of a lowering from the links alone.

        An all-to-all posts its messages one after another, NCCL's ring has n - 1 consecutive hops, and gloo runs one
        round after another.
        """
        if operation == "all_to_all":
            return self._exchange_rounds() if name != "grouped" else self._grouped_all_gather()
        rounds = self._message_rounds(operation, name)
        steps = fsum(self._latency_s(messages) for messages, _ in rounds)
        if len(rounds) == 1:
            steps *= self.size - 1
        return steps, PortLoads(*(share * self._port_loads(messages, (self.size,)) for messages, share in rounds))

    def _exchange_rounds(self) -> tuple[float, PortLoads]:
        """Return the rounds of an all-to-all between two cuts: each message is a part of a part."""
        pairs = list(itertools.permutations(range(self.size), 2))
        carried = [(i, j, (i, j)) for i, j in pairs]
        steps = (self.size - 1) * self._latency_s([(i, j, i) for i, j in pairs])
        return steps, PortLoads(self._port_loads(carried, (self.size, self.size)))

    def _duplex_loads(self, operation: str) -> tuple[Array, Array]:
        """Return the port loads of an exchange between all pairs, and the reverse loads port by port.

        Shape: [port, position], or [port, position, position] for an all-to-all.
        """
        pairs = list(itertools.permutations(range(self.size), 2))
        if operation == "all_to_all":
            load = self._loads_by_port([(i, j, (i, j)) for i, j in pairs], (self.size, self.size))
        else:
            load = self._loads_by_port(self._message_rounds(operation, "alltoallv")[0][0], (self.size,))
        back = [
            load.get(opposite_port(port, len(self.network.cluster.hosts)), np.zeros_like(port_load))
            for port, port_load in load.items()
        ]
        return np.stack([*load.values()]), np.stack(back)

    def _grouped_all_gather(self) -> tuple[float, PortLoads]:
        """Return the grouped all-to-all: an all-gather of which every device keeps its part."""
        constant, rounds = self.plain_lowering("all_gather", "grouped")
        return constant, PortLoads(
            *(np.repeat(round_load[:, :, None], self.size, axis=2) for round_load in rounds.loads)
        )

    def _message_rounds(self, operation: str, name: str) -> list[tuple[list[PartMessage], float]]:
        """Return the rounds of an all-gather or a reduce-scatter: (concurrent messages, share of a part in each)."""
        n, gathers = self.size, operation == "all_gather"
        if name == "alltoallv":
            return [([(i, j, i if gathers else j) for i, j in itertools.permutations(range(n), 2)], 1.0)]
        if not self.network.over_gloo:  # along the ring, all parts at once: a hop carries all parts but one
            hops = self._ring_hops()
            return [([(*hop, part) for hop in hops for part in range(n) if part != hop[1 if gathers else 0]], 1.0)]
        return [
            message_round
            for root in range(n)
            for message_round in (_binomial_tree(n, root) if gathers else self._gloo_reduce(root))
        ]

    def _gloo_reduce(self, root: int) -> list[tuple[list[PartMessage], float]]:
        """Return one gloo reduce: n - 1 steps of 1/n of the part around the ring, then all other members' parts to the
        root.
        """
        ring = [(b, a, root) for a, b in self._ring_hops()]  # backwards, as gloo's sums go
        gather = [(position, root, root) for position in range(self.size) if position != root]
        return [(ring, 1.0 / self.size)] * (self.size - 1) + [(gather, 1.0 / self.size)]

    def _ring_hops(self) -> list[tuple[int, int]]:
        order = sorted(range(self.size), key=lambda position: self.rings[0][position])
        return list(zip(order, (*order[1:], order[0]), strict=True))

    def _latency_s(self, messages: Iterable[PartMessage]) -> float:
        ends = {(i, j) for i, j, _ in messages}
        return max((self.network.find_link(self.rings[0][i], self.rings[0][j]).latency_s for i, j in ends), default=0.0)

    def _port_loads(self, carried: Iterable[tuple[int, int, int | tuple[int, int]]], shape: tuple[int, ...]) -> Array:
        """Return [port, position] or [port, position, position]: seconds that a byte of a message's part occupies a
        port.
        """
        return _drop_dominated(self._loads_by_port(carried, shape).values(), shape)

    def _loads_by_port(
        self, carried: Iterable[tuple[int, int, int | tuple[int, int]]], shape: tuple[int, ...]
    ) -> dict[Port, Array]:
        """Return the loads of `_port_loads` by port."""
        load: dict[Port, Array] = defaultdict(lambda: np.zeros(shape))
        for i, j, part in carried:
            for ring in self.rings:
                if max(i, j) >= len(ring):  # a smaller concurrent group
                    continue
                link = self.network.find_link(ring[i], ring[j])
                for port, seconds in self.network.port_loads(ring[i], ring[j], 1.0, 1.0 / link.bandwidth_bytes_per_s):
                    load[port][part] += seconds
        return dict(load)


def shard_collective(network: Network, rings: Sequence[Sequence[int]], shares: Sequence[int]) -> CollectiveTime:
    """Return the time function of collectives on shard groups with these shares, for layer costs."""
    known = lowerings_over(network, rings)
    exact = tuple(share / sum(shares) for share in shares)

    def shard_time_s(kind: str, total_bytes: float, how: str = "padded", units: tuple[int, ...] = ()) -> float:
        if kind == "reshare":
            return known.reshare_s(total_bytes, units[: known.size], units[known.size :])
        parts = [
            tuple((stop - start) / max(1, count) for start, stop in split_by_shares(count, shares)) for count in units
        ]
        return known.collective_time_s(kind, how, total_bytes, *(parts or (exact,)))

    return shard_time_s


_OVER: WeakKeyDictionary[Network, dict[tuple[tuple[int, ...], ...], CollectiveLowerings]] = WeakKeyDictionary()


def lowerings_over(network: Network, rings: Sequence[Sequence[int]]) -> CollectiveLowerings:
    """Return the lowerings on these groups, cached for the lifetime of the network."""
    known = _OVER.setdefault(network, {})
    key = tuple(tuple(ring) for ring in rings)
    if key not in known:
        known[key] = CollectiveLowerings(network, key)
    return known[key]


_DIRECT: WeakKeyDictionary[Network, dict[tuple[str, int, bool], tuple[DirectCurve, ...]]] = WeakKeyDictionary()


def _direct_curves(network: Network, called: str, size: int, inside: bool) -> tuple[DirectCurve, ...]:
    """Return the measured curves of a direct collective on groups like this one; none if it was not measured."""
    known, measured = _DIRECT.setdefault(network, {}), network.cluster.measured
    if (called, size, inside) not in known:
        curves = collective_curves(measured, called, network.host, size, inside) if measured else ()
        known[called, size, inside] = tuple(
            direct_curve(network, curve.operation, curve.devices, curve.sizes_bytes, curve.time_s, curve.latency_factor)
            for curve in curves
        )
    return known[called, size, inside]


def direct_curve(
    network: Network,
    called: str,
    devices: Sequence[int],
    sizes_bytes: Sequence[float],
    time_s: Sequence[float],
    latency_factor: float,
) -> DirectCurve:
    """Return the curve of measured times of full tensors with even parts, by the bytes of a part."""
    count = len(devices)
    latency_s, rounds = CollectiveLowerings(network, [devices]).plain_lowering(*DIRECT[called])
    s_per_byte = count * rounds.s_per_byte((1 / count,) * count)
    return DirectCurve(latency_factor * latency_s, [size / count for size in sizes_bytes], time_s, s_per_byte)


def _even_loads(load: Array) -> Array:
    """Return the port loads of even parts."""
    for _ in range(load.ndim - 1):
        load = load.mean(axis=-1)
    return load


def _as_fractions(shares: Sequence[float]) -> SplitFractions:
    total = fsum(shares)
    return tuple(share / total for share in shares)


def _share_intervals(shares: Sequence[float]) -> list[tuple[float, float]]:
    """Return the run of [0, 1] of every position."""
    stops = list(itertools.accumulate(_as_fractions(shares)))
    return list(zip([0.0, *stops[:-1]], stops, strict=True))


def _binomial_tree(size: int, root: int) -> list[tuple[list[PartMessage], float]]:
    """Return the rounds of a binomial tree: in round i every holder sends the part to the position 2^i further."""
    rounds = []
    reach = 1
    while reach < size:
        pairs = [(have, have + reach) for have in range(reach) if have + reach < size]
        rounds.append(([((a + root) % size, (b + root) % size, root) for a, b in pairs], 1.0))
        reach *= 2
    return rounds


def _drop_dominated(rows: Iterable[Array], shape: tuple[int, ...]) -> Array:
    """Return the distinct rows."""
    distinct: dict[bytes, Array] = {row.tobytes(): row for row in rows}
    return np.stack(list(distinct.values())) if distinct else np.zeros((0, *shape))
