"""Plans and corpora for the tests of the data room, as small as they can be."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipefit.data.feed_arrays import IGNORE
from pipefit.data.rows import RowSplit, cut_rows
from pipefit.plan.types import AxisPlan, InputHashes, Job, MeshPlan, ModelSource, Plan, SampleSpace, SchedulePlan, Stage


def toy_plan(
    *,
    batch: int,
    sequence: int,
    microbatches: int,
    shares: tuple[tuple[int, ...], ...],
    multiples: tuple[int, ...] | None = None,
    slices: tuple[int, ...] | None = None,
    seed: int = 0,
) -> Plan:
    """A plan with one stage per entry of `shares`, each stage on a group of its own."""
    groups, first = [], 0
    for stage_shares in shares:
        devices = tuple(range(first, first + len(stage_shares)))
        groups.append(MeshPlan(axes=(AxisPlan(name="replica", shares=stage_shares),), devices=devices))
        first += len(stage_shares)
    counts = multiples or (1,) * len(shares)
    return Plan(
        version=1,
        job=Job(batch=batch, sequence=sequence, seed=seed),
        model=ModelSource(name="toy", family="llama", config={}),
        groups=tuple(groups),
        spaces=(SampleSpace(name="samples", rows=batch, tokens=sequence),),
        stages=tuple(
            Stage(module="m", layers=(i, i + 1), group=i, microbatch_multiple=counts[i]) for i in range(len(shares))
        ),
        edges=(),
        parameters=(),
        order=SchedulePlan(
            name="toy",
            placement=tuple(range(len(shares))),
            microbatches=microbatches,
            slices=slices or (sequence,),
            lanes=("",) * len(shares),
        ),
        hashes=InputHashes(model="", cluster=""),
    )


class ArrayCorpus:
    """Rows of a token array, packed by a loop that knows nothing of pipefit.data.corpus."""

    def __init__(self, tokens: NDArray[np.int64], sequence: int, held_out: float = 0) -> None:
        self.rows: RowSplit = cut_rows(len(tokens), sequence, held_out)
        self._tokens = list(map(int, tokens))

    def row(self, index: int) -> NDArray[np.int64]:
        length = self.rows.sequence + 1
        result = []
        for place in range(index * length, (index + 1) * length):
            result.append(self._tokens[place] if place < len(self._tokens) else IGNORE)
        return np.array(result, dtype=np.int64)
