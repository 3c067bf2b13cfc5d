"""Moves over placements and simulated annealing: plain functions that `compile` also compiles.

Acceptance: a change that costs d ticks is accepted if d < T x g, where g is drawn from a table of the exponential
distribution. This is the rule of Metropolis et al. 1953 without a call of exp, which two libraries may round
differently.
"""

from __future__ import annotations

from typing import Any

from pipefit.plan.placement.kernels.arena import (
    AIMED,
    ALLOWED,
    ARRIVED,
    BLOCK_OF,
    BLOCK_SLOTS,
    BLOCK_START,
    BLOCK_WIDTH,
    BLOCKS,
    CUT_ROOM,
    DEVICE,
    DEVICES,
    FIRST_LEVEL,
    FLOW_START,
    FLOWS,
    HOST,
    HOSTS,
    KEEPS,
    KIND,
    KINDS,
    LANE_COUNT,
    LEADING,
    LEVELS,
    MATRIX,
    MESSAGE_BUSY,
    MESSAGE_LATENCY,
    MOVED_DEVICE,
    MOVED_SLOT,
    ORDER,
    PER_BYTE,
    RACK_COUNT,
    RACK_DEVICES,
    RACK_SIZE,
    RAIL,
    REPLICAS,
    SHARDS,
    SLOT_OF,
    SLOTS,
    SOURCE,
    TARGET,
    TERM_START,
    TERMS,
    UNTIL,
    VALUE,
    WEIGHT,
    X,
)
from pipefit.plan.placement.kernels.transfer_times import commit, exchange, exchange_back, refresh, slot_cost, would_be

REPAIRS = 16
"""Number of pipelines tried after a device was moved to a lane."""

SWAP, CYCLE, REVERSE, ROTATE, LANES, LANE_RUN, TAILS, RACKS = range(8)
"""Kinds of moves: swap two blocks; cycle three; reverse a run of blocks; rotate a run; swap two lanes; reverse a run of
lanes; swap the tails of two pipelines; swap two racks."""


def draw_integer(random: Any, bound: int) -> int:
    """Return a random number from 0 to bound - 1. Two multiplicative generators (L'Ecuyer 1988), which fit into 63
    bits."""
    random[0] = (random[0] * 40014) % 2147483563
    random[1] = (random[1] * 40692) % 2147483399
    number = random[0] - random[1]
    if number < 1:
        number += 2147483562
    return int(number % bound)


def note_move(count: int, slot: int, device: int, whole: Any, at: Any) -> int:
    """Note that `device` goes to `slot`; return the number of noted entries."""
    whole[at[MOVED_SLOT] + count] = slot
    whole[at[MOVED_DEVICE] + count] = device
    return count + 1


def heaviest_entry(random: Any, whole: Any, at: Any) -> int:
    """Return, of four random entries of x, the one with the largest part of the largest cut; -1 if none has any."""
    entries = 2 * at[FLOWS] + at[TERMS]
    best, largest = -1, 0
    for _ in range(4):
        entry = draw_integer(random, entries)
        part = whole[at[WEIGHT] + entry * at[CUT_ROOM] + at[LEADING]] * whole[at[X] + entry]
        if part > largest:
            best, largest = entry, part
    return best


def slow_slot(random: Any, whole: Any, real: Any, at: Any) -> int:
    """Return a slot with much weight now: an end of a flow's slowest message, or of a collective's slowest hop."""
    flows, best = at[FLOWS], heaviest_entry(random, whole, at)
    if best < 0:
        return draw_integer(random, at[SLOTS])
    if best < 2 * flows:
        flow = best % flows
        slowest, time = whole[at[FLOW_START] + flow], -1
        for message in range(whole[at[FLOW_START] + flow], whole[at[FLOW_START] + flow + 1]):
            ticks = whole[at[MESSAGE_BUSY] + message] + whole[at[MESSAGE_LATENCY] + message]
            if ticks > time:
                slowest, time = message, ticks
        return int(whole[at[SOURCE] + slowest] if draw_integer(random, 2) == 0 else whole[at[TARGET] + slowest])
    return slow_hop(best - 2 * flows, random, whole, real, at)


def slow_hop(term: int, random: Any, whole: Any, real: Any, at: Any) -> int:
    """Return the slot at an end of the slowest hop of one of the rings of this term's lane."""
    lane = 0
    while whole[at[TERM_START] + lane + 1] <= term:
        lane += 1
    first = at[ORDER] + (lane * at[SHARDS] + draw_integer(random, at[SHARDS])) * at[REPLICAS]
    slowest, largest = 0, -1.0
    for i in range(at[REPLICAS]):
        after = i + 1 if i + 1 < at[REPLICAS] else 0
        a, b = whole[at[DEVICE] + whole[first + i]], whole[at[DEVICE] + whole[first + after]]
        from_host, to_host = whole[at[HOST] + a], whole[at[HOST] + b]
        link = (whole[at[MATRIX] + whole[at[RAIL] + a]] * at[HOSTS] + from_host) * at[HOSTS] + to_host
        if from_host != to_host and real[at[PER_BYTE] + link] > largest:
            slowest, largest = i, real[at[PER_BYTE] + link]
    end = (slowest + draw_integer(random, 2)) % at[REPLICAS]
    return int(whole[first + end])


def put_block(count: int, level: int, to: int, source: int, whole: Any, at: Any) -> int:
    """Note that the devices of block `source` go to block `to`."""
    width = whole[at[BLOCK_WIDTH] + level]
    start = whole[at[BLOCK_START] + level]
    for i in range(width):
        device = whole[at[DEVICE] + whole[at[BLOCK_SLOTS] + start + source * width + i]]
        count = note_move(count, whole[at[BLOCK_SLOTS] + start + to * width + i], device, whole, at)
    return count


def swap_blocks(level: int, random: Any, whole: Any, real: Any, at: Any) -> int:
    """Swap two blocks; often one of them is a slow one."""
    blocks = whole[at[BLOCKS] + level]
    if draw_integer(random, 1000) < at[AIMED]:
        a = whole[at[BLOCK_OF] + level * at[DEVICES] + slow_slot(random, whole, real, at)]
    else:
        a = draw_integer(random, blocks)
    b = (a + 1 + draw_integer(random, blocks - 1)) % blocks
    at[ARRIVED] = int(level == 0 and at[SHARDS] == 1)
    return put_block(put_block(0, level, a, b, whole, at), level, b, a, whole, at)


def run_of_blocks(kind: int, level: int, random: Any, whole: Any, at: Any) -> int:
    """Reverse a run of blocks, or move its first part behind its second."""
    blocks = whole[at[BLOCKS] + level]
    length = 2 + draw_integer(random, min(blocks, 24) - 1)
    first = draw_integer(random, blocks - length + 1)
    shift = 1 + draw_integer(random, length - 1)
    count = 0
    for i in range(length):
        offset = length - 1 - i if kind == REVERSE else (i + shift) % length
        count = put_block(count, level, first + i, first + offset, whole, at)
    return count


def move_blocks(kind: int, random: Any, whole: Any, real: Any, at: Any) -> int:
    """Make one of the moves on blocks, at one of their levels."""
    level = 0
    if at[LEVELS] > 1 and draw_integer(random, 1000) >= at[FIRST_LEVEL]:
        level = 1
    blocks = whole[at[BLOCKS] + level]
    if blocks < 2:
        return 0
    if kind == SWAP or blocks < 3:
        return swap_blocks(level, random, whole, real, at)
    if kind == CYCLE:
        a = draw_integer(random, blocks)
        b = (a + 1 + draw_integer(random, blocks - 2)) % blocks
        c = (b + 1 + draw_integer(random, (a - b - 1) % blocks)) % blocks
        count = put_block(0, level, a, b, whole, at)
        count = put_block(count, level, b, c, whole, at)
        return put_block(count, level, c, a, whole, at)
    return run_of_blocks(kind, level, random, whole, at)


def move_lanes(kind: int, random: Any, whole: Any, at: Any) -> int:
    """Swap two lanes, or reverse a run of lanes."""
    width = at[REPLICAS] * at[SHARDS]
    a = draw_integer(random, at[LANE_COUNT])
    b = (a + 1 + draw_integer(random, at[LANE_COUNT] - 1)) % at[LANE_COUNT]
    low, high = min(a, b), max(a, b)
    count = 0
    while low < high:
        for i in range(width):
            count = note_move(count, low * width + i, whole[at[DEVICE] + high * width + i], whole, at)
            count = note_move(count, high * width + i, whole[at[DEVICE] + low * width + i], whole, at)
        low, high = low + 1, high - 1
        if kind == LANES:
            break
    return count


def repair_slot(count: int, slot: int, random: Any, whole: Any, at: Any) -> int:
    """After a device was moved to `slot`: swap it with another pipeline's device on the lane.

    The swap must make the slower of their messages fastest. Up to REPAIRS pipelines are tried. Only if a block is a
    single device.
    """
    lane, replicas = slot // at[REPLICAS], at[REPLICAS]
    device = whole[at[DEVICE] + slot]
    own_ticks = slot_cost(slot, device, whole, at)
    best, gain = -1, 0
    first = draw_integer(random, replicas)
    for i in range(min(replicas, REPAIRS)):
        other_slot = lane * replicas + (first + i) % replicas
        stands = whole[at[DEVICE] + other_slot]
        before = max(own_ticks, slot_cost(other_slot, stands, whole, at))
        if other_slot != slot and before > gain:
            after = max(slot_cost(other_slot, device, whole, at), slot_cost(slot, stands, whole, at))
            if before - after > gain:
                best, gain = other_slot, before - after
    if best < 0:
        return count
    more = note_move(count, slot, whole[at[DEVICE] + best], whole, at)
    more = note_move(more, best, device, whole, at)
    exchange(count, more, whole, at)
    return more


def repair_both(count: int, random: Any, whole: Any, at: Any) -> int:
    """Call `repair_slot` for the two slots of a swap of devices between lanes."""
    first, second = whole[at[MOVED_SLOT]], whole[at[MOVED_SLOT] + 1]
    if first // at[REPLICAS] != second // at[REPLICAS]:
        for slot in (first, second):
            if slot < at[SLOTS]:
                count = repair_slot(count, slot, random, whole, at)
    return count


def move_tails(random: Any, whole: Any, real: Any, at: Any) -> int:
    """Swap the devices of two pipelines from some lane on, or on one lane; often at a slow one.

    Every lane keeps its devices, and so its rings.
    """
    width = at[REPLICAS] * at[SHARDS]
    slot = draw_integer(random, at[SLOTS])
    if draw_integer(random, 1000) < at[AIMED]:
        slot = slow_slot(random, whole, real, at)
    first, a = slot // width, slot % width // at[SHARDS]
    b = (a + 1 + draw_integer(random, at[REPLICAS] - 1)) % at[REPLICAS]
    last = at[LANE_COUNT] if draw_integer(random, 2) == 0 else first + 1
    at[KEEPS] = 1
    count = 0
    for lane in range(first, last):
        for shard in range(at[SHARDS]):
            left, right = lane * width + a * at[SHARDS] + shard, lane * width + b * at[SHARDS] + shard
            count = note_move(count, left, whole[at[DEVICE] + right], whole, at)
            count = note_move(count, right, whole[at[DEVICE] + left], whole, at)
    return count


def move_racks(random: Any, whole: Any, at: Any) -> int:
    """Swap two racks, device by device."""
    a = draw_integer(random, at[RACK_COUNT])
    b = (a + 1 + draw_integer(random, at[RACK_COUNT] - 1)) % at[RACK_COUNT]
    count = 0
    for i in range(at[RACK_SIZE]):
        left = whole[at[RACK_DEVICES] + a * at[RACK_SIZE] + i]
        right = whole[at[RACK_DEVICES] + b * at[RACK_SIZE] + i]
        count = note_move(count, whole[at[SLOT_OF] + left], right, whole, at)
        count = note_move(count, whole[at[SLOT_OF] + right], left, whole, at)
    return count


def propose(random: Any, whole: Any, real: Any, at: Any) -> int:
    """Note a random move in `moved_slot` and `moved_device`; return the number of changed slots, 0 for none."""
    at[KEEPS], at[ARRIVED] = 0, 0
    number = draw_integer(random, 1000)
    kind = 0
    while number >= whole[at[UNTIL] + kind]:
        kind += 1
    if kind == RACKS and at[RACK_COUNT] > 1:
        return move_racks(random, whole, at)
    if kind == TAILS and at[REPLICAS] > 1:
        return move_tails(random, whole, real, at)
    if kind in (LANES, LANE_RUN) and at[LANE_COUNT] > 1:
        return move_lanes(kind, random, whole, at)
    if kind > ROTATE:
        kind = SWAP
    return move_blocks(kind, random, whole, real, at)


def may_move(count: int, whole: Any, at: Any) -> bool:
    """Return whether every device of a noted move is of a kind that its lane allows."""
    width = at[REPLICAS] * at[SHARDS]
    for i in range(count):
        lane = min(whole[at[MOVED_SLOT] + i] // width, at[LANE_COUNT])
        if whole[at[ALLOWED] + lane * at[KINDS] + whole[at[KIND] + whole[at[MOVED_DEVICE] + i]]] == 0:
            return False
    return True


def anneal(
    count: int,
    control: Any,
    random: Any,
    exponential: Any,
    best_device: Any,
    whole: Any,
    real: Any,
    at: Any,
) -> int:
    """Make `count` moves from the current state, and return the final estimate.

    `control`: temperature in ticks (it keeps falling in the next call), factor per move, the best estimate so far (in
    ticks; `best_device` is its placement).
    """
    now = whole[at[VALUE] + at[LEADING]]
    temperature, factor = control[0], control[1]
    for _ in range(count):
        temperature *= factor
        changed = propose(random, whole, real, at)
        if changed == 0 or not may_move(changed, whole, at):
            continue
        exchange(0, changed, whole, at)
        if at[ARRIVED] == 1:
            changed = repair_both(changed, random, whole, at)
        refresh(changed, whole, real, at)
        limit = now + temperature * exponential[draw_integer(random, len(exponential))]
        new = would_be(limit, whole, at)
        if new < limit:
            commit(whole, at)
            now = new
            if new < control[2]:
                control[2] = new
                for slot in range(len(best_device)):
                    best_device[slot] = whole[at[DEVICE] + slot]
        else:
            exchange_back(changed, whole, at)
    control[0] = temperature
    return int(now)
