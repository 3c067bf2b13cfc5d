"""Would a low-rank factor tell the links that were not measured better than classes of hosts do?

The simulated clusters of link_measurement.py and one more, made for it: hosts in a plane, rates that fall with their
distance. Some random rounds of the tournament are measured, with the same noise; of the links that were not measured
the time is predicted (a) as the profile does it, from what hosts have in common: effects of sender and receiver, a
bottleneck, classes; (b) from effects and a product of two factors of rank 1, 2, 4, 8 or 16 (matrix completion by
alternating least squares with a ridge; Mazumder, Hastie and Tibshirani 2010 describe its kin), the rank by which hidden
links are predicted best.

    python benchmarks/link_low_rank.py [--quick] [--json benchmarks/results/link_low_rank.json]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from link_measurement import KINDS, REPEATS, SIZE, Matrix, Truth, _truth, measure_of
from pipefit.profile.completion import complete
from pipefit.profile.estimate import pair_times, tabulate
from pipefit.profile.links import TINY, survey
from pipefit.profile.tournament import mixed
from provenance import provenance, write_result

HOSTS = (64, 256)
ROUNDS = (8, 16, 32)
RANKS = (1, 2, 4, 8, 16)
TURNS = 20
HIDDEN = 0.15
RIDGE = 0.02
"""Against a sum of squares over the links of a host, in units of the spread that is left when effects are out."""


def plane(count: int, random: np.random.Generator) -> Truth:
    """Hosts at random in a square; rates fall with the distance, by a factor of e across its side."""
    place = random.uniform(0, 1, (count, 2))
    apart = np.linalg.norm(place[:, None] - place[None, :], axis=2)
    return _truth("in a plane", 25e9 * np.exp(-apart), random)


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 hosts, eight rounds.")
    parser.add_argument("--json", help="Write the result here.")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"provenance": provenance(), "rows": []}
    print(f"{'cluster':<22} hosts  rounds  classes: mean error  low rank: mean error  rank")
    for count in HOSTS[:1] if arguments.quick else HOSTS:
        for kind in (*KINDS, plane):
            for rounds in ROUNDS[:1] if arguments.quick else ROUNDS:
                truth = kind(count, np.random.default_rng(0))
                result["rows"].append(compared(truth, rounds))
                print(row(result["rows"][-1]), flush=True)
    write_result(arguments.json, result)
    return 0


def compared(truth: Truth, rounds: int) -> dict[str, Any]:
    """Errors of the links that were not measured, both ways."""
    count = len(truth.bandwidth)
    games = mixed([range(count)])(0)
    order = np.random.default_rng(3).permutation(len(games))[:rounds]
    found = survey([games[g] for g in order], (TINY, SIZE), REPEATS, measure_of(truth, 4))
    table = tabulate(found.samples, range(count))
    shape = complete(table.of_size(len(table.sizes_bytes) - 1)).shape
    told = pair_times(found.samples, range(count), shape=shape, predict=True)
    sums, times = np.zeros((2, count, count)), np.zeros((2, count, count))
    for sample in found.samples:
        which = int(sample.size_bytes == SIZE)
        sums[which, sample.source, sample.target] += sample.round_trip_s
        times[which, sample.source, sample.target] += 1
    known = times[1] > 0
    seen = np.where(known, np.log(np.maximum(sums[1] / np.maximum(times[1], 1), 1e-12)), 0.0)
    rank, logs = completed(seen, known)
    exact = SIZE / truth.bandwidth
    unknown = ~known & ~np.eye(count, dtype=bool)
    return {
        "cluster": truth.name,
        "hosts": count,
        "rounds": rounds,
        "classes_error": float(np.mean(np.abs(told.time_s[-1][unknown] / exact[unknown] - 1))),
        "low_rank_error": float(np.mean(np.abs(np.exp(logs[unknown]) / exact[unknown] - 1))),
        "rank": rank,
    }


def completed(seen: Matrix, known: Matrix) -> tuple[int, Matrix]:
    """(rank, logarithms of all links): the rank that predicts hidden ones best."""
    random = np.random.default_rng(5)
    hidden = known & (random.uniform(size=known.shape) < HIDDEN)
    errors = {
        rank: float(np.mean(np.abs((factored(seen, known & ~hidden, rank) - seen)[hidden]))) for rank in (0, *RANKS)
    }
    best = min(errors, key=lambda rank: errors[rank])
    return best, factored(seen, known, best)


def factored(seen: Matrix, known: Matrix, rank: int) -> Matrix:
    """Effects of senders and receivers plus a product of two factors, fitted to what is known."""
    weight = known.astype(float)
    whole = float(seen[known].mean())
    out, into = np.zeros(len(seen)), np.zeros(len(seen))
    random = np.random.default_rng(6)
    left, right = (random.normal(0, 0.1, (len(seen), max(1, rank))) for _ in range(2))
    for _ in range(TURNS):
        product = left @ right.T if rank else 0.0
        out = ((seen - whole - into - product) * weight).sum(axis=1) / (weight.sum(axis=1) + 0.1)
        into = ((seen - whole - out[:, None] - product) * weight).sum(axis=0) / (weight.sum(axis=0) + 0.1)
        if rank:
            rest = (seen - whole - out[:, None] - into) * weight
            left = _solved(rest, weight, right)
            right = _solved(rest.T, weight.T, left)
    return np.asarray(whole + out[:, None] + into + (left @ right.T if rank else 0.0))


def _solved(rest: Matrix, weight: Matrix, other: Matrix) -> Matrix:
    """The factor of every row, by least squares with a ridge."""
    squares = np.einsum("ij,jr,js->irs", weight, other, other, optimize=True)
    squares += RIDGE * np.eye(other.shape[1]) * max(1e-3, float(np.mean(other**2))) * weight.sum(axis=1)[:, None, None]
    return np.asarray(np.linalg.solve(squares, (rest @ other)[:, :, None])[:, :, 0])


def row(one: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"{one['cluster']:<22} {one['hosts']:>5}  {one['rounds']:>6}  {one['classes_error']:>19.1%}"
        f"  {one['low_rank_error']:>20.1%}  {one['rank']:>4}"
    )


if __name__ == "__main__":
    sys.exit(main())
