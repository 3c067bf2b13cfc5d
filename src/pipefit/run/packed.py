"""What edges of packed spaces carry in one step: token runs that the counts of the step give, known before any forward.

A packed tensor is (1, tokens of the microbatch, width): the images of its samples one behind the other, in the order of
the samples. A replica of either side holds those of its own samples, so the two sides' runs along the tokens are sums
of counts over their runs of samples, and the transfer rule moves the overlaps (reference: DistTrain's brokers, for any
pair of replica counts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipefit.data.stepplan import batch_shape
from pipefit.errors import PlanError
from pipefit.layout import Run
from pipefit.plan.types import Edge, Plan

Counts = Mapping[str, Sequence[int]]
"""Packed space -> tokens of the sample at every place of the step's batch (int64[batch])."""


def packed_space(plan: Plan, edge: Edge) -> str:
    """The packed space that an edge's tensor lives in: that of either of its stages; '' for a tensor of fixed shape."""
    spaces = {space.name: space for space in plan.spaces}
    for stage in (edge.source, edge.target):
        space = spaces[plan.stages[stage].space]
        if not space.tokens:
            return space.name
    return ""


class TokenRuns:
    """Token runs of stages in packed spaces; those of one step, once `set` has been given its counts."""

    def __init__(self, plan: Plan) -> None:
        self._shape = batch_shape(plan)
        self._rows = self._shape.batch // self._shape.microbatches
        self._runs = [
            [self._shape.run(stage, 0, replica) for replica in range(len(shares))]
            for stage, shares in enumerate(self._shape.shares)
        ]
        "[stage][replica]: of the rows of the microbatches that the stage takes together."
        self._found: dict[tuple[str, int, int], tuple[Run, ...]] = {}
        self.spaces = tuple(sorted({space.name for space in plan.spaces if not space.tokens}))
        self._starts: dict[str, list[int]] = {}
        self.one_each()

    def one_each(self) -> None:
        """As if every sample had one token: what can meet in some step meets here."""
        self.set({space: [1] * self._shape.batch for space in self.spaces})

    def set(self, counts: Counts) -> None:
        """Take up the counts of a step. PlanError where a space is missing, or a place of the batch."""
        self._found.clear()
        for space in self.spaces:
            found = counts.get(space, ())
            if len(found) != self._shape.batch:
                raise PlanError(
                    "The step does not say how many tokens every sample has in a packed space.",
                    where=f"counts of {space!r}",
                    seen=f"{len(found)} numbers",
                    allowed=f"one for each of the {self._shape.batch} samples of the batch",
                )
            self._starts[space] = [0, *np.cumsum(np.asarray(found, dtype=np.int64)).tolist()]

    def tokens(self, space: str, microbatch: int) -> int:
        """Of all samples of a microbatch."""
        starts = self._starts[space]
        return starts[(microbatch + 1) * self._rows] - starts[microbatch * self._rows]

    def of(self, space: str, stage: int, microbatch: int) -> tuple[Run, ...]:
        """The run of a microbatch's tokens that each replica of a stage holds: where the stage takes several
        microbatches together, what of its rows are in this one."""
        key = (space, stage, microbatch)
        if key not in self._found:
            starts, first = self._starts[space], microbatch * self._rows
            ahead = microbatch % self._shape.multiples[stage] * self._rows
            base = starts[first]
            self._found[key] = tuple(
                (starts[first + self._within(start - ahead)] - base, starts[first + self._within(stop - ahead)] - base)
                for start, stop in self._runs[stage]
            )
        return self._found[key]

    def _within(self, row: int) -> int:
        return min(max(row, 0), self._rows)
