"""How a tensor lies over a group of devices, and which pieces must move when it lies elsewhere.

A **group** is a grid of devices over named axes, each with shares that may be uneven. A **form** says how a tensor
relates to one axis: `I` everyone has all of it, `G(d)` split along dimension d by the axis's shares, `P` partial
sums. A **layout** is one form per axis. The transfer rule of the whole project lives here: what a device holds is a
box of runs, and a transfer moves the overlaps of the sender's and the receiver's boxes (reference: HAP's three
forms; Metis's uneven replicas; DistTrain's brokers).
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from pipefit.errors import PlanError

Run = tuple[int, int]
"""A half-open interval [start, stop)."""

Box = tuple[Run, ...]
"""One run per dimension of a tensor."""

AxisName = Literal["replica", "shard", "context", "expert"]

FLAT = -1
"""The dimension of a `G` form that splits the tensor's flattened elements (optimizer state under ZeRO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One named direction of a group's grid."""

    name: AxisName
    "`replica` splits rows; `shard` runs one SPMD program together."
    shares: tuple[int, ...]
    "Relative weights, one per position along the axis; (1, 1, 1) is even, (2, 1) gives the first two thirds."

    @property
    def size(self) -> int:
        return len(self.shares)

    @property
    def is_even(self) -> bool:
        return len(set(self.shares)) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A grid of devices, row-major over its axes: the last axis varies fastest."""

    axes: tuple[MeshAxis, ...]
    devices: tuple[int, ...]
    "Indices into the cluster's devices, in grid order."

    @property
    def size(self) -> int:
        return len(self.devices)

    def find_axis(self, name: AxisName) -> MeshAxis:
        """The axis called `name`; an axis that the group does not have is an even one of size 1."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        return MeshAxis(name=name, shares=(1,))

    def device_coordinates(self, device: int) -> tuple[int, ...]:
        """The position of a device along every axis."""
        index = self.devices.index(device)
        place = []
        for axis in reversed(self.axes):
            index, position = divmod(index, axis.size)
            place.append(position)
        return tuple(reversed(place))

    def axis_position(self, device: int, name: AxisName) -> int:
        """The position of a device along the named axis (0 where the group has no such axis)."""
        for axis, place in zip(self.axes, self.device_coordinates(device), strict=True):
            if axis.name == name:
                return place
        return 0

    def axis_positions(self, name: AxisName) -> dict[int, int]:
        """The position of every device along the named axis (0 where the group has no such axis)."""
        at = next((index for index, axis in enumerate(self.axes) if axis.name == name), None)
        places = zip(self.devices, self._grid_coordinates(), strict=True)
        return {device: 0 if at is None else place[at] for device, place in places}

    def devices_along(self, device: int, names: Sequence[AxisName]) -> tuple[int, ...]:
        """The devices that differ from `device` only along the named axes, in grid order (itself included)."""
        own = self.device_coordinates(device)
        free = [axis.name in names for axis in self.axes]
        return tuple(
            other
            for other, place in zip(self.devices, self._grid_coordinates(), strict=True)
            if all(loose or a == b for loose, a, b in zip(free, place, own, strict=True))
        )

    def _grid_coordinates(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(axis.size) for axis in self.axes))


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The relation of a tensor to one axis: text `I`, `P`, `G0`, `G1`, ..., `Gflat`."""

    kind: Literal["I", "G", "P"]
    dim: int | None = None
    "The split dimension of a `G` form; FLAT for the flattened tensor; None otherwise."

    def __str__(self) -> str:
        if self.kind != "G":
            return self.kind
        return "Gflat" if self.dim == FLAT else f"G{self.dim}"


IDENTITY = TensorForm("I")
PARTIAL = TensorForm("P")


def shard_form(dim: int) -> TensorForm:
    """The form `G(dim)`."""
    return TensorForm("G", dim)


def parse_form(text: str) -> TensorForm:
    """The form written as `I`, `P`, `G0` or `Gflat`. Raises PlanError for anything else."""
    match = re.fullmatch(r"(I|P)|G(\d+|flat)", text)
    if match is None:
        raise PlanError("This is not a form.", seen=repr(text), allowed="I, P, G0, G1, ..., Gflat")
    if match[1]:
        return IDENTITY if match[1] == "I" else PARTIAL
    return TensorForm("G", FLAT if match[2] == "flat" else int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """How one tensor lies over one group: a form for each of the group's axes, in the same order."""

    group: int
    "Index into the plan's groups."
    forms: tuple[TensorForm, ...]

    def __str__(self) -> str:
        return f"{self.group}:{','.join(map(str, self.forms))}"


def split_by_shares(length: int, shares: Sequence[int], multiple: int = 1) -> tuple[Run, ...]:
    """Cut [0, length) into one run per share, in proportion, at multiples of `multiple`.

    Largest remainders get the left-over units, the earlier position first on a tie; equal shares of an even length
    give equal runs. Empty runs are allowed. Raises PlanError if `multiple` does not divide `length`.
    """
    if length % multiple:
        raise PlanError("The length is not a multiple of the unit it is split in.", seen=f"{length} by {multiple}")
    units, total = length // multiple, sum(shares)
    exact = [units * share / total for share in shares]
    counts = [math.floor(value + 1e-12) for value in exact]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for index in order[: units - sum(counts)]:
        counts[index] += 1
    stops = [multiple * stop for stop in itertools.accumulate(counts)]
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def overlap_lengths(old: Sequence[tuple[float, float]], new: Sequence[tuple[float, float]]) -> list[list[float]]:
    """[place in old][place in new]: how long what two runs have in common is."""
    return [[max(0, min(a[1], b[1]) - max(a[0], b[0])) for b in new] for a in old]


def held_box(
    shape: Sequence[int],
    group: Mesh,
    forms: Sequence[TensorForm],
    device: int,
    replica_runs: Sequence[Run] | None = None,
) -> Box:
    """The box of a tensor of global `shape` that `device` holds under `forms` (one per axis of `group`).

    Two axes may split the same dimension: the earlier axis splits it first and the later one splits that run.
    `I` and `P` keep the whole run. `Gflat` needs a one-dimensional shape: pass the element count. Where the replicas
    hold what no shares tell (the patches of their own samples), `replica_runs` says it for each of them.
    """
    box: list[Run] = [(0, length) for length in shape]
    for axis, form, place in zip(group.axes, forms, group.device_coordinates(device), strict=True):
        if form.kind == "G":
            assert form.dim is not None
            dim = 0 if form.dim == FLAT else form.dim
            start, stop = box[dim]
            if axis.name == "replica" and replica_runs is not None:
                box[dim] = replica_runs[place]
                continue
            low, high = split_by_shares(stop - start, axis.shares)[place]
            box[dim] = (start + low, start + high)
    return tuple(box)


def intersect_boxes(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None if it is empty."""
    runs = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return runs if all(start < stop for start, stop in runs) else None


def box_size(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


@dataclass(frozen=True, slots=True)
class TransferMove:
    """One message of a transfer: the global box that `source` sends to `target`."""

    source: int
    target: int
    box: Box


def transfer_moves(
    shape: Sequence[int],
    source: Mesh,
    sent: Sequence[TensorForm],
    target: Mesh,
    received: Sequence[TensorForm],
    *,
    sender: int | None = None,
    receiver: int | None = None,
    replica_runs: tuple[Sequence[Run], Sequence[Run]] | None = None,
) -> tuple[TransferMove, ...]:
    """The messages that bring a tensor from layout (source, sent) to layout (target, received); only those of one
    `sender` or one `receiver`, where asked for. `replica_runs`: what the replicas of both sides hold, where their
    shares do not tell (see `held_box`).

    `I` at the sender: every receiver takes each element from exactly one holder, the one at its own position along
    that axis modulo the axis size, so that equal grids give plain point-to-point. `P` on both sides keeps partial
    sums: it needs grids of equal size along that axis, and pairs equal positions. What is no partial sum at the sender
    and one at the receiver goes to position 0 of that axis only: zeros are the other addends. Moves from a device to
    itself are included; the caller makes them a local hand-over. Ordered by target, then source.
    """
    result = []
    single = _single_axes(source, sent, target, received)
    given, taken = replica_runs if replica_runs is not None else (None, None)
    senders: Sequence[int] = source.devices if sender is None else (sender,)
    receivers: Sequence[int] = target.devices if receiver is None else (receiver,)
    if given is not None and taken is not None:
        if sender is not None and _splits_replicas(source, sent):
            receivers = _devices_by_run(target, received, taken, receivers)(
                given[source.axis_position(sender, "replica")]
            )
        if receiver is not None and _splits_replicas(target, received):
            senders = _devices_by_run(source, sent, given, senders)(taken[target.axis_position(receiver, "replica")])
    boxes = {device: held_box(shape, source, sent, device, given) for device in senders}
    alike = _matched_axes(source, sent, target, received)
    places: Mapping[int, int] | None = None
    if given is not None and taken is not None and _splits_replicas(target, received):
        places, near = _cached_positions(target, "replica"), _devices_by_run(source, sent, given, tuple(boxes))
    for device in receivers:
        if any(target.axis_position(device, name) for name in single):
            continue
        want = held_box(shape, target, received, device, taken)
        if box_size(want) == 0:
            continue
        own = [positions[device] % size for _, size, positions in alike]
        for other in boxes if places is None or taken is None else near(taken[places[device]]):
            if all(held[other] == place for (held, _, _), place in zip(alike, own, strict=True)):
                part = intersect_boxes(want, boxes[other])
                if part is not None:
                    result.append(TransferMove(other, device, part))
    return tuple(result)


def _devices_by_run(
    group: Mesh, forms: Sequence[TensorForm], runs: Sequence[Run], devices: Sequence[int]
) -> Callable[[Run], Sequence[int]]:
    """A run -> those of the devices, in their order, whose replica's run may have something in common with it: all
    where replicas hold no runs one behind the other."""
    ends, places = [stop for _, stop in runs], _cached_positions(group, "replica")
    behind = all(one[1] <= two[0] for one, two in pairwise(runs)) and ends == sorted(ends)
    if not behind or not _splits_replicas(group, forms) or not group.axes or group.axes[0].name != "replica":
        return lambda run: devices
    starts, of_replica = [start for start, _ in runs], [list[int]() for _ in runs]
    for device in devices:
        of_replica[places[device]].append(device)

    def devices_near(run: Run) -> list[int]:
        first, last = bisect_right(ends, run[0]), bisect_left(starts, run[1])
        return [device for own in of_replica[first:last] for device in own]

    return devices_near


def _splits_replicas(group: Mesh, forms: Sequence[TensorForm]) -> bool:
    return all(form.kind == "G" for axis, form in zip(group.axes, forms, strict=True) if axis.name == "replica")


@lru_cache(maxsize=256)
def _cached_positions(group: Mesh, name: AxisName) -> Mapping[int, int]:
    return group.axis_positions(name)


def _single_axes(
    source: Mesh, sent: Sequence[TensorForm], target: Mesh, received: Sequence[TensorForm]
) -> list[AxisName]:
    """The axes along which only one position receives."""
    leaving = {axis.name: form.kind for axis, form in zip(source.axes, sent, strict=True)}
    return [
        axis.name
        for axis, form in zip(target.axes, received, strict=True)
        if form.kind == "P" and axis.size > 1 and leaving.get(axis.name) != "P"
    ]


def _matched_axes(
    source: Mesh, sent: Sequence[TensorForm], target: Mesh, received: Sequence[TensorForm]
) -> list[tuple[Mapping[int, int], int, Mapping[int, int]]]:
    """(positions of the senders, axis size, positions of the receivers) along every axis on which a receiver takes from
    one position alone: its own, modulo the size."""
    found: list[tuple[Mapping[int, int], int, Mapping[int, int]]] = []
    arriving = {axis.name: form.kind for axis, form in zip(target.axes, received, strict=True)}
    for axis, form in zip(source.axes, sent, strict=True):
        if form.kind == "G":
            continue
        other = target.find_axis(axis.name)
        if form.kind == "P" and (arriving.get(axis.name) != "P" or other.size != axis.size):
            raise PlanError(
                "Partial sums can only move between equal grids that keep them partial.",
                seen=f"axis {axis.name!r} of size {axis.size} to {other.size}",
                next_step="reduce before the transfer: give the edge a wire layout without P",
            )
        found.append((_cached_positions(source, axis.name), axis.size, _cached_positions(target, axis.name)))
    return found
