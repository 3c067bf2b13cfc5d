"""Building blocks: offsets against the papers' tables, lifespans and peaks by counting, collisions, and the passes
that turn a block into a schedule."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

from pipefit.errors import ScheduleError
from pipefit.schedule import FAMILIES, ScheduleProblem, linear_placement, uniform_costs, vee_placement
from pipefit.schedule.actions import Schedule, format_lanes
from pipefit.schedule.blocks.building_block import BuildingBlock, check_block, draw_block, place_weights
from pipefit.schedule.blocks.passes import name_actions, number_passes, order_slices, repeat_block, squeeze_lanes
from pipefit.schedule.blocks.reorder import peak_held
from pipefit.simulate import simulate_schedule

MODULES = {
    "v-min": "v_min", "v-half": "v_half", "v-zb": "v_zb", "1f1b-v": "one_f_one_b_v", "zb-h1": "zb_h1", "zb-h2": "zb_h2",
}  # fmt: skip


def block_of(name: str, lanes: int) -> BuildingBlock:
    """The block that a family is made of."""
    return import_module(f"pipefit.schedule.families.{MODULES[name]}").block(lanes)


def one_f_one_b(lanes: int) -> BuildingBlock:
    """1F1B as a block, with fused backwards."""
    return BuildingBlock(
        placement=linear_placement(lanes),
        interval=3,
        forward=tuple(range(lanes)),
        backward=tuple(lanes + 2 * (lanes - 1 - i) for i in range(lanes)),
    )


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("lanes", range(1, 33))
def test_blocks_are_in_order_and_collide_nowhere(name: str, lanes: int) -> None:
    block = block_of(name, lanes)
    check_block(block)
    work = 3 * len(block.placement) // lanes
    assert block.interval == work, "a longer interval leaves a bubble in every period, a shorter one collides"
    assert all(len(claims) == 1 for lane in range(lanes) for claims in block.slot_claims(lane)), "every slot is used"


@pytest.mark.parametrize("lanes", range(3, 33))
def test_v_offsets_are_those_of_the_papers_tables(lanes: int) -> None:
    """Tables 8 and 9 of arXiv 2405.15362: hops of (F down, F up, backward up, backward down), and the turns between.
    V-Half's last turn is that of the authors' program (the table has 1); V-Min's second turn for d = 5, 8, ... is
    ours (published: 1), and so are V-ZB's."""
    turn = {0: 3, 1: 1, 2: 5}[lanes % 3]
    tables = {
        "v-min": ((1, 1, 1, 1), (1, turn, 1)),
        "v-half": ((2, 1, 2, 1), (1, 4 if lanes % 2 == 0 else 1, 2)),
        "v-zb": ((4, 2, 4, 2), (1, 1, 1)),
    }
    for name, (hops, turns) in tables.items():
        block = block_of(name, lanes)
        ways = [
            block.forward[:lanes],
            block.forward[lanes:],
            tuple(reversed(block.backward[lanes:])),
            tuple(reversed(block.backward[:lanes])),
        ]
        for way, hop in zip(ways, hops, strict=True):
            assert [b - a for a, b in pairwise(way)] == [hop] * (lanes - 1), name
        assert tuple(after[0] - before[-1] for before, after in pairwise(ways)) == turns, name


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 7, 8, 13])
def test_the_lifespan_bounds_the_peak(lanes: int) -> None:
    """Whatever the number of microbatches, counting units alive in the repeated block never exceeds the bound, and
    with enough of them and one stage a lane it reaches it."""
    for name in MODULES:
        block = block_of(name, lanes)
        for units in (1, lanes, 5 * lanes):
            counted = [peak_held(lane) for lane in repeat_block(block, units)]
            assert all(count <= bound for count, bound in zip(counted, block.peak_bounds, strict=True)), name
        if block.placement == linear_placement(lanes):
            assert tuple(counted) == block.peak_bounds, name


def test_lifespans_of_known_blocks() -> None:
    assert one_f_one_b(4).stage_lifespans == (12, 9, 6, 3)
    assert one_f_one_b(4).peak_bounds == (4, 3, 2, 1)
    assert block_of("zb-h1", 4).stage_lifespans == (12, 12, 12, 12)
    assert block_of("zb-h2", 4).stage_lifespans == (21, 21, 21, 21)
    v_half = block_of("v-half", 5)
    assert v_half.placement == (0, 1, 2, 3, 4, 4, 3, 2, 1, 0)
    assert v_half.stage_lifespans == (30, 30, 24, 24, 18, 15, 12, 9, 6, 3)
    assert v_half.peak_bounds == (6, 6, 6, 6, 6), "long and short lifespans are paired"


def test_the_documented_block_and_drawing() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "schedules.md").read_text()
    source = text.split("```python\n")[1].split("```")[0]
    assert eval(source, {"BuildingBlock": BuildingBlock}) == block_of("v-half", 4)
    clashing = replace(block_of("v-min", 3), backward=(13, 11, 11, 10, 9, 8))
    assert draw_block(clashing) in text


def test_the_v_balances_what_a_loop_does_not() -> None:
    """The same hops on a looped placement: lane 0 would hold the two longest lifespans, the last one the shortest."""
    d = 6
    forward = tuple(range(2 * d))
    backward = tuple(reversed(range(2 * d + 2, 4 * d + 2)))
    v = BuildingBlock(placement=vee_placement(d), interval=6, forward=forward, backward=backward, weight=backward)
    loop = replace(v, placement=(*range(d), *range(d)))
    assert max(v.peak_bounds) - min(v.peak_bounds) <= 1
    assert max(loop.peak_bounds) - min(loop.peak_bounds) == 4
    assert sum(v.peak_bounds) == sum(loop.peak_bounds)


def test_collisions_are_drawn() -> None:
    block = block_of("v-min", 3)
    clashing = replace(block, backward=(13, 11, 11, 10, 9, 8))
    assert block.find_collisions() == () and clashing.find_collisions() == ((1, 5),)
    assert draw_block(block).splitlines()[1] == "  lane 0 0F 0I 5I 5W 0W 5F"
    drawing = [
        "  slot   0  1  2  3  4  5",
        "  lane 0 0F 0I 5I 5W 0W 5F",
        "  lane 1 .  1F 1W 4I 4F >1I|4W<",
        "                        ^^^^^^^",
        "  lane 2 3W 2W 2F 3F 3I 2I",
    ]
    assert draw_block(clashing).splitlines() == drawing
    with pytest.raises(ScheduleError) as caught:
        check_block(replace(clashing, backward=(14, 12, 11, 10, 9, 8)))
    text = caught.value.full_text()
    assert "repeated every 6 slots, they claim one slot" in text and ">" in text and "^^^" in text
    assert "where: lane 0, slot 2" in text and "seen: 5I at 8 and 0I at 14" in text and "differ modulo 6" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"forward": (0, 0)}, r"(?s)stage 1 starts before.*F at 0, the F of stage 0 at 0"),
        ({"backward": (4, 1)}, r"(?s)stage 1 starts before.*backward at 1, its F at 1"),
        ({"backward": (2, 2)}, r"(?s)stage 0 starts before.*backward at 2, the backward of stage 1 at 2"),
        ({"weight": (4, 4)}, r"(?s)stage 0 starts before.*W at 4, its I at 4"),
    ],
)
def test_a_pass_before_what_it_needs_is_named(change: dict[str, tuple[int, ...]], says: str) -> None:
    good = BuildingBlock(placement=(0, 1), interval=3, forward=(0, 1), backward=(4, 2), weight=(5, 6))
    check_block(good)
    with pytest.raises(ScheduleError, match=says):
        check_block(replace(good, **change))


def test_a_fused_backward_takes_two_slots() -> None:
    check_block(one_f_one_b(3))
    early = replace(one_f_one_b(3), backward=(6, 5, 3))
    with pytest.raises(ScheduleError, match=r"(?s)stage 0 starts before.*backward at 6, the backward of stage 1 at 5"):
        check_block(early)
    with pytest.raises(ScheduleError, match=r"(?s)collide.*0F.*0B"):
        check_block(replace(one_f_one_b(1), interval=2))


def test_weights_go_into_the_first_free_slot() -> None:
    block = BuildingBlock(placement=(0, 0), interval=6, forward=(0, 1), backward=(9, 2))
    assert place_weights(block).weight == (11, 4), "the I of stage 1 comes first; slots 0, 1, 2 and 3 are taken"
    for wrong in (replace(block, interval=5), replace(block, backward=(6, 2))):
        with pytest.raises(ScheduleError, match=r"(?s)leave no room for its W.*lane 0.*0F at 0, 0I at"):
            place_weights(wrong)


@pytest.mark.parametrize("name", [*MODULES, "1f1b"])
@pytest.mark.parametrize(("lanes", "units"), [(1, 3), (2, 2), (4, 9), (5, 5), (8, 16)])
def test_squeezed_times_are_the_simulators(name: str, lanes: int, units: int) -> None:
    """Two programs that share nothing: the squeezed slots, and the simulator's start times in unit time."""
    block = one_f_one_b(lanes) if name == "1f1b" else block_of(name, lanes)
    squeezed = squeeze_lanes(repeat_block(block, units), block.placement)
    order = Schedule(
        name=name, placement=block.placement, microbatches=units, slices=1, lanes=name_actions(squeezed, slices=1)
    )
    timeline = simulate_schedule(order, uniform_costs(block.placement))
    for lane, starts in zip(squeezed, timeline.starts_s, strict=True):
        assert [one.start for one in lane] == starts.tolist()


@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 9])
@pytest.mark.parametrize("slices", [1, 2, 3])
def test_1f1b_is_its_block(lanes: int, microbatches: int, slices: int) -> None:
    """The repeated block in order of slots, slices by one delay, is the family that was written by hand."""
    lanes_ = order_slices(repeat_block(one_f_one_b(lanes), microbatches * slices), slices, interval=3)
    by_hand = FAMILIES["1f1b"](
        ScheduleProblem(placement=linear_placement(lanes), microbatches=microbatches, slices=slices)
    )
    assert format_lanes(name_actions(lanes_, slices)) == format_lanes(by_hand.lanes)


def test_numbering_counts_each_sort() -> None:
    assert [one.unit for one in number_passes([("F", 0), ("F", 1), ("F", 0), ("I", 1), ("F", 0)])] == [0, 0, 1, 0, 2]
