"""Preparing ahead: the steps of a run in order, made by a pool while the trainer is at earlier ones.

Nothing here is saved. A step is a function of the recipe and its number, so a run that resumes at step k, after a kill
or under another plan, asks for step k and gets what it would have had; what had been prepared beyond it is made anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.data.multimodal.feeds import Arrays, OnBroken, Source, feed_bytes, run_feed
from pipefit.data.multimodal.index import GENERATE, IMAGE, open_index
from pipefit.data.multimodal.sample_rows import LATENTS, OnLong, rows_of_index
from pipefit.data.multimodal.step import multimodal_evaluation, multimodal_step
from pipefit.data.preparation.pool import Pool
from pipefit.data.stepplan import BatchShape, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that decides what a run is fed: the plan's cut and arrangement, the index, and how it becomes rows."""

    index: str
    "Folder of the index, as workers see it."
    shape: BatchShape
    "Of the plan: who takes which, and how samples are arranged."
    held_out: float = 0.0
    pack: bool = False
    on_long: OnLong = "fail"
    on_broken: OnBroken = "fail"

    def source(self) -> Source:
        """The index and its rows. Raises DataError as `open_index` and `rows_of_index` do."""
        index = open_index(Path(self.index))
        rows = rows_of_index(
            index,
            self.shape.sequence,
            batch=self.shape.batch,
            held_out=self.held_out,
            pack=self.pack,
            on_long=self.on_long,
        )
        return Source(index=index, rows=rows, seed=self.shape.seed, on_broken=self.on_broken)

    def open(self) -> Callable[[Any], Any]:
        """What a worker does with a request (see Maker)."""
        source = self.source()

        def make(request: StepRequest | FeedRequest) -> Any:
            if isinstance(request, StepRequest):
                return multimodal_step(self.shape, source.rows, request.step)
            return run_feed(source, request.space, request.step, request.rows, request.first)

        return make


class StepRequest(NamedTuple):
    """Arrange the batch of a step."""

    step: int


class FeedRequest(NamedTuple):
    """Make the arrays of one action."""

    space: str
    step: int
    rows: NDArray[np.int64]
    first: int


class Place(NamedTuple):
    """A stage that this device holds."""

    stage: int
    space: str
    replica: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """One step as one device takes it."""

    plan: StepPlan
    feeds: Mapping[tuple[int, int], Arrays]
    "(stage, microbatch of the stage) -> its arrays."


class Ahead:
    """The steps of one device's places. `pool` None prepares in the trainer's own process when it asks."""

    def __init__(
        self, recipe: Recipe, places: tuple[Place, ...], pool: Pool | None, *, window: int = 2, stop: int | None = None
    ) -> None:
        """`window`: steps that are prepared ahead, at most, credits permitting; `stop`: there is no such step any more.

        Raises DataError as `Recipe.source` does. The pool's workers must have been told the same recipe.
        """
        self.recipe, self.places = recipe, places
        self.source = recipe.source()
        self._pool, self._window, self._stop = pool, window, stop
        self._next: int | None = None
        self._asked = self._fed = 0
        self._plans: dict[int, StepPlan] = {}
        self.waited_s: list[float] = []
        "Seconds that the trainer waited for each step that it took."
        self.broken: dict[str, str] = {}
        "Image files that were broken when they were read, and why: each was replaced by a blank image."

    def take(self, step: int) -> PreparedStep:
        """A step. The one after the last is ready soonest; any other starts preparation there."""
        began_s = time.perf_counter()
        prepared = self._alone(step) if self._pool is None else self._pooled(step, self._pool)
        self.waited_s.append(time.perf_counter() - began_s)
        for arrays in prepared.feeds.values():
            self.broken |= arrays.broken
        return prepared

    def evaluation(self, index: int) -> PreparedStep:
        """Batch `index` of an evaluation, made here: its images are the same every time."""
        plan = multimodal_evaluation(self.recipe.shape, self.source.rows, index)
        return self._made(plan)

    def _alone(self, step: int) -> PreparedStep:
        return self._made(multimodal_step(self.recipe.shape, self.source.rows, step))

    def _made(self, plan: StepPlan) -> PreparedStep:
        feeds = {
            key: run_feed(self.source, request.space, request.step, request.rows, request.first)
            for key, request in self._requests(plan)
        }
        return PreparedStep(plan=plan, feeds=feeds)

    def _pooled(self, step: int, pool: Pool) -> PreparedStep:
        if self._next != step:
            pool.clear()
            self._plans.clear()
            self._asked = self._fed = step
        self._next = step + 1
        last = max(step, step + self._window if self._stop is None else min(step + self._window, self._stop - 1))
        while self._asked <= last + 1:  # one step further than arrays, which need the step's order first
            pool.add(("step", self._asked), StepRequest(self._asked), 0, "step")
            self._asked += 1
        while self._fed <= last and (self._fed == step or pool.is_done(("step", self._fed))):
            self._plans[self._fed] = pool.take(("step", self._fed))
            self._add_feeds(pool, self._plans[self._fed])
            self._fed += 1
        plan = self._plans.pop(step)
        feeds = {key: pool.take(("feed", step, *key)) for key, _ in self._requests(plan)}
        return PreparedStep(plan=plan, feeds=feeds)

    def _add_feeds(self, pool: Pool, plan: StepPlan) -> None:
        for key, request in self._requests(plan):
            rule = self.source.index.rule(GENERATE if request.space == LATENTS else IMAGE)
            size_bytes = feed_bytes(self.source.rows, request.space, request.rows, rule.patch_values)
            pool.add(("feed", plan.step, *key), request, size_bytes, request.space)

    def _requests(self, plan: StepPlan) -> Iterator[tuple[tuple[int, int], FeedRequest]]:
        for stage, space, replica in self.places:
            for microbatch in range(plan.shape.stage_microbatches(stage)):
                start, stop = plan.run(stage, microbatch, replica)
                yield (stage, microbatch), FeedRequest(space, plan.step, plan.rows[start:stop], start)
