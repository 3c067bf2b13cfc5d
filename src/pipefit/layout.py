"""Tensor layouts on device meshes, and the messages that move a tensor from one layout to another.

A mesh is a grid of devices over named axes; the shares of an axis may be uneven. A form is the placement of a tensor
along one axis: `I` replicated, `G(d)` sharded along dimension d by the axis's shares, `P` partial sums (DTensor's
Replicate, Shard(d) and Partial). A layout is one form per axis. A device holds a box of runs, and a transfer moves the
overlaps of the sender's and the receiver's boxes (sources: HAP's three forms; Metis's uneven replicas; DistTrain's
brokers).
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
"""The dimension of a `G` form that shards the flattened tensor (optimizer state under ZeRO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One named axis of a device mesh."""

    name: AxisName
    """`replica`: data parallelism over rows. `context`: parts of sequences. `expert`: data parallelism over rows among
    devices that divide experts. `shard`: tensor parallelism (SPMD)."""
    shares: tuple[int, ...]
    "Relative weights, one per position along the axis: (1, 1, 1) is even, (2, 1) gives the first position two thirds."

    @property
    def size(self) -> int:
        return len(self.shares)

    @property
    def is_even(self) -> bool:
        return len(set(self.shares)) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A grid of devices in row-major order over its axes: the last axis varies fastest."""

    axes: tuple[MeshAxis, ...]
    devices: tuple[int, ...]
    "Indices into the cluster's devices, in grid order."

    @property
    def size(self) -> int:
        return len(self.devices)

    def find_axis(self, name: AxisName) -> MeshAxis:
        """Return the axis called `name`, or an even axis of size 1 if the mesh has none of that name."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        return MeshAxis(name=name, shares=(1,))

    def device_coordinates(self, device: int) -> tuple[int, ...]:
        """Return the position of a device along every axis."""
        index = self.devices.index(device)
        coordinates = []
        for axis in reversed(self.axes):
            index, position = divmod(index, axis.size)
            coordinates.append(position)
        return tuple(reversed(coordinates))

    def axis_position(self, device: int, name: AxisName) -> int:
        """Return the position of a device along the named axis, or 0 if the mesh has no such axis."""
        for axis, position in zip(self.axes, self.device_coordinates(device), strict=True):
            if axis.name == name:
                return position
        return 0

    def axis_positions(self, name: AxisName) -> dict[int, int]:
        """Return the position of every device along the named axis, or 0 for all if the mesh has no such axis."""
        axis_index = next((index for index, axis in enumerate(self.axes) if axis.name == name), None)
        places = zip(self.devices, self._grid_coordinates(), strict=True)
        return {device: 0 if axis_index is None else coordinates[axis_index] for device, coordinates in places}

    def devices_along(self, device: int, names: Sequence[AxisName]) -> tuple[int, ...]:
        """Return the devices that differ from `device` only along the named axes, in grid order, `device` included."""
        home = self.device_coordinates(device)
        free = [axis.name in names for axis in self.axes]
        return tuple(
            candidate
            for candidate, coordinates in zip(self.devices, self._grid_coordinates(), strict=True)
            if all(loose or a == b for loose, a, b in zip(free, coordinates, home, strict=True))
        )

    def groups_along(self, device: int, names: Sequence[AxisName], size: int) -> tuple[tuple[int, ...], ...]:
        """Return the devices of `devices_along` in groups of `size` neighbours (0: one group), each in rising order."""
        members = self.devices_along(device, names)
        step = min(size or len(members), len(members))
        return tuple(tuple(sorted(members[start : start + step])) for start in range(0, len(members), step))

    def spread_along(self, devices: Sequence[int], names: Sequence[AxisName]) -> tuple[int, ...]:
        """Return the devices that differ from one of `devices` only along the named axes."""
        return tuple(dict.fromkeys(reached for device in devices for reached in self.devices_along(device, names)))

    def axis_subsets(self) -> Iterator[tuple[AxisName, ...]]:
        """Yield the names of every non-empty set of axes, smaller sets first."""
        names = [axis.name for axis in self.axes]
        for count in range(1, len(names) + 1):
            yield from itertools.combinations(names, count)

    def _grid_coordinates(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(axis.size) for axis in self.axes))


def home_group(groups: Sequence[tuple[int, ...]], device: int) -> tuple[int, ...]:
    """Return the group that holds the device."""
    return next(group for group in groups if device in group)


def group_peers(groups: Sequence[tuple[int, ...]], device: int) -> tuple[int, ...]:
    """Return the devices at the position of `device` in every group of equal size, itself included."""
    position = home_group(groups, device).index(device)
    return tuple(group[position] for group in groups)


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The placement of a tensor along one mesh axis: text `I`, `P`, `G0`, `G1`, ..., `Gflat`."""

    kind: Literal["I", "G", "P"]
    dim: int | None = None
    "The sharded dimension of a `G` form; FLAT for the flattened tensor; None otherwise."

    def __str__(self) -> str:
        if self.kind != "G":
            return self.kind
        return "Gflat" if self.dim == FLAT else f"G{self.dim}"


IDENTITY = TensorForm("I")
PARTIAL = TensorForm("P")


def shard_form(dim: int) -> TensorForm:
    """Return the form `G(dim)`."""
    return TensorForm("G", dim)


def parse_form(text: str) -> TensorForm:
    """Return the form written as `I`, `P`, `G0` or `Gflat`. Raises PlanError for any other text."""
    match = re.fullmatch(r"(I|P)|G(\d+|flat)", text)
    if match is None:
        raise PlanError("This is not a form.", seen=repr(text), allowed="I, P, G0, G1, ..., Gflat")
    if match[1]:
        return IDENTITY if match[1] == "I" else PARTIAL
    return TensorForm("G", FLAT if match[2] == "flat" else int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """The layout of one tensor on one mesh: a form for each mesh axis, in the order of the axes."""

    group: int
    "Index into the plan's groups."
    forms: tuple[TensorForm, ...]

    def __str__(self) -> str:
        return f"{self.group}:{','.join(map(str, self.forms))}"


def split_by_shares(length: int, shares: Sequence[int], multiple: int = 1) -> tuple[Run, ...]:
    """Cut [0, length) into one run per share, in proportion to the shares, at multiples of `multiple`.

    Left-over units go to the largest remainders, on a tie to the earlier position. Equal shares of an even length give
    equal runs. Runs may be empty. Raises PlanError if `multiple` does not divide `length`.
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


def zigzag_runs(length: int, parts: int) -> tuple[tuple[Run, Run], ...]:
    """Return for each part of a sequence its two chunks, the i-th and the i-th last of 2 x parts equal chunks.

    The parts have equally many pairs of a token and an earlier one (zig-zag order: Llama 3, 2024, section 3.3.2).
    Raises PlanError if the chunks are not equal.
    """
    if length % (2 * parts):
        raise PlanError("The length does not divide into the chunks.", seen=f"{length} into {2 * parts}")
    size = length // (2 * parts)
    return tuple(
        ((part * size, (part + 1) * size), (length - (part + 1) * size, length - part * size)) for part in range(parts)
    )


def overlap_lengths(old: Sequence[tuple[float, float]], new: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Return the matrix [index in old][index in new] of the lengths of the runs' intersections."""
    return [[max(0, min(a[1], b[1]) - max(a[0], b[0])) for b in new] for a in old]


def held_box(
    shape: Sequence[int],
    group: Mesh,
    forms: Sequence[TensorForm],
    device: int,
    replica_runs: Sequence[Run] | None = None,
) -> Box:
    """Return the box of a tensor of global `shape` that `device` holds under `forms` (one per axis of `group`).

    If two axes shard the same dimension, the earlier axis splits it and the later axis splits the resulting run. `I`
    and `P` keep the full run. `Gflat` needs a one-dimensional shape: pass the element count. `replica_runs` gives the
    run of each replica where shares do not determine it (patches of the replica's own samples).
    """
    box: list[Run] = [(0, length) for length in shape]
    for axis, form, position in zip(group.axes, forms, group.device_coordinates(device), strict=True):
        if form.kind == "G":
            assert form.dim is not None
            dim = 0 if form.dim == FLAT else form.dim
            start, stop = box[dim]
            if axis.name == "replica" and replica_runs is not None:
                box[dim] = replica_runs[position]
                continue
            low, high = split_by_shares(stop - start, axis.shares)[position]
            box[dim] = (start + low, start + high)
    return tuple(box)


def intersect_boxes(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    runs = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return runs if all(start < stop for start, stop in runs) else None


def box_size(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def flat_boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes whose concatenated elements are the elements start to stop of a tensor in row-major order."""
    if start >= stop:
        return
    if not sizes:
        yield ()
        return
    rest = sizes[1:]
    inner = math.prod(rest)
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        yield from (((first, first + 1), *box) for box in flat_boxes(rest, head, tail))
        return
    if head:
        yield from (((first, first + 1), *box) for box in flat_boxes(rest, head, inner))
        first += 1
    if first < last:
        yield ((first, last), *((0, length) for length in rest))
    yield from (((last, last + 1), *box) for box in flat_boxes(rest, 0, tail))


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
    """Return the messages that bring a tensor from layout (source, sent) to layout (target, received).

    With `sender` or `receiver`, only the messages of that device are returned. `replica_runs`: the runs of the replicas
    on both sides, where shares do not determine them (see `held_box`).

    `I` at the sender: a receiver takes each element from one holder, the one at its own position along that axis
    modulo the axis size. Equal grids therefore give plain point-to-point messages. `P` on both sides keeps partial
    sums: it needs grids of equal size along that axis and pairs equal positions. A tensor that becomes `P` only at
    the receiver goes to position 0 of that axis; the other addends are zero. Moves from a device to itself are
    included; the caller makes them a local hand-over. Ordered by target, then source.
    """
    result = []
    single = _single_axes(source, sent, target, received)
    sender_runs, receiver_runs = replica_runs if replica_runs is not None else (None, None)
    senders: Sequence[int] = source.devices if sender is None else (sender,)
    receivers: Sequence[int] = target.devices if receiver is None else (receiver,)
    if sender_runs is not None and receiver_runs is not None:
        if sender is not None and _splits_replicas(source, sent):
            receivers = _devices_by_run(target, received, receiver_runs, receivers)(
                sender_runs[source.axis_position(sender, "replica")]
            )
        if receiver is not None and _splits_replicas(target, received):
            senders = _devices_by_run(source, sent, sender_runs, senders)(
                receiver_runs[target.axis_position(receiver, "replica")]
            )
    boxes = {device: held_box(shape, source, sent, device, sender_runs) for device in senders}
    alike = _matched_axes(source, sent, target, received)
    places: Mapping[int, int] | None = None
    if sender_runs is not None and receiver_runs is not None and _splits_replicas(target, received):
        places, near = _cached_positions(target, "replica"), _devices_by_run(source, sent, sender_runs, tuple(boxes))
    for device in receivers:
        if any(target.axis_position(device, name) for name in single):
            continue
        want = held_box(shape, target, received, device, receiver_runs)
        if box_size(want) == 0:
            continue
        wanted_positions = [positions[device] % size for _, size, positions in alike]
        for holder in boxes if places is None or receiver_runs is None else near(receiver_runs[places[device]]):
            if all(held[holder] == position for (held, _, _), position in zip(alike, wanted_positions, strict=True)):
                part = intersect_boxes(want, boxes[holder])
                if part is not None:
                    result.append(TransferMove(holder, device, part))
    return tuple(result)


def _devices_by_run(
    group: Mesh, forms: Sequence[TensorForm], runs: Sequence[Run], devices: Sequence[int]
) -> Callable[[Run], Sequence[int]]:
    """Return a function from a run to the devices, in their order, whose replica's run may overlap it.

    All devices are returned unless the runs of the replicas are disjoint and ascending.
    """
    ends, places = [stop for _, stop in runs], _cached_positions(group, "replica")
    behind = all(left[1] <= right[0] for left, right in pairwise(runs)) and ends == sorted(ends)
    if not behind or not _splits_replicas(group, forms) or not group.axes or group.axes[0].name != "replica":
        return lambda run: devices
    starts, of_replica = [start for start, _ in runs], [list[int]() for _ in runs]
    for device in devices:
        of_replica[places[device]].append(device)

    def devices_near(run: Run) -> list[int]:
        first, last = bisect_right(ends, run[0]), bisect_left(starts, run[1])
        return [device for members in of_replica[first:last] for device in members]

    return devices_near


def _splits_replicas(group: Mesh, forms: Sequence[TensorForm]) -> bool:
    return all(form.kind == "G" for axis, form in zip(group.axes, forms, strict=True) if axis.name == "replica")


@lru_cache(maxsize=256)
def _cached_positions(group: Mesh, name: AxisName) -> Mapping[int, int]:
    return group.axis_positions(name)


def _single_axes(
    source: Mesh, sent: Sequence[TensorForm], target: Mesh, received: Sequence[TensorForm]
) -> list[AxisName]:
    """Return the axes along which only position 0 receives."""
    leaving = {axis.name: form.kind for axis, form in zip(source.axes, sent, strict=True)}
    return [
        axis.name
        for axis, form in zip(target.axes, received, strict=True)
        if form.kind == "P" and axis.size > 1 and leaving.get(axis.name) != "P"
    ]


def _matched_axes(
    source: Mesh, sent: Sequence[TensorForm], target: Mesh, received: Sequence[TensorForm]
) -> list[tuple[Mapping[int, int], int, Mapping[int, int]]]:
    """Return (sender positions, axis size, receiver positions) of every axis whose positions are matched one to one.

    Along such an axis a receiver takes the tensor only from its own position modulo the size.
    """
    matched: list[tuple[Mapping[int, int], int, Mapping[int, int]]] = []
    arriving = {axis.name: form.kind for axis, form in zip(target.axes, received, strict=True)}
    for axis, form in zip(source.axes, sent, strict=True):
        if form.kind == "G":
            continue
        target_axis = target.find_axis(axis.name)
        if form.kind == "P" and (arriving.get(axis.name) != "P" or target_axis.size != axis.size):
            raise PlanError(
                "Partial sums can only move between equal grids that keep them partial.",
                seen=f"axis {axis.name!r} of size {axis.size} to {target_axis.size}",
                next_step="reduce before the transfer: give the edge a wire layout without P",
            )
        matched.append((_cached_positions(source, axis.name), axis.size, _cached_positions(target, axis.name)))
    return matched
