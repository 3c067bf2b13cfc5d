"""Token runs of packed rows against the tokens that each replica's samples have, counted one by one."""

from __future__ import annotations

from itertools import accumulate

import pytest

from pipefit.layout import split_by_shares
from pipefit.plan.assemble.packed_rows import runs_within, sample_runs


@pytest.mark.parametrize("shares", [(1,), (1, 1), (2, 1, 1), (1, 5)])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_runs_hold_the_tokens_of_the_samples_of_each_replica(shares: tuple[int, ...], microbatches: int) -> None:
    counts = [3, 0, 5, 2, 4, 1, 0, 6]
    replica_of = [0] * len(counts)
    for replica, (first, stop) in enumerate(split_by_shares(len(counts), shares)):
        replica_of[first:stop] = [replica] * (stop - first)
    runs = sample_runs([7 + start for start in accumulate(counts, initial=0)], shares)
    rows, begin = len(counts) // microbatches, 0
    for microbatch in range(microbatches):
        samples = range(microbatch * rows, (microbatch + 1) * rows)
        owners = [replica_of[sample] for sample in samples for _ in range(counts[sample])]
        held = runs_within(runs, begin, len(owners))
        assert len(held) == len(shares)
        for replica, (start, stop) in enumerate(held):
            assert list(range(start, stop)) == [token for token, owner in enumerate(owners) if owner == replica]
        begin += len(owners)
