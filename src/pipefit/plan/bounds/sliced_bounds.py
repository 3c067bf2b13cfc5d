"""Closed forms for sliced candidates: lower bounds of the step, and of what lanes hold.

The unit of work is a slice; those of a microbatch run forward in ascending and backward in descending order. So what
a stage does first is slice 0 of some microbatch, and with fused backwards what it does last is slice 0 of another:

- a lane waits for one slice 0 to come forward through the stages before its first one, has all slices of m
  microbatches to do, and then one slice 0 has the way back to go;
- after the last forward of a stage, a last slice, that slice has to go to the end of the pipeline, and all slices of
  its microbatch back through it, one behind the other;
- before the first backward of a stage, a last slice, all slices of a microbatch have to reach the end of the
  pipeline, and the last one has to come back.

With one slice these are the bounds of `plan/bounds/step_bounds.py`. Tests hold all of them to the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from pipefit.cost.types import Array

HOPS = {
    "1f1b": (1, 1),
    "eager-1f1b": (2, 2),
    "interleaved-1f1b": (1, 2),
    "svpp": (1, 1),
    "zb-h1": (1, 1),
    "zb-h2": (2, 2),
}
"""Forwards that a lane runs ahead for every lane behind it, with one stage a lane and with several."""


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
    """The least time of a chain, whatever the order. Arrays [slice, stage]; transfers [slice, edge], edge e between
    stages e and e + 1; `left_s` of every stage follows its last backward."""
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
    """Of every stage the way through those before it."""
    return np.concatenate(([0.0], np.cumsum(times_s[:-1] + edges_s)))


def _suffix_paths_s(times_s: Array, edges_s: Array) -> Array:
    """Of every stage the way through those behind it."""
    return np.concatenate((np.cumsum((times_s[1:] + edges_s)[::-1])[::-1], [0.0]))


def min_sliced_in_flight(
    schedule: str, placement: Sequence[int], microbatches: int, slices: Sequence[int]
) -> tuple[float, ...]:
    """The least number of stage-microbatches whose activations each lane holds at once, slices as parts of them.

    Before a lane's first backward it holds a whole microbatch in each of its stages; of orders whose warm-up is known,
    all the units of that. A slice keeps at least its part of the tokens (`model/analysis/saved.py`).
    """
    lanes, count = max(placement) + 1, len(slices)
    shares = [0.0, *accumulate(tokens / sum(slices) for tokens in slices)]
    found = []
    for lane in range(lanes):
        turns = list(placement).count(lane)
        units = _warm_units(schedule, lane, lanes, turns, microbatches, count)
        whole, rest = divmod(units, count)
        found.append(max(float(turns), whole + shares[rest]))
    return tuple(found)


def _warm_units(schedule: str, lane: int, lanes: int, turns: int, microbatches: int, slices: int) -> int:
    """Units that a lane has run forward before its first backward, microbatches in turn; 0 where that is not known."""
    every = microbatches * slices * turns
    if schedule == "gpipe":
        return every
    if schedule not in HOPS:
        return 0
    groups = max(1, microbatches // math.ceil(lanes / slices))
    around = HOPS[schedule][turns > 1] * (lanes - 1 - lane)
    return min(every, (turns - 1) * math.ceil(microbatches / groups) * slices + around + slices)


def first_share_bound_s(whole_s: Array, first_share: Array, microbatches: Array, lanes: int | Array) -> Array:
    """The least step of one stage a lane on equal lanes with fused backwards, where `whole_s` is the time of a
    microbatch on all of them and its first slice takes at least `first_share` of any layer.

    A lane with time w waits for the first share of what is before it: the largest of share x prefix + m w is least
    where all are equal, T = share W / (1 - (1 - share / m)^lanes).
    """
    bound: Array = first_share * whole_s / (1 - (1 - first_share / microbatches) ** lanes)
    return bound
