"""Clusters of several device kinds: patterns of kinds on a grid of replicas and lanes, and rows per replica.

Two patterns are made for every grid: kinds by lane (uneven layers compensate for their speeds) and kinds by replica
(uneven rows do). Any kind may be left out or used in part. With few devices every pattern is tried. With many, each
grid gets the patterns that use the fastest devices first, the largest first, and all kinds in proportion. The best
patterns so far are then rearranged step by step (`neighbour_patterns`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum, gcd


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPatternBudget:
    """The patterns of device kinds and divisions of rows that are tried."""

    listed_patterns: int = 16
    "Largest number of patterns of one grid that are all tried."
    listed_row_divisions: int = 8
    "Largest number of divisions of a microbatch's rows over the replicas that are all tried."
    replica_counts: int = 4
    """Replica counts tried for kinds by replica on many devices: the largest count and its successive halves, this many
    in all."""


KIND_PATTERN_BUDGET = KindPatternBudget()

Pattern = tuple[tuple[int, ...], ...]
"""[lane][replica]: device kind. Equal lanes are the same object."""

Time = Callable[[int, int], float]
"""(kind, rows) -> seconds that one such device takes for all layers of a microbatch."""


@dataclass(frozen=True, slots=True)
class DeviceKinds:
    """The facts about the device kinds of a cluster that patterns depend on."""

    counts: tuple[int, ...]
    "[kind]: places on the grid that its devices can fill."
    fastest: tuple[int, ...]
    "The kinds, the fastest first."
    largest: tuple[int, ...]
    "The kinds by descending memory, the faster first among equals: first lanes hold the most activations."


def device_patterns(
    lanes: int, replicas: int, kinds: DeviceKinds, by_lane: bool = True, by_replica: bool = True
) -> Iterator[Pattern]:
    """Yield distinct patterns for a grid: all if `listed_patterns` allows, else those by lane, by replica, or both."""
    kind_indices = range(len(kinds.counts))
    if len(kinds.counts) ** (lanes * replicas) <= KIND_PATTERN_BUDGET.listed_patterns:
        for cells in itertools.product(kind_indices, repeat=lanes * replicas):
            columns = [cells[replica * lanes : (replica + 1) * lanes] for replica in range(replicas)]
            if columns == sorted(columns) and all(cells.count(kind) <= kinds.counts[kind] for kind in kind_indices):
                yield tuple(zip(*columns, strict=True))
        return
    if by_lane:
        for line in _kind_sequences(lanes, replicas, kinds):
            yield pattern_by_lanes(line, replicas)
    if by_replica:
        for line in _kind_sequences(replicas, lanes, kinds):
            if len({*line}) > 1:
                yield (line,) * lanes


def pattern_by_lanes(line: Sequence[int], replicas: int) -> Pattern:
    """Return the pattern whose lanes have these kinds."""
    alike = {kind: (kind,) * replicas for kind in {*line}}
    return tuple(alike[kind] for kind in line)


def _kind_sequences(places: int, size: int, kinds: DeviceKinds) -> Iterator[tuple[int, ...]]:
    """Yield the kinds of a line of `places`, each of `size` devices; one order for every mix."""
    caps = [count // size for count in kinds.counts]
    for mix in dict.fromkeys(_kind_mixes(places, caps, kinds)):
        yield tuple(kind for kind in kinds.largest for _ in range(mix[kind]))


def _kind_mixes(places: int, caps: Sequence[int], kinds: DeviceKinds) -> Iterator[tuple[int, ...]]:
    """Yield mixes of kinds: the number of places that each kind fills."""
    for order in (kinds.fastest, kinds.largest, *([kind] for kind in kinds.fastest)):
        left, filled_places = places, [0] * len(caps)
        for kind in order:
            filled_places[kind] = min(caps[kind], left)
            left -= filled_places[kind]
        if not left:
            yield tuple(filled_places)
    for size in range(2, len(caps) + 1):
        for chosen in itertools.combinations(kinds.fastest, size):
            if sum(caps[kind] for kind in chosen) >= places:
                parts = divide_proportionally([caps[kind] for kind in chosen], places)
                filled = dict(zip(chosen, parts, strict=True))
                yield tuple(filled.get(kind, 0) for kind in range(len(caps)))


def neighbour_patterns(pattern: Pattern, counts: Sequence[int]) -> Iterator[Pattern]:
    """Yield patterns one step away.

    Two lanes or replicas of different kinds are swapped, one of them changes its kind, or all of a kind move to the
    front or the back. `counts` are the places that each kind can fill.
    """
    lines = [(tuple(line[0] for line in pattern), len(pattern[0]), True)] if _by_lane(pattern) else []
    if all(line == pattern[0] for line in pattern):
        lines.append((pattern[0], len(pattern), False))
    for line, size, is_lane in lines:
        for neighbour in dict.fromkeys(_step_line(line, [count // size for count in counts], is_lane)):
            if neighbour != line:
                yield pattern_by_lanes(neighbour, size) if is_lane else (neighbour,) * size


def _by_lane(pattern: Pattern) -> bool:
    return all(len({*line}) == 1 for line in pattern)


def _step_line(line: tuple[int, ...], caps: Sequence[int], ordered: bool) -> Iterator[tuple[int, ...]]:
    blocks = [(kind, len([*run])) for kind, run in itertools.groupby(line)]
    if ordered and 1 < len(blocks) <= 4:
        for order in itertools.permutations(blocks):
            yield tuple(kind for kind, count in order for _ in range(count))
    edges = [position for position in range(1, len(line)) if line[position - 1] != line[position]]
    for position in {0, len(line) - 1, *edges, *(edge - 1 for edge in edges)}:
        for kind, cap in enumerate(caps):
            if line.count(kind) < cap and kind != line[position]:
                yield (*line[:position], kind, *line[position + 1 :])
    if ordered:
        for edge in edges:
            for partner in (edge - 2, edge + 1):
                if 0 <= partner < len(line):
                    position = edge if partner < edge else edge - 1
                    changed = list(line)
                    changed[position], changed[partner] = line[partner], line[position]
                    yield tuple(changed)


def divide_proportionally(weights: Sequence[int], total: int) -> list[int]:
    """Return integer parts of a total in proportion to weights, by largest remainder. No part exceeds its weight if the
    weights suffice."""
    total_weight = sum(weights)
    parts = [total * weight // total_weight for weight in weights]
    order = sorted(range(len(weights)), key=lambda index: (-(total * weights[index] % total_weight), index))
    for index in order[: total - sum(parts)]:
        parts[index] += 1
    return parts


def replica_counts(lanes: int, counts: Sequence[int], batch: int) -> list[int]:
    """Return the numbers of replicas to try with several kinds in a lane.

    They are the largest possible count for every set of kinds, and its halves; with few devices, every count.
    """
    upper = sum(count // lanes for count in counts)
    if upper <= KIND_PATTERN_BUDGET.listed_patterns // 4:
        return [count for count in range(2, upper + 1) if count <= batch]
    candidates = set()
    for size in range(2, len(counts) + 1):
        for chosen in itertools.combinations(counts, size):
            full_count = sum(count // lanes for count in chosen)
            candidates |= {full_count >> power for power in range(KIND_PATTERN_BUDGET.replica_counts)}
    return sorted(count for count in candidates if 2 <= count <= batch)


def row_shares(columns: Sequence[tuple[int, ...]], rows: int, time_s: Time) -> list[tuple[int, ...]]:
    """Return shares of the replicas in the rows of a microbatch, the most promising first; none if rows are too few.

    `columns` are the kinds of each replica's devices. A replica is as slow as its slowest kind would be for all layers;
    the shares minimise the time of the slowest replica. If there are few divisions, all are returned.
    """
    replicas = len(columns)
    if rows < replicas:
        return []
    best = fastest_rows(columns, rows, time_s)
    splits = [best]
    if comb(rows - 1, replicas - 1) <= KIND_PATTERN_BUDGET.listed_row_divisions:
        splits += _all_splits(columns, rows)
    return [_reduce_shares(split) for split in dict.fromkeys(splits)]


def fastest_rows(columns: Sequence[tuple[int, ...]], rows: int, time_s: Time) -> tuple[int, ...]:
    """Return the rows of every replica, at least one each, that minimise the time of the slowest replica.

    Rows are assigned one by one to the replicas that would finish them first, which is optimal for times that rise with
    the rows. Nine tenths of the share in proportion to speed are assigned at once.
    """
    count: dict[tuple[int, ...], int] = {}
    for column in columns:
        count[column] = count.get(column, 0) + 1

    def time_of_rows(column: tuple[int, ...], number: int) -> float:
        return max(time_s(kind, number) for kind in column)

    even = max(1, rows // len(columns))
    speed = {column: even / time_of_rows(column, even) for column in count}
    total_speed = fsum(speed[column] * number for column, number in count.items())
    rows_of = {column: max(1, int(0.9 * rows * speed[column] / total_speed)) for column in count}
    left = rows - sum(rows_of[column] * number for column, number in count.items())
    last: dict[tuple[int, ...], int] = dict.fromkeys(count, 0)
    while left < 0:  # if the minimum of one row exceeds a replica's proportional part
        column = max(
            (group for group in count if rows_of[group] > 1), key=lambda group: time_of_rows(group, rows_of[group])
        )
        rows_of[column] -= 1
        left += count[column]
    while left > 0:
        column = min(count, key=lambda group: time_of_rows(group, rows_of[group] + 1))
        if count[column] > left:
            last[column] = left
            break
        rows_of[column] += 1
        left -= count[column]
    result = []
    for column in columns:
        more = last[column] > 0
        result.append(rows_of[column] + more)
        last[column] -= more
    return tuple(result)


def _all_splits(columns: Sequence[tuple[int, ...]], rows: int) -> Iterator[tuple[int, ...]]:
    """Yield every division with at least one row per replica; among replicas of one kind the first have the most."""
    for stops in itertools.combinations(range(1, rows), len(columns) - 1):
        split = [stop - start for start, stop in zip((0, *stops), (*stops, rows), strict=True)]
        pairs = list(zip(columns, split, strict=True))
        if all(a[1] >= b[1] for a, b in itertools.pairwise(pairs) if a[0] == b[0]):
            yield tuple(split)


def _reduce_shares(rows: tuple[int, ...]) -> tuple[int, ...]:
    common = gcd(*rows)
    return tuple(share // common for share in rows)


def assign_devices(pattern: Pattern, inner: str, devices: Sequence[Sequence[int]], shards: int) -> tuple[int, ...]:
    """Return the device of every lane, replica and shard.

    Each place takes the next devices of its kind, replica by replica within a lane, or lane by lane within a replica
    (`inner`).
    """
    lanes, replicas = len(pattern), len(pattern[0])
    cells: Iterable[tuple[int, int]] = itertools.product(range(lanes), range(replicas))
    if inner == "stage":
        cells = ((lane, replica) for replica in range(replicas) for lane in range(lanes))
    left: Mapping[int, Iterator[int]] = {kind: iter(members) for kind, members in enumerate(devices)}
    assigned: list[tuple[int, ...]] = [()] * (lanes * replicas)
    for lane, replica in cells:
        assigned[lane * replicas + replica] = tuple(itertools.islice(left[pattern[lane][replica]], shards))
    return tuple(itertools.chain.from_iterable(assigned))
