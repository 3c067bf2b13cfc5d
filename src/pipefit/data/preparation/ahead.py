"""Preparing ahead: the steps of a run in order, made by a pool while the trainer is at earlier ones.

Nothing here is saved. A step is a function of the recipe and its number, so a run that resumes at step k, after a kill
or under another plan, asks for step k and gets what it would have had; what had been prepared beyond it is made anew.
The one exception is an image that breaks while the run goes on: all ranks agree which samples are left out from which
step on (`together`), and a checkpoint has their numbers (`left_out`).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.data.multimodal.broken import (
    BrokenImage,
    OnBroken,
    broken_since_error,
    find_places,
    merge_broken,
    remove_samples,
)
from pipefit.data.multimodal.feeds import ModuleArrays, SampleSource, feed_bytes, run_feed
from pipefit.data.multimodal.images import decoder_versions
from pipefit.data.multimodal.index import GENERATE, IMAGE, open_index
from pipefit.data.multimodal.sample_rows import LATENTS, OnLong, rows_of_index
from pipefit.data.multimodal.sequence import images_of, samples_of
from pipefit.data.multimodal.step import multimodal_evaluation, multimodal_step
from pipefit.data.preparation.pool import WorkerPool
from pipefit.data.stepplan import BatchShape, StepPlan
from pipefit.errors import DataError
from pipefit.layout import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecipe:
    """All that decides what a run is fed: the plan's cut and arrangement, the index, and how it becomes rows."""

    index: str
    "Folder of the index, as workers see it."
    shape: BatchShape
    "Of the plan: who takes which, and how samples are arranged."
    held_out: float = 0.0
    pack: bool = False
    on_long: OnLong = "fail"
    digest: str = ""
    "Of the index; where it stands here, an index that has taken its place is refused."
    versions: str = ""
    "What decodes images in the run; where it stands here, a worker that has others refuses."

    def open_source(self) -> SampleSource:
        """The index and its rows. Raises DataError as `open_index` and `rows_of_index` do, and for another index."""
        index = open_index(Path(self.index))
        if self.digest and index.summary.digest != self.digest:
            raise DataError(
                "The index is another one than when the run began.",
                where=self.index,
                seen=index.summary.digest,
                allowed=self.digest,
                next_step="give a new index another name, and start the run again",
            )
        rows = rows_of_index(
            index,
            self.shape.sequence_length,
            batch=self.shape.batch,
            held_out=self.held_out,
            pack=self.pack,
            on_long=self.on_long,
            images="images" in self.shape.divides,
        )
        return SampleSource(index=index, rows=rows, seed=self.shape.seed)

    def open(self) -> Callable[[Any], Any]:
        """What a worker does with a request (see Maker). Raises DataError as `open_source` does, and where images
        would be decoded by other versions."""
        if self.versions and self.versions != decoder_versions():
            raise DataError(
                "A worker decodes images with other versions than the run, so their bytes may differ.",
                where=f"a worker on {platform.node()}",
                seen=decoder_versions(),
                allowed=self.versions,
                next_step="install the same versions on all hosts",
            )
        source = self.open_source()

        def make_result(request: StepRequest | FeedRequest) -> Any:
            if isinstance(request, StepRequest):
                return multimodal_step(self.shape, source.rows, request.step)
            return run_feed(source, *request)

        return make_result


class StepRequest(NamedTuple):
    """Arrange the batch of a step."""

    step: int


class FeedRequest(NamedTuple):
    """Make the arrays of one action."""

    space: str
    step: int
    rows: NDArray[np.int64]
    first: int
    left_out: frozenset[int] = frozenset()
    "Samples of these rows that the run goes on without."
    some: Run | None = None
    "Of a stage that divides images: which of those of these rows, without what is left out."
    decode: bool = True
    "Whether images are decoded; see `HeldStage`."


class HeldStage(NamedTuple):
    """A stage that this device holds."""

    stage: int
    space: str
    replica: int
    decode: bool = True
    "Whether the stage's layers take what images are decoded for: the others of its module need metadata alone."


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """One step as one device takes it."""

    plan: StepPlan
    feeds: Mapping[tuple[int, int], ModuleArrays]
    "(stage, microbatch of the stage) -> its arrays."


_ALL_BROKEN = 4
"""So many samples with images, and none of them whole, are no accident."""

Together = Callable[[list[BrokenImage]], list[BrokenImage]]
"""What this device found broken -> what all devices of the run did, the same everywhere. All call it together, once or
more a step."""

Key = tuple[int, int]
"""(stage, microbatch of the stage)."""


class StepPrefetcher:
    """The steps of one device's places. `pool` None prepares in the trainer's own process when it asks."""

    def __init__(
        self,
        recipe: BatchRecipe,
        places: tuple[HeldStage, ...],
        pool: WorkerPool | None,
        *,
        window: int = 2,
        stop: int | None = None,
        on_broken: OnBroken = "fail",
        together: Together = merge_broken,
    ) -> None:
        """`window`: steps that are prepared ahead, at most, credits permitting; `stop`: there is no such step any more;
        `on_broken` and `together`: what images do that have broken since they were indexed, and how devices agree.

        Raises DataError as `Recipe.open_source` does. The pool's workers must have been told the same recipe.
        """
        self.recipe, self.places = recipe, places
        self.source = recipe.open_source()
        self._pool, self._window, self._stop = pool, window, stop
        self._on_broken, self._together = on_broken, together
        self._next: int | None = None
        self._asked = self._fed = 0
        self._plans: dict[int, StepPlan] = {}
        self._requested: dict[int, dict[Key, FeedRequest]] = {}
        self.waited_s: list[float] = []
        "Seconds that the trainer waited for each step that it took."
        self.left_out: frozenset[int] = frozenset()
        "Samples that the run goes on without, for their images are broken: the same on all devices."
        self.found: list[BrokenImage] = []
        "The images for which samples were left out since this began."

    def prepare_by(self, pool: WorkerPool | None) -> None:
        """Have the steps to come made by this pool, whose workers know the same recipe."""
        self._pool = pool

    def skip_samples(self, samples: Collection[int]) -> None:
        """Go on without these samples, too, as a run did before its checkpoint."""
        self.left_out |= frozenset(samples)

    def take_step(self, step: int) -> PreparedStep:
        """A step. The one after the last is ready soonest; any other starts preparation there. Raises
        BrokenSinceError, on all devices, where any of them has found a broken image and `on_broken` is `fail`."""
        began_s = time.perf_counter()
        if self._pool is None:
            plan = multimodal_step(self.recipe.shape, self.source.rows, step)
            requested = dict(self._feed_requests(plan))
            feeds = {key: run_feed(self.source, *request) for key, request in requested.items()}
        else:
            plan, requested, feeds = self._take_from_pool(step, self._pool)
        prepared = self._agree_on_broken(plan, requested, feeds, f"step {step + 1}")
        self.waited_s.append(time.perf_counter() - began_s)
        return prepared

    def evaluation(self, index: int) -> PreparedStep:
        """Batch `index` of an evaluation, made here: its images are the same every time. Raises as `take_step` does."""
        plan = multimodal_evaluation(self.recipe.shape, self.source.rows, index)
        requested = dict(self._feed_requests(plan))
        feeds = {key: run_feed(self.source, *request) for key, request in requested.items()}
        return self._agree_on_broken(plan, requested, feeds, f"batch {index + 1} of the evaluation")

    def _agree_on_broken(
        self, plan: StepPlan, requested: dict[Key, FeedRequest], feeds: dict[Key, ModuleArrays], when: str
    ) -> PreparedStep:
        """The step without the samples that are left out, once no device finds any more. What was asked for before one
        of its samples was left out is made again, here."""
        while True:
            for key, request in self._feed_requests(plan):
                if (request.left_out, request.some) != (requested[key].left_out, requested[key].some):
                    requested[key], feeds[key] = request, run_feed(self.source, *request)
            found = self._together([each for arrays in feeds.values() for each in arrays.broken])
            if not found:
                return PreparedStep(plan=self._without_skipped(plan), feeds=feeds)
            if self._on_broken == "fail":
                raise broken_since_error(found, when)
            self.found += found
            self.skip_samples([each.sample for each in found])
            self._require_readable(plan, found, when)

    def _require_readable(self, plan: StepPlan, found: list[BrokenImage], when: str) -> None:
        """Raises BrokenSinceError, on all devices, where not one image of several samples can be read: a disk is gone,
        or the index was moved without its images."""
        index, rows = self.source.index, self.source.rows
        with_images = {
            use.sample
            for row in plan.rows.tolist()
            for kind in (IMAGE, GENERATE)
            for use in images_of(index, rows, row, kind)
        }
        if len(with_images) >= _ALL_BROKEN and with_images <= self.left_out:
            raise broken_since_error(found, f"{when}, whose samples with images are all broken")

    def _without_skipped(self, plan: StepPlan) -> StepPlan:
        return remove_samples(plan, self.source.index, self.source.rows, self.left_out) if self.left_out else plan

    def _take_from_pool(
        self, step: int, pool: WorkerPool
    ) -> tuple[StepPlan, dict[Key, FeedRequest], dict[Key, ModuleArrays]]:
        if self._next != step:
            pool.clear()
            self._plans.clear()
            self._requested.clear()
            self._asked = self._fed = step
        self._next = step + 1
        last = max(step, step + self._window if self._stop is None else min(step + self._window, self._stop - 1))
        while self._asked <= last + 1:  # one step further than arrays, which need the step's order first
            pool.add(("step", self._asked), StepRequest(self._asked), 0, "step")
            self._asked += 1
        self._feed_to(last, pool, step)
        requested = self._requested.pop(step)
        feeds = {key: pool.take(("feed", step, *key)) for key in requested}
        self._feed_to(last, pool, step)  # what was put in order meanwhile is made while the trainer is at this step
        return self._plans.pop(step), requested, feeds

    def _feed_to(self, last: int, pool: WorkerPool, step: int) -> None:
        """Ask for the arrays of all steps up to `last` that are in order; `step` is waited for."""
        while self._fed <= last and (self._fed == step or pool.is_done(("step", self._fed))):
            self._plans[self._fed] = pool.take(("step", self._fed))
            self._add_feeds(pool, self._plans[self._fed])
            self._fed += 1

    def _add_feeds(self, pool: WorkerPool, plan: StepPlan) -> None:
        self._requested[plan.step] = dict(self._feed_requests(plan))
        for key, request in self._requested[plan.step].items():
            rule = self.source.index.image_rule(GENERATE if request.space == LATENTS else IMAGE)
            size_bytes = feed_bytes(
                self.source.rows, request.space, request.rows, rule.patch_values, request.some, request.decode
            )
            pool.add(("feed", plan.step, *key), request, size_bytes, request.space)

    def _feed_requests(self, plan: StepPlan) -> Iterator[tuple[Key, FeedRequest]]:
        plan = self._without_skipped(plan)
        for stage, space, replica, decode in self.places:
            for microbatch in plan.shape.own_units(stage):
                start, stop = plan.batch_run(stage, microbatch, replica)
                rows, some = plan.rows[start:stop], plan.image_run(stage, space, microbatch, replica)
                left_out = self._skipped_in(rows)
                yield (stage, microbatch), FeedRequest(space, plan.step, rows, start, left_out, some, decode)

    def _skipped_in(self, rows: NDArray[np.int64]) -> frozenset[int]:
        known, chosen = self.source.rows, rows.tolist()
        places = find_places(known, chosen, self.left_out)
        return self.left_out & {sample for place in places for sample in samples_of(known, chosen[place])}
