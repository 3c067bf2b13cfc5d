"""The inner loop of the search for a steady state, written once as plain Python and, compiled, under numba.

The state of the search are orders, not times: on every lane the cyclic order in which a period runs its operations, and
for each operation its **turn** k, the number of periods by which it lags behind: it starts at x = r + k T, where r is
its place in its lane's period. Dependencies and orders are then differences, x_j >= x_i + w + h T, and the least period
is the largest ratio of -w to h over the cycles of the graph that they form. It is found by Newton's iteration: longest
paths at a period that is too small run into a cycle, which gives the next.
"""

from __future__ import annotations

from typing import Any


def least_period(edges: Any, weight: Any, turns: Any, count: int, x: Any, parent: Any, low: float) -> float:
    """The least period, at least `low`, for which the differences have a solution; `x` becomes the earliest one.

    Edge e says x[edges[e, 1]] >= x[edges[e, 0]] + weight[e] + turns[e] * period, for the first `count` edges. Returns
    -1 where no period will do.
    """
    period = low
    nodes = len(x)
    for _ in range(200):
        for node in range(nodes):
            x[node] = 0.0
            parent[node] = -1
        last = -1
        for _round in range(nodes + 1):
            last = -1
            for e in range(count):
                source, target = edges[e, 0], edges[e, 1]
                value = x[source] + weight[e] + turns[e] * period
                if value > x[target] + 1e-9 * (1.0 + abs(value)):
                    x[target] = value
                    parent[target] = e
                    last = target
            if last < 0:
                return period
        for _ in range(nodes):
            last = edges[parent[last], 0]
        total, lag, node = 0.0, 0.0, last
        while True:
            e = parent[node]
            total += weight[e]
            lag += turns[e]
            node = edges[e, 0]
            if node == last:
                break
        if lag >= 0:
            return -1.0
        period = total / -lag
    return -1.0


def write_edges(order: Any, first: Any, turn: Any, time: Any, edges: Any, weight: Any, turns: Any, fixed: int) -> int:
    """Write the differences that the cyclic orders mean behind the `fixed` ones of the data; returns their number.

    Lane l runs `order[first[l] : first[l + 1]]`.
    """
    count = fixed
    for lane in range(len(first) - 1):
        for place in range(first[lane], first[lane + 1]):
            here = order[place]
            wraps = place + 1 == first[lane + 1]
            after = order[first[lane] if wraps else place + 1]
            edges[count, 0], edges[count, 1] = here, after
            weight[count] = time[here]
            turns[count] = turn[after] - turn[here] - (1 if wraps else 0)
            count += 1
    return count


def fits_limits(order: Any, first: Any, turn: Any, held: Any, most: Any, limit: Any) -> bool:
    """Whether no lane exceeds its limit: `most` is what an operation needs above the level before it."""
    for lane in range(len(first) - 1):
        level = 0.0
        for place in range(first[lane], first[lane + 1]):
            level -= held[order[place]] * turn[order[place]]
        # -turn is how often an operation ran by the period's start; a unit's deltas add up to zero, so that turns count
        # from anywhere.
        for place in range(first[lane], first[lane + 1]):
            node = order[place]
            if level + most[node] > limit[lane] * (1 + 1e-9):
                return False
            level += held[node]
    return True


def anneal(
    order: Any,
    first: Any,
    turn: Any,
    time: Any,
    held: Any,
    most: Any,
    limit: Any,
    edges: Any,
    weight: Any,
    turns: Any,
    fixed: int,
    low: float,
    last: int,
    dice: Any,
    heat: float,
    x: Any,
    parent: Any,
    best_order: Any,
    best_turn: Any,
) -> float:
    """Swap neighbours of a lane and shift turns; keep what shortens the period, and with falling chance what does not.

    `dice` [moves, 4] are uniform numbers. The cost is the period, and a little of the time from the first operation to
    node `last`, a microbatch's way. Fills the best orders and turns found; returns their cost, -1 if there is none.
    """
    share = 1e-3
    count = write_edges(order, first, turn, time, edges, weight, turns, fixed)
    period = least_period(edges, weight, turns, count, x, parent, low)
    if period < 0 or not fits_limits(order, first, turn, held, most, limit):
        return -1.0
    cost = period + share * x[last]
    best: float = cost
    best_order[:] = order
    best_turn[:] = turn
    moves = len(dice)
    for move in range(moves):
        place = int(dice[move, 0] * len(order))
        lane = 0
        while first[lane + 1] <= place:
            lane += 1
        begin, stop = first[lane], first[lane + 1]
        one = order[place]
        kind = 0
        other_place = place + 1
        if dice[move, 1] < 0.25:
            kind = 1 if dice[move, 2] < 0.5 else -1
            turn[one] += kind
        elif other_place == stop:
            if stop - begin < 2:
                continue
            other_place = begin
            order[place], order[begin] = order[begin], one
            turn[one] += 1
            turn[order[place]] -= 1
        else:
            order[place], order[other_place] = order[other_place], one
        taken = False
        if fits_limits(order, first, turn, held, most, limit):
            count = write_edges(order, first, turn, time, edges, weight, turns, fixed)
            period = least_period(edges, weight, turns, count, x, parent, low)
            if period >= 0:
                fresh = period + share * x[last]
                cooled, luck = 1 - move / moves, dice[move, 3]
                if fresh <= cost + heat * low * (cooled * cooled) * (luck * luck):
                    cost = fresh
                    taken = True
                    if cost < best - 1e-12:
                        best = cost
                        best_order[:] = order
                        best_turn[:] = turn
        if not taken:
            if kind != 0:
                turn[one] -= kind
            elif other_place == begin and place + 1 == stop:
                turn[order[place]] += 1
                turn[one] -= 1
                order[begin], order[place] = order[place], one
            else:
                order[other_place], order[place] = order[place], one
    return best
