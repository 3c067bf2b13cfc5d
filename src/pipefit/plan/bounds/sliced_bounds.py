"""Closed forms for sliced candidates: lower bounds of the step time and of the memory of lanes.

The unit of work is a slice. The slices of a microbatch run forward in ascending and backward in descending order. So
the first action of a stage is slice 0 of a microbatch, and with fused backward passes so is its last one:

- a lane waits for one slice 0 to pass forward through the stages before its first one, runs all slices of m
  microbatches, and then one slice 0 passes back;
- after the last forward of a stage, a last slice, that slice goes to the end of the pipeline, and all slices of its
  microbatch come back one after another;
- before the first backward of a stage, a last slice, all slices of a microbatch reach the end of the pipeline, and the
  last one comes back.

With one slice these are the bounds of `plan/bounds/step_bounds.py`. Tests compare all of them with the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from pipefit.cost.portable import whole_power
from pipefit.cost.types import Array
from pipefit.schedule.families import family_facts


def sliced_bound_s(
    forward_s: Array,
    backward_s: Array,
    placement: Sequence[int],
    microbatches: int,
    fused: bool,
    ahead_s: Array | None = None,
    back_s: Array | None = None,
    left_s: Array | None = None,
) -> float:
    """Return a lower bound of the time of a chain under any order.

    Arrays are [slice, stage]; transfers are [slice, edge], edge e between stages e and e + 1. `left_s` of each stage
    follows its last backward.
    """
    slices, stages = forward_s.shape
    ahead = np.zeros((slices, stages - 1)) if ahead_s is None else ahead_s
    back = np.zeros((slices, stages - 1)) if back_s is None else back_s
    lanes = np.asarray(placement)
    forward, backward = forward_s.sum(axis=0), backward_s.sum(axis=0)
    heads = _prefix_paths_s(forward_s[0], ahead[0])
    tails = _prefix_paths_s(backward_s[0], back[0]) if fused else np.zeros(stages)
    first = np.array([placement.index(lane) for lane in range(max(placement) + 1)])
    loads = np.bincount(lanes, weights=forward + backward)
    bound = float((heads[first] + microbatches * loads + tails[first]).max())
    if left_s is not None:
        bound = max(bound, float((heads + microbatches * (forward + backward) + left_s).max()))
    if fused:
        onward, homeward = _suffix_paths_s(forward_s[-1], ahead[-1]), _suffix_paths_s(backward_s[-1], back[-1])
        there = float((heads + forward + onward).max())
        home = float((homeward + backward + tails).max())
        bound = max(bound, float((heads + microbatches * forward + onward).max()) + home)
        bound = max(bound, there + float((homeward + microbatches * backward + tails).max()))
    return bound


def _prefix_paths_s(times_s: Array, edges_s: Array) -> Array:
    """Return, for every stage, the time through the stages before it."""
    return np.concatenate(([0.0], np.cumsum(times_s[:-1] + edges_s)))


def _suffix_paths_s(times_s: Array, edges_s: Array) -> Array:
    """Return, for every stage, the time through the stages after it."""
    return np.concatenate((np.cumsum((times_s[1:] + edges_s)[::-1])[::-1], [0.0]))


def min_sliced_in_flight(
    schedule: str, placement: Sequence[int], microbatches: int, slices: Sequence[int]
) -> tuple[float, ...]:
    """Return the least number of stage-microbatches whose activations each lane holds at once; slices count as
    fractions.

    Before its first backward a lane holds a complete microbatch in each of its stages. For orders with a known warm-up,
    it holds all units of the warm-up. A slice keeps at least its share of the tokens (`model/analysis/saved.py`).
    """
    lanes, count = max(placement) + 1, len(slices)
    shares = [0.0, *accumulate(tokens / sum(slices) for tokens in slices)]
    in_flight = []
    for lane in range(lanes):
        turns = list(placement).count(lane)
        units = family_facts(schedule).warm_up(lane, lanes, turns, microbatches, count)
        full, rest = divmod(units, count)
        in_flight.append(max(float(turns), full + shares[rest]))
    return tuple(in_flight)


def first_share_bound_s(whole_s: Array, first_share: Array, microbatches: Array, lanes: int | Array) -> Array:
    """Return a lower bound of the step with one stage a lane, equal lanes and fused backward passes.

    `whole_s` is the time of a microbatch on all lanes; its first slice takes at least `first_share` of any layer. A
    lane with time w waits for the first share of the lanes before it: max(share x prefix + m w) is least if all lanes
    are equal, T = share W / (1 - (1 - share / m)^lanes).
    """
    bound: Array = first_share * whole_s / (1 - whole_power(1 - first_share / microbatches, lanes))
    return bound
