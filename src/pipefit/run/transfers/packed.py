"""What edges of packed spaces carry in one step: token runs that the counts of the step give, known before any forward.

A packed tensor is (1, tokens of the microbatch, width): the images of its samples one behind the other, in the order of
the samples. A replica of either side holds those of its own samples, or where its stage divides images its own run of
these, so the two sides' runs along the tokens are sums of counts, and the transfer rule moves the overlaps (reference:
DistTrain's brokers, for any pair of replica counts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from numbers import Integral

import numpy as np

from pipefit.data.stepplan import batch_shape
from pipefit.errors import PlanError
from pipefit.layout import Run
from pipefit.plan.assemble.image_split import token_runs
from pipefit.plan.types import Edge, Plan

Counts = Mapping[str, Sequence[int] | Sequence[Sequence[int]]]
"""Packed space -> of the sample at every place of the step's batch its tokens, or those of each of its images: so where
a stage divides images."""


def packed_space(plan: Plan, edge: Edge) -> str:
    """The packed space that an edge's tensor lives in: that of either of its stages; '' for a tensor of fixed shape."""
    spaces = {space.name: space for space in plan.spaces}
    for stage in (edge.source, edge.target):
        space = spaces[plan.stages[stage].space]
        if not space.tokens:
            return space.name
    return ""


class TokenRuns:
    """Token runs of stages in packed spaces; those of one step, once `set_counts` has been given its counts."""

    def __init__(self, plan: Plan) -> None:
        self._shape = batch_shape(plan)
        self._spaces = [stage.space for stage in plan.stages]
        self._rows = self._shape.batch // self._shape.microbatches
        self._runs = [
            [self._shape.batch_run(stage, 0, replica) for replica in range(len(shares))]
            for stage, shares in enumerate(self._shape.shares)
        ]
        "[stage][replica]: of the rows of the microbatches that the stage takes together."
        self._found: dict[tuple[str, int, int], tuple[Run, ...]] = {}
        self._any = False
        self.spaces = tuple(sorted({space.name for space in plan.spaces if not space.tokens}))
        self._starts: dict[str, list[int]] = {}
        self._images: dict[str, Sequence[Sequence[int]]] = {}
        self.assume_one_each()

    def assume_one_each(self) -> None:
        """As if every sample had one token, and every replica that divides images all of them: what can meet in some
        step meets here."""
        self.set_counts({space: [[1]] * self._shape.batch for space in self.spaces})
        self._any = True

    def are_comparable(self, stages: tuple[int, int]) -> bool:
        """Whether what the replicas of two stages hold depends on their shares alone, not on images: or on these in the
        same way."""
        one, two = stages
        same = (self._shape.shares[one], self._shape.multiples[one]) == (
            self._shape.shares[two],
            self._shape.multiples[two],
        )
        divided = [self._shape.divides_images(stage) for stage in stages]
        return not any(divided) or (all(divided) and same)

    def runs_in_any_step(
        self, space: str, stages: tuple[int, int], microbatch: int
    ) -> tuple[int, tuple[Sequence[Run], ...]]:
        """(tokens, runs of both stages' replicas) in which all meet that meet in some step."""
        if self.are_comparable(stages) and self._shape.divides_images(stages[0]):
            each = [(place, place + 1) for place in range(len(self._shape.shares[stages[0]]))]
            return len(each), (each, each)
        return self.token_count(space, microbatch), tuple(
            self.replica_runs(space, stage, microbatch) for stage in stages
        )

    def set_counts(self, counts: Counts) -> None:
        """Take up the counts of a step. PlanError where a space is missing, or a place of the batch, or where a stage
        divides images and the counts are those of samples."""
        self._found.clear()
        self._any = False
        for space in self.spaces:
            found = counts.get(space, ())
            if len(found) != self._shape.batch:
                raise PlanError(
                    "The step does not say how many tokens every sample has in a packed space.",
                    where=f"counts of {space!r}",
                    seen=f"{len(found)} numbers",
                    allowed=f"one for each of the {self._shape.batch} samples of the batch",
                )
            by_sample = [isinstance(each, Integral) for each in found]
            if any(by_sample) and any(map(self._shape.divides_images, self._stages_in(space))):
                raise PlanError(
                    "The step does not say how many tokens every image has, and a stage divides these.",
                    where=f"counts of {space!r}",
                    seen="a number for each sample",
                    allowed="the tokens of each image, for every sample",
                )
            images = [[each] if isinstance(each, Integral) else each for each in found]
            self._images[space] = images
            self._starts[space] = [0, *np.cumsum([sum(each) for each in images], dtype=np.int64).tolist()]

    def _stages_in(self, space: str) -> list[int]:
        return [stage for stage, own in enumerate(self._spaces) if own == space]

    def token_count(self, space: str, microbatch: int) -> int:
        """Of all samples of a microbatch."""
        starts = self._starts[space]
        return starts[(microbatch + 1) * self._rows] - starts[microbatch * self._rows]

    def replica_runs(self, space: str, stage: int, microbatch: int) -> tuple[Run, ...]:
        """The run of a microbatch's tokens that each replica of a stage holds: where the stage takes several
        microbatches together, what of its rows are in this one."""
        key = (space, stage, microbatch)
        if key not in self._found and self._shape.divides_images(stage):
            self._found[key] = self._image_runs(space, stage, microbatch)
        if key not in self._found:
            starts, first = self._starts[space], microbatch * self._rows
            ahead = microbatch % self._shape.multiples[stage] * self._rows
            base = starts[first]
            self._found[key] = tuple(
                (
                    starts[first + self._place_within(start - ahead)] - base,
                    starts[first + self._place_within(stop - ahead)] - base,
                )
                for start, stop in self._runs[stage]
            )
        return self._found[key]

    def _image_runs(self, space: str, stage: int, microbatch: int) -> tuple[Run, ...]:
        """Of a stage that divides images: of its runs of the tokens of all that it takes together, what lies in this
        microbatch."""
        shares, multiple = self._shape.shares[stage], self._shape.multiples[stage]
        total = self.token_count(space, microbatch)
        if self._any:
            return ((0, total),) * len(shares)
        first = microbatch // multiple * multiple * self._rows
        rows = self._images[space][first : first + multiple * self._rows]
        ahead = self._starts[space][microbatch * self._rows] - self._starts[space][first]
        runs = token_runs([*chain.from_iterable(rows)], shares)
        return tuple(
            (min(max(0, start - ahead), total), min(max(0, stop - ahead), total)) for start, stop in runs
        )  # fmt: skip

    def _place_within(self, row: int) -> int:
        return min(max(row, 0), self._rows)
