"""The inner loop of the search for a steady state, written once for plain Python and for numba.

The state of the search are orders, not times: on every lane the cyclic order of operations in a period, and for each
operation its **turn** k, the number of periods by which it lags behind. The operation starts at x = r + k T, where r is
its position in its lane's period. Dependencies and orders are then differences, x_j >= x_i + w + h T. The minimum
period is the maximum ratio of -w to h over the cycles of the graph that they form. It is found by Newton's iteration:
longest paths at a period that is too small run into a cycle, which gives the next period.
"""

from __future__ import annotations

from typing import Any


def least_period(edges: Any, weight: Any, turns: Any, count: int, x: Any, parent: Any, low: float) -> float:
    """Return the minimum period, at least `low`, for which the differences have a solution; `x` becomes the earliest
    one.

    Edge e says x[edges[e, 1]] >= x[edges[e, 0]] + weight[e] + turns[e] * period, for the first `count` edges. Returns
    -1 if no period is feasible.
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
    """Write the differences of the cyclic orders after the `fixed` ones of the data, and return their number.

    Lane l runs `order[first[l] : first[l + 1]]`.
    """
    count = fixed
    for lane in range(len(first) - 1):
        for position in range(first[lane], first[lane + 1]):
            here = order[position]
            wraps = position + 1 == first[lane + 1]
            after = order[first[lane] if wraps else position + 1]
            edges[count, 0], edges[count, 1] = here, after
            weight[count] = time[here]
            turns[count] = turn[after] - turn[here] - (1 if wraps else 0)
            count += 1
    return count


def fits_limits(order: Any, first: Any, turn: Any, held: Any, most: Any, limit: Any) -> bool:
    """Return whether no lane exceeds its limit: `most` is the memory that an operation needs above the level before
    it."""
    for lane in range(len(first) - 1):
        level = 0.0
        for position in range(first[lane], first[lane + 1]):
            level -= held[order[position]] * turn[order[position]]
        # -turn is the number of times an operation ran before the period's start. A unit's deltas add up to zero, so
        # turns may be counted from any origin.
        for position in range(first[lane], first[lane + 1]):
            node = order[position]
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
    """Swap neighbours of a lane and shift turns; accept a shorter period, and with decreasing probability a longer one.

    `dice` [moves, 4] are uniform numbers. The cost is the period, plus a small share of the time from the first
    operation to node `last`, the latency of a microbatch. Fills the best orders and turns found; returns their cost, or
    -1 if there is none.
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
        position = int(dice[move, 0] * len(order))
        lane = 0
        while first[lane + 1] <= position:
            lane += 1
        begin, stop = first[lane], first[lane + 1]
        moved = order[position]
        kind = 0
        neighbour = position + 1
        if dice[move, 1] < 0.25:
            kind = 1 if dice[move, 2] < 0.5 else -1
            turn[moved] += kind
        elif neighbour == stop:
            if stop - begin < 2:
                continue
            neighbour = begin
            order[position], order[begin] = order[begin], moved
            turn[moved] += 1
            turn[order[position]] -= 1
        else:
            order[position], order[neighbour] = order[neighbour], moved
        accepted = False
        if fits_limits(order, first, turn, held, most, limit):
            count = write_edges(order, first, turn, time, edges, weight, turns, fixed)
            period = least_period(edges, weight, turns, count, x, parent, low)
            if period >= 0:
                fresh = period + share * x[last]
                cooled, luck = 1 - move / moves, dice[move, 3]
                if fresh <= cost + heat * low * (cooled * cooled) * (luck * luck):
                    cost = fresh
                    accepted = True
                    if cost < best - 1e-12:
                        best = cost
                        best_order[:] = order
                        best_turn[:] = turn
        if not accepted:
            if kind != 0:
                turn[moved] -= kind
            elif neighbour == begin and position + 1 == stop:
                turn[order[position]] += 1
                turn[moved] -= 1
                order[begin], order[position] = order[position], moved
            else:
                order[neighbour], order[position] = order[position], moved
    return best
