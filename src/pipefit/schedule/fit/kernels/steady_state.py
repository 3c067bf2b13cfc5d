"""The inner loop of the search for a steady state, written once for plain Python and for numba.

The state of the search are orders, not times: on every lane the cyclic order of operations in a period, and for each
operation its **turn** k, the number of periods by which it lags behind. The operation starts at x = r + k T, where r is
its position in its lane's period. Dependencies and orders are then differences, x_j >= x_i + w + h T. The minimum
period is the maximum ratio of -w to h over the cycles of the graph that they form. It is found by Newton's iteration:
longest paths at a period that is too small run into a cycle, which gives the next period.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class PeriodState(NamedTuple):
    """The orders of a search for a steady state, the data of its operations, and scratch space."""

    order: Any
    "Lane l runs the nodes `order[first[l] : first[l + 1]]`, cyclically."
    first: Any
    turn: Any
    "[node]."
    time: Any
    held: Any
    peak: Any
    "[node]: the memory that it needs above the level before it."
    limit: Any
    "[lane]."
    edges: Any
    "[edge, (source, target)]: the `fixed` dependencies of the data, then those of the orders."
    weight: Any
    turns: Any
    "Edge e says x[edges[e, 1]] >= x[edges[e, 0]] + weight[e] + turns[e] * period."
    x: Any
    "[node]: the earliest starts."
    parent: Any
    fixed: int
    low: float
    "A lower bound on the period."
    last: int
    "The last node of a microbatch."


def least_period(state: Any, count: int) -> float:
    """Return the minimum period, at least `low`, for which the first `count` edges have a solution; `x` becomes the
    earliest one.

    Returns -1 if no period is feasible.
    """
    edges, weight, turns, x, parent = state.edges, state.weight, state.turns, state.x, state.parent
    period: float = state.low
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


def write_edges(state: Any) -> int:
    """Write the edges of the cyclic orders after the fixed ones, and return the number of edges."""
    order, first, turn = state.order, state.first, state.turn
    edges, weight, turns, time = state.edges, state.weight, state.turns, state.time
    count: int = state.fixed
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


def fits_limits(state: Any) -> bool:
    """Return whether no lane exceeds its limit."""
    order, first, turn, held = state.order, state.first, state.turn, state.held
    peak, limit = state.peak, state.limit
    for lane in range(len(first) - 1):
        level = 0.0
        for position in range(first[lane], first[lane + 1]):
            level -= held[order[position]] * turn[order[position]]
        # -turn is the number of times an operation ran before the period's start. A unit's deltas add up to zero, so
        # turns may be counted from any origin.
        for position in range(first[lane], first[lane + 1]):
            node = order[position]
            if level + peak[node] > limit[lane] * (1 + 1e-9):
                return False
            level += held[node]
    return True


def anneal(state: Any, dice: Any, heat: float, best_order: Any, best_turn: Any) -> float:
    """Swap neighbours of a lane and shift turns; accept a shorter period, and with decreasing probability a longer one.

    `dice` [moves, 4] are uniform numbers. The cost is the period, plus a small share of the time from the first
    operation to node `last`, the latency of a microbatch. Fills the best orders and turns found; returns their cost, or
    -1 if there is none.
    """
    order, first, turn, x, last = state.order, state.first, state.turn, state.x, state.last
    share = 1e-3
    count = write_edges(state)
    period = least_period(state, count)
    if period < 0 or not fits_limits(state):
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
        if fits_limits(state):
            count = write_edges(state)
            period = least_period(state, count)
            if period >= 0:
                fresh = period + share * x[last]
                cooled, luck = 1 - move / moves, dice[move, 3]
                if fresh <= cost + heat * state.low * (cooled * cooled) * (luck * luck):
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
