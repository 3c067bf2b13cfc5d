"""Layouts against plain counting: every element that is wanted arrives exactly once, whatever the shares."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.errors import PlanError
from pipefit.layout import (
    FLAT,
    IDENTITY,
    PARTIAL,
    Mesh,
    MeshAxis,
    TensorForm,
    TensorLayout,
    box_size,
    held_box,
    intersect_boxes,
    parse_form,
    shard_form,
    split_by_shares,
    transfer_moves,
)

shares = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def group(replicas: tuple[int, ...], shards: tuple[int, ...] = (1,), first: int = 0) -> Mesh:
    axes = (MeshAxis(name="replica", shares=replicas), MeshAxis(name="shard", shares=shards))
    size = len(replicas) * len(shards)
    return Mesh(axes=axes, devices=tuple(range(first, first + size)))


@given(length=st.integers(0, 200), parts=shares)
def test_split_covers_the_length_in_order_and_in_proportion(length: int, parts: tuple[int, ...]) -> None:
    runs = split_by_shares(length, parts)
    assert [i for start, stop in runs for i in range(start, stop)] == list(range(length))
    for (start, stop), share in zip(runs, parts, strict=True):
        assert abs((stop - start) - length * share / sum(parts)) < 1


@given(units=st.integers(0, 50), multiple=st.integers(1, 8), parts=shares)
def test_split_cuts_at_multiples(units: int, multiple: int, parts: tuple[int, ...]) -> None:
    runs = split_by_shares(units * multiple, parts, multiple)
    assert all(start % multiple == 0 and stop % multiple == 0 for start, stop in runs)
    assert [(a // multiple, b // multiple) for a, b in runs] == list(split_by_shares(units, parts))


def test_split_says_what_does_not_divide() -> None:
    with pytest.raises(PlanError, match="not a multiple of the unit") as error:
        split_by_shares(10, (1, 1), 4)
    assert "10 by 4" in str(error.value)


def test_split_gives_left_over_units_to_the_largest_remainder_then_the_first() -> None:
    assert split_by_shares(5, (1, 1)) == ((0, 3), (3, 5))
    assert split_by_shares(7, (2, 1)) == ((0, 5), (5, 7))
    assert split_by_shares(1, (1, 1, 1)) == ((0, 1), (1, 1), (1, 1))


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)), replicas=shares, shards=shares, dims=st.permutations([0, 1])
)
def test_holdings_of_split_forms_tile_the_tensor(
    shape: tuple[int, int], replicas: tuple[int, ...], shards: tuple[int, ...], dims: list[int]
) -> None:
    grid = group(replicas, shards)
    count = np.zeros(shape, dtype=int)
    for device in grid.devices:
        box = held_box(shape, grid, (shard_form(dims[0]), shard_form(dims[1])), device)
        count[tuple(slice(*run) for run in box)] += 1
    assert (count == 1).all()


@given(length=st.integers(1, 40), replicas=shares, shards=shares)
def test_two_axes_may_split_one_dimension(length: int, replicas: tuple[int, ...], shards: tuple[int, ...]) -> None:
    grid = group(replicas, shards)
    boxes = [held_box((length,), grid, (shard_form(0), shard_form(0)), device)[0] for device in grid.devices]
    assert [i for start, stop in boxes for i in range(start, stop)] == list(range(length))


def test_whole_and_partial_tensors_are_held_whole() -> None:
    grid = group((1, 1), (1, 1))
    for device in grid.devices:
        assert held_box((4, 6), grid, (IDENTITY, PARTIAL), device) == ((0, 4), (0, 6))


@given(data=st.data())
def test_moves_bring_every_wanted_element_exactly_once(data: st.DataObject) -> None:
    """Between random uneven groups, each axis whole or split: independent count over a numpy array."""
    shape = data.draw(st.tuples(st.integers(1, 8), st.integers(1, 6)))
    source = group(data.draw(shares), data.draw(shares))
    target = group(data.draw(shares), data.draw(shares), first=data.draw(st.integers(0, 30)))
    forms = st.sampled_from([IDENTITY, shard_form(0), shard_form(1)])
    sent, received = data.draw(st.tuples(forms, forms)), data.draw(st.tuples(forms, forms))
    got = {device: np.zeros(shape, dtype=int) for device in target.devices}
    for move in transfer_moves(shape, source, sent, target, received):
        assert box_size(move.box) > 0
        assert intersect_boxes(move.box, held_box(shape, source, sent, move.source)) == move.box, (
            "sent what it does not hold"
        )
        got[move.target][tuple(slice(*run) for run in move.box)] += 1
    for device in target.devices:
        want = np.zeros(shape, dtype=int)
        want[tuple(slice(*run) for run in held_box(shape, target, received, device))] = 1
        assert (got[device] == want).all()


@given(replicas=shares, shards=shares)
def test_equal_grids_and_forms_give_plain_point_to_point(replicas: tuple[int, ...], shards: tuple[int, ...]) -> None:
    source, target = group(replicas, shards), group(replicas, shards, first=100)
    found = transfer_moves((60, 7), source, (shard_form(0), PARTIAL), target, (shard_form(0), PARTIAL))
    assert [(m.source + 100, m.target) for m in found] == [(d, d) for d in target.devices if _rows(target, d)]


def _rows(grid: Mesh, device: int) -> int:
    (start, stop), _ = held_box((60, 7), grid, (shard_form(0), IDENTITY), device)
    return stop - start


def test_partial_sums_only_move_between_equal_grids() -> None:
    with pytest.raises(PlanError, match="Partial sums can only move between equal grids") as error:
        transfer_moves((4, 4), group((1,), (1, 1)), (IDENTITY, PARTIAL), group((1,), (1, 1, 1)), (IDENTITY, PARTIAL))
    assert "reduce before the transfer" in str(error.value)
    with pytest.raises(PlanError, match="Partial sums"):
        transfer_moves((4, 4), group((1,), (1, 1)), (IDENTITY, PARTIAL), group((1,), (1, 1)), (IDENTITY, IDENTITY))


@pytest.mark.parametrize("text", ["I", "P", "G0", "G3", "Gflat"])
def test_forms_print_and_parse(text: str) -> None:
    assert str(parse_form(text)) == text


def test_gflat_is_the_flat_dimension() -> None:
    assert parse_form("Gflat") == TensorForm("G", FLAT)
    assert held_box((10,), group((2, 1)), (parse_form("Gflat"), IDENTITY), 0) == ((0, 7),)


@pytest.mark.parametrize("text", ["", "G", "X0", "g0", "Gx", "I0"])
def test_other_texts_are_no_forms(text: str) -> None:
    with pytest.raises(PlanError, match="This is not a form"):
        parse_form(text)


def test_groups_know_places_and_neighbours() -> None:
    grid = Mesh(
        axes=(MeshAxis(name="replica", shares=(1, 1)), MeshAxis(name="shard", shares=(1, 1, 1))),
        devices=(9, 4, 7, 1, 0, 3),
    )
    assert [grid.device_coordinates(d) for d in grid.devices] == list(itertools.product(range(2), range(3)))
    assert grid.devices_along(4, ("replica",)) == (4, 0)
    assert grid.devices_along(4, ("shard",)) == (9, 4, 7)
    assert grid.devices_along(4, ("replica", "shard")) == grid.devices
    assert grid.axis_position(1, "shard") == 0 and grid.axis_position(1, "context") == 0
    assert grid.find_axis("expert").shares == (1,) and prod(a.size for a in grid.axes) == grid.size


def test_layouts_print_their_forms() -> None:
    assert str(TensorLayout(group=2, forms=(shard_form(0), PARTIAL))) == "2:G0,P"


def test_moves_of_one_device_are_its_part_of_all_moves_with_runs_of_their_own() -> None:
    """Replicas hold runs that no shares tell, some of them empty."""
    one = Mesh(
        axes=(MeshAxis(name="replica", shares=(1,) * 3), MeshAxis(name="shard", shares=(1, 1))), devices=tuple(range(6))
    )
    two = Mesh(axes=(MeshAxis(name="replica", shares=(1,) * 4),), devices=(6, 7, 8, 9))
    runs = (((0, 5), (5, 5), (5, 9)), ((0, 2), (2, 2), (2, 8), (8, 9)))
    shape, sent, received = (1, 9, 4), (shard_form(1), IDENTITY), (shard_form(1),)
    every = transfer_moves(shape, one, sent, two, received, replica_runs=runs)
    assert [(move.source, move.target, move.box[1]) for move in every] == [
        (0, 6, (0, 2)),
        (0, 8, (2, 5)),
        (4, 8, (5, 8)),
        (4, 9, (8, 9)),
    ]
    for device in one.devices:
        own = transfer_moves(shape, one, sent, two, received, sender=device, replica_runs=runs)
        assert own == tuple(move for move in every if move.source == device)
    for device in two.devices:
        own = transfer_moves(shape, one, sent, two, received, receiver=device, replica_runs=runs)
        assert own == tuple(move for move in every if move.target == device)


@given(st.data())
def test_moves_between_runs_are_those_of_every_pair_of_replicas(data: st.DataObject) -> None:
    """Runs one behind the other, some of them empty, on grids of unlike sizes: every pair compared by hand."""
    length = data.draw(st.integers(1, 24))
    groups, runs = list[Mesh](), list[tuple[tuple[int, int], ...]]()
    for first in (0, 10):
        cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=7)))
        runs.append(tuple(itertools.pairwise((0, *cuts, length))))
        groups.append(group((1,) * len(runs[-1]), first=first))
    forms = (shard_form(1), IDENTITY)
    found = transfer_moves((1, length), groups[0], forms, groups[1], forms, replica_runs=(runs[0], runs[1]))
    wanted = [
        (source, target, (max(has[0], want[0]), min(has[1], want[1])))
        for target, want in zip(groups[1].devices, runs[1], strict=True)
        for source, has in zip(groups[0].devices, runs[0], strict=True)
        if max(has[0], want[0]) < min(has[1], want[1])
    ]
    assert [(move.source, move.target, move.box[1]) for move in found] == wanted
