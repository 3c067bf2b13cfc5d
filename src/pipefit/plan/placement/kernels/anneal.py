"""Moves over placements and simulated annealing: plain functions that `compile` also compiles.

Acceptance: a change that costs d ticks is accepted if d < T x g, where g is drawn from a table of the exponential
distribution. This is the rule of Metropolis et al. 1953 without a call of exp, which two libraries may round
differently.
"""

from __future__ import annotations

from typing import Any

from pipefit.plan.placement.kernels.tables import (
    ARRIVED,
    KEEPS,
    LEADING,
    HostLinks,
    MoveTable,
    PlanTable,
    SearchState,
    SearchTables,
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


def note_move(count: int, slot: int, device: int, state: SearchState) -> int:
    """Note that `device` goes to `slot`; return the number of noted entries."""
    state.moved_slot[count] = slot
    state.moved_device[count] = device
    return count + 1


def heaviest_entry(random: Any, plan: PlanTable, state: SearchState) -> int:
    """Return, of four random entries of x, the one with the largest part of the largest cut; -1 if none has any."""
    entries = 2 * plan.flows + plan.terms
    best, largest = -1, 0
    for _ in range(4):
        entry = draw_integer(random, entries)
        part = state.weight[entry, state.counters[LEADING]] * state.x[entry]
        if part > largest:
            best, largest = entry, part
    return best


def slow_slot(random: Any, links: HostLinks, plan: PlanTable, state: SearchState) -> int:
    """Return a slot with much weight now: an end of a flow's slowest message, or of a collective's slowest hop."""
    flows, best = plan.flows, heaviest_entry(random, plan, state)
    if best < 0:
        return draw_integer(random, plan.slots)
    if best < 2 * flows:
        flow = best % flows
        slowest, time = plan.flow_start[flow], -1
        for message in range(plan.flow_start[flow], plan.flow_start[flow + 1]):
            ticks = state.message_busy[message] + state.message_latency[message]
            if ticks > time:
                slowest, time = message, ticks
        return int(plan.source[slowest] if draw_integer(random, 2) == 0 else plan.target[slowest])
    return slow_hop(best - 2 * flows, random, links, plan, state)


def slow_hop(term: int, random: Any, links: HostLinks, plan: PlanTable, state: SearchState) -> int:
    """Return the slot at an end of the slowest hop of one of the rings of this term's lane."""
    lane = 0
    while plan.term_start[lane + 1] <= term:
        lane += 1
    first = (lane * plan.shards + draw_integer(random, plan.shards)) * plan.replicas
    slowest, largest = 0, -1.0
    for i in range(plan.replicas):
        after = i + 1 if i + 1 < plan.replicas else 0
        a, b = state.device[state.order[first + i]], state.device[state.order[first + after]]
        from_host, to_host = links.host[a], links.host[b]
        link = links.hop[a] + to_host
        if from_host != to_host and links.per_byte[link] > largest:
            slowest, largest = i, links.per_byte[link]
    end = (slowest + draw_integer(random, 2)) % plan.replicas
    return int(state.order[first + end])


def put_block(count: int, level: int, to: int, source: int, moves: MoveTable, state: SearchState) -> int:
    """Note that the devices of block `source` go to block `to`."""
    width = moves.block_width[level]
    start = moves.block_start[level]
    for i in range(width):
        device = state.device[moves.block_slots[start + source * width + i]]
        count = note_move(count, moves.block_slots[start + to * width + i], device, state)
    return count


def swap_blocks(
    level: int, random: Any, links: HostLinks, plan: PlanTable, moves: MoveTable, state: SearchState
) -> int:
    """Swap two blocks; often one of them is a slow one."""
    blocks = moves.blocks[level]
    if draw_integer(random, 1000) < moves.aimed:
        a = moves.block_of[level * links.devices + slow_slot(random, links, plan, state)]
    else:
        a = draw_integer(random, blocks)
    b = (a + 1 + draw_integer(random, blocks - 1)) % blocks
    state.counters[ARRIVED] = int(level == 0 and plan.shards == 1)
    return put_block(put_block(0, level, a, b, moves, state), level, b, a, moves, state)


def run_of_blocks(kind: int, level: int, random: Any, moves: MoveTable, state: SearchState) -> int:
    """Reverse a run of blocks, or move its first part behind its second."""
    blocks = moves.blocks[level]
    length = 2 + draw_integer(random, min(blocks, 24) - 1)
    first = draw_integer(random, blocks - length + 1)
    shift = 1 + draw_integer(random, length - 1)
    count = 0
    for i in range(length):
        offset = length - 1 - i if kind == REVERSE else (i + shift) % length
        count = put_block(count, level, first + i, first + offset, moves, state)
    return count


def move_blocks(kind: int, random: Any, links: HostLinks, plan: PlanTable, moves: MoveTable, state: SearchState) -> int:
    """Make one of the moves on blocks, at one of their levels."""
    level = 0
    if moves.levels > 1 and draw_integer(random, 1000) >= moves.first_level:
        level = 1
    blocks = moves.blocks[level]
    if blocks < 2:
        return 0
    if kind == SWAP or blocks < 3:
        return swap_blocks(level, random, links, plan, moves, state)
    if kind == CYCLE:
        a = draw_integer(random, blocks)
        b = (a + 1 + draw_integer(random, blocks - 2)) % blocks
        c = (b + 1 + draw_integer(random, (a - b - 1) % blocks)) % blocks
        count = put_block(0, level, a, b, moves, state)
        count = put_block(count, level, b, c, moves, state)
        return put_block(count, level, c, a, moves, state)
    return run_of_blocks(kind, level, random, moves, state)


def move_lanes(kind: int, random: Any, plan: PlanTable, state: SearchState) -> int:
    """Swap two lanes, or reverse a run of lanes."""
    width = plan.replicas * plan.shards
    a = draw_integer(random, plan.lanes)
    b = (a + 1 + draw_integer(random, plan.lanes - 1)) % plan.lanes
    low, high = min(a, b), max(a, b)
    count = 0
    while low < high:
        for i in range(width):
            count = note_move(count, low * width + i, state.device[high * width + i], state)
            count = note_move(count, high * width + i, state.device[low * width + i], state)
        low, high = low + 1, high - 1
        if kind == LANES:
            break
    return count


def repair_slot(count: int, slot: int, random: Any, links: HostLinks, plan: PlanTable, state: SearchState) -> int:
    """After a device was moved to `slot`: swap it with another pipeline's device on the lane.

    The swap must make the slower of their messages fastest. Up to REPAIRS pipelines are tried. Only if a block is a
    single device.
    """
    lane, replicas = slot // plan.replicas, plan.replicas
    device = state.device[slot]
    own_ticks = slot_cost(slot, device, links, plan, state)
    best, gain = -1, 0
    first = draw_integer(random, replicas)
    for i in range(min(replicas, REPAIRS)):
        other_slot = lane * replicas + (first + i) % replicas
        stands = state.device[other_slot]
        before = max(own_ticks, slot_cost(other_slot, stands, links, plan, state))
        if other_slot != slot and before > gain:
            after = max(slot_cost(other_slot, device, links, plan, state), slot_cost(slot, stands, links, plan, state))
            if before - after > gain:
                best, gain = other_slot, before - after
    if best < 0:
        return count
    more = note_move(count, slot, state.device[best], state)
    more = note_move(more, best, device, state)
    exchange(count, more, links, plan, state)
    return more


def repair_both(count: int, random: Any, links: HostLinks, plan: PlanTable, state: SearchState) -> int:
    """Call `repair_slot` for the two slots of a swap of devices between lanes."""
    first, second = state.moved_slot[0], state.moved_slot[1]
    if first // plan.replicas != second // plan.replicas:
        for slot in (first, second):
            if slot < plan.slots:
                count = repair_slot(count, slot, random, links, plan, state)
    return count


def move_tails(random: Any, links: HostLinks, plan: PlanTable, moves: MoveTable, state: SearchState) -> int:
    """Swap the devices of two pipelines from some lane on, or on one lane; often at a slow one.

    Every lane keeps its devices, and so its rings.
    """
    width = plan.replicas * plan.shards
    slot = draw_integer(random, plan.slots)
    if draw_integer(random, 1000) < moves.aimed:
        slot = slow_slot(random, links, plan, state)
    first, a = slot // width, slot % width // plan.shards
    b = (a + 1 + draw_integer(random, plan.replicas - 1)) % plan.replicas
    last = plan.lanes if draw_integer(random, 2) == 0 else first + 1
    state.counters[KEEPS] = 1
    count = 0
    for lane in range(first, last):
        for shard in range(plan.shards):
            left, right = lane * width + a * plan.shards + shard, lane * width + b * plan.shards + shard
            count = note_move(count, left, state.device[right], state)
            count = note_move(count, right, state.device[left], state)
    return count


def move_racks(random: Any, moves: MoveTable, state: SearchState) -> int:
    """Swap two racks, device by device."""
    a = draw_integer(random, moves.rack_count)
    b = (a + 1 + draw_integer(random, moves.rack_count - 1)) % moves.rack_count
    count = 0
    for i in range(moves.rack_size):
        left = moves.rack_devices[a * moves.rack_size + i]
        right = moves.rack_devices[b * moves.rack_size + i]
        count = note_move(count, state.slot_of[left], right, state)
        count = note_move(count, state.slot_of[right], left, state)
    return count


def propose(random: Any, links: HostLinks, plan: PlanTable, moves: MoveTable, state: SearchState) -> int:
    """Note a random move in `moved_slot` and `moved_device`; return the number of changed slots, 0 for none."""
    state.counters[KEEPS], state.counters[ARRIVED] = 0, 0
    number = draw_integer(random, 1000)
    kind = 0
    while number >= moves.until[kind]:
        kind += 1
    if kind == RACKS and moves.rack_count > 1:
        return move_racks(random, moves, state)
    if kind == TAILS and plan.replicas > 1:
        return move_tails(random, links, plan, moves, state)
    if kind in (LANES, LANE_RUN) and plan.lanes > 1:
        return move_lanes(kind, random, plan, state)
    if kind > ROTATE:
        kind = SWAP
    return move_blocks(kind, random, links, plan, moves, state)


def may_move(count: int, links: HostLinks, plan: PlanTable, state: SearchState) -> bool:
    """Return whether every device of a noted move is of a kind that its lane allows."""
    width = plan.replicas * plan.shards
    for i in range(count):
        lane = min(state.moved_slot[i] // width, plan.lanes)
        if plan.allowed[lane * links.kinds + links.kind[state.moved_device[i]]] == 0:
            return False
    return True


def anneal(
    count: int,
    control: Any,
    random: Any,
    exponential: Any,
    best_device: Any,
    tables: SearchTables,
) -> int:
    """Make `count` moves from the current state, and return the final estimate.

    `control`: temperature in ticks (it keeps falling in the next call), factor per move, the best estimate so far (in
    ticks; `best_device` is its placement).
    """
    links, plan, moves, state = tables.links, tables.plan, tables.moves, tables.state
    now = state.value[state.counters[LEADING]]
    temperature, factor = control[0], control[1]
    for _ in range(count):
        temperature *= factor
        changed = propose(random, links, plan, moves, state)
        if changed == 0 or not may_move(changed, links, plan, state):
            continue
        exchange(0, changed, links, plan, state)
        if state.counters[ARRIVED] == 1:
            changed = repair_both(changed, random, links, plan, state)
        refresh(changed, links, plan, state)
        limit = now + temperature * exponential[draw_integer(random, len(exponential))]
        new = would_be(limit, state)
        if new < limit:
            commit(state)
            now = new
            if new < control[2]:
                control[2] = new
                for slot in range(len(best_device)):
                    best_device[slot] = state.device[slot]
        else:
            exchange_back(changed, links, plan, state)
    control[0] = temperature
    return int(now)
