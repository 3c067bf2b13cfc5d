"""Token runs of edges in packed spaces, from the token counts of a step, which are known before any forward.

A packed tensor is (1, tokens of the microbatch, width): the images of its samples concatenated, in the order of the
samples. A replica of either side holds the tokens of its own samples or, if its stage divides images, its own run of
them. The two sides' runs along the tokens are sums of counts, and the transfer rule moves the overlaps (compare
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
from pipefit.plan.assemble.packed_rows import runs_within, sample_runs
from pipefit.plan.types import Edge, Plan

Counts = Mapping[str, Sequence[int] | Sequence[Sequence[int]]]
"""Packed space -> tokens of every sample of the step's batch, or of each of its images (needed if a stage divides
images)."""


def packed_space(plan: Plan, edge: Edge) -> str:
    """Return the packed space of an edge's tensor: that of either of its stages; '' for a tensor of fixed shape."""
    spaces = {space.name: space for space in plan.spaces}
    for stage in (edge.source, edge.target):
        space = spaces[plan.stages[stage].space]
        if not space.tokens:
            return space.name
    return ""


class TokenRuns:
    """Token runs of stages in packed spaces, for the step whose counts were last set by `set_counts`."""

    def __init__(self, plan: Plan) -> None:
        self._shape = batch_shape(plan)
        self._spaces = [stage.space for stage in plan.stages]
        self._rows = self._shape.batch // self._shape.microbatches
        self._found: dict[tuple[str, int, int], tuple[Run, ...]] = {}
        self._any = False
        self.spaces = tuple(sorted({space.name for space in plan.spaces if not space.tokens}))
        self._starts: dict[str, list[int]] = {}
        self._images: dict[str, Sequence[Sequence[int]]] = {}
        self.assume_one_each()

    def assume_one_each(self) -> None:
        """Assume one token per sample, and all of them on every replica that divides images: then every pair of
        replicas that can overlap in some step overlaps."""
        self.set_counts({space: [[1]] * self._shape.batch for space in self.spaces})
        self._any = True

    def are_comparable(self, stages: tuple[int, int]) -> bool:
        """Return True if the replicas' runs in two stages depend on shares alone, not on images, or on images in the
        same way."""
        first, second = stages
        same = (self._shape.shares[first], self._shape.multiples[first]) == (
            self._shape.shares[second],
            self._shape.multiples[second],
        )
        divided = [self._shape.divides_images(stage) for stage in stages]
        return not any(divided) or (all(divided) and same)

    def runs_in_any_step(
        self, space: str, stages: tuple[int, int], microbatch: int
    ) -> tuple[int, tuple[Sequence[Run], ...]]:
        """Return (tokens, runs of both stages' replicas) in which all replicas overlap that overlap in some step."""
        if self.are_comparable(stages) and self._shape.divides_images(stages[0]):
            unit_runs = [(position, position + 1) for position in range(len(self._shape.shares[stages[0]]))]
            return len(unit_runs), (unit_runs, unit_runs)
        return self.token_count(space, microbatch), tuple(
            self.replica_runs(space, stage, microbatch) for stage in stages
        )

    def set_counts(self, counts: Counts) -> None:
        """Set the counts of a step. Raises PlanError if a space or a sample is missing, or if a stage divides images
        and the counts are per sample."""
        self._found.clear()
        self._any = False
        for space in self.spaces:
            sample_counts = counts.get(space, ())
            if len(sample_counts) != self._shape.batch:
                raise PlanError(
                    "The step does not say how many tokens every sample has in a packed space.",
                    where=f"counts of {space!r}",
                    seen=f"{len(sample_counts)} numbers",
                    allowed=f"one for each of the {self._shape.batch} samples of the batch",
                )
            by_sample = [isinstance(sample, Integral) for sample in sample_counts]
            if any(by_sample) and any(map(self._shape.divides_images, self._stages_in(space))):
                raise PlanError(
                    "The step does not say how many tokens every image has, and a stage divides these.",
                    where=f"counts of {space!r}",
                    seen="a number for each sample",
                    allowed="the tokens of each image, for every sample",
                )
            images = [[sample] if isinstance(sample, Integral) else sample for sample in sample_counts]
            self._images[space] = images
            self._starts[space] = [0, *np.cumsum([sum(sample) for sample in images], dtype=np.int64).tolist()]

    def _stages_in(self, space: str) -> list[int]:
        return [stage for stage, stage_space in enumerate(self._spaces) if stage_space == space]

    def token_count(self, space: str, microbatch: int) -> int:
        """Return the tokens of all samples of a microbatch."""
        starts = self._starts[space]
        return starts[(microbatch + 1) * self._rows] - starts[microbatch * self._rows]

    def replica_runs(self, space: str, stage: int, microbatch: int) -> tuple[Run, ...]:
        """Return the run of a microbatch's tokens on each replica of a stage. If the stage takes several microbatches
        together, it is the part of the replica's rows that belongs to this microbatch."""
        key = (space, stage, microbatch)
        if key not in self._found:
            self._found[key] = self._overlap_runs(space, stage, microbatch)
        return self._found[key]

    def _overlap_runs(self, space: str, stage: int, microbatch: int) -> tuple[Run, ...]:
        """Return the replicas' runs over all tokens that the stage takes together, restricted to this microbatch."""
        shares, multiple = self._shape.shares[stage], self._shape.multiples[stage]
        total, divides_images = self.token_count(space, microbatch), self._shape.divides_images(stage)
        if divides_images and self._any:
            return ((0, total),) * len(shares)
        first = microbatch // multiple * multiple * self._rows
        stop = first + multiple * self._rows
        starts = self._starts[space]
        if divides_images:
            runs = token_runs([*chain.from_iterable(self._images[space][first:stop])], shares)
        else:
            runs = sample_runs(starts[first : stop + 1], shares)
        return runs_within(runs, starts[microbatch * self._rows] - starts[first], total)
