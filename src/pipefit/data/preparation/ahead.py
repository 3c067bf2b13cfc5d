"""Prefetch the steps of a run in order, with a pool that works while the trainer computes earlier steps.

Nothing here is saved. A step is a function of the recipe and its number. A run that resumes at step k, after a kill or
under another plan, requests step k and gets the same data; steps prefetched beyond it are built again. The one
exception is an image that breaks during the run: all ranks agree on the samples to leave out and on the first step
without them (`together`), and a checkpoint stores their numbers (`left_out`).
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
    """Everything that determines a run's data: the plan's batch shape, the index, and the rules for rows."""

    index: str
    "Folder of the index, as workers see it."
    shape: BatchShape
    "The plan's cut of the batch and its arrangement of samples."
    held_out: float = 0.0
    pack: bool = False
    on_long: OnLong = "fail"
    digest: str = ""
    "Digest of the index; if set, an index with another digest is refused."
    versions: str = ""
    "Versions of the run's image decoders; if set, a worker with other versions refuses to start."

    def open_source(self) -> SampleSource:
        """Open the index and its rows.

        Raises DataError as `open_index` and `rows_of_index` do, and for another index.
        """
        index = open_index(Path(self.index))
        if self.digest and index.summary.digest != self.digest:
            raise DataError(
                "The index has changed since the run began.",
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
        """Return the handler of a worker's requests (see HandlerFactory).

        Raises DataError as `open_source` does, and if the worker would decode images with other versions.
        """
        if self.versions and self.versions != decoder_versions():
            raise DataError(
                "A worker has other versions of the image decoders than the run, so image bytes may differ.",
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
    """Build the arrays of one action."""

    space: str
    step: int
    rows: NDArray[np.int64]
    first: int
    left_out: frozenset[int] = frozenset()
    "Samples of these rows that the run continues without."
    some: Run | None = None
    "For a stage that divides images: its run of the rows' images, after leaving samples out."
    decode: bool = True
    "Whether images are decoded; see `HeldStage`."


class HeldStage(NamedTuple):
    """A stage on this device."""

    stage: int
    space: str
    replica: int
    decode: bool = True
    "Whether the stage's layers need decoded images; other layers of the module need metadata alone."


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """The data of one step for one device."""

    plan: StepPlan
    feeds: Mapping[tuple[int, int], ModuleArrays]
    "(stage, microbatch of the stage) -> its arrays."


_ALL_BROKEN = 4
"""If at least this many samples have images and all are broken, the cause is not a single bad file."""

Together = Callable[[list[BrokenImage]], list[BrokenImage]]
"""Maps the broken images found by this device to those found by all devices, the same on every device. All devices call
it together, once or more per step."""

StageMicrobatch = tuple[int, int]
"""(stage, microbatch of the stage)."""


class StepPrefetcher:
    """The steps of the stages on one device. With `pool` None, a step is prepared in the trainer process when
    requested."""

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
        """`window`: the most steps prepared ahead, if credits permit. `stop`: the number of steps of the run.
        `on_broken` and `together`: the action for images that broke after indexing, and the agreement between devices.

        Raises DataError as `BatchRecipe.open_source` does. The pool's workers must have the same recipe.
        """
        self.recipe, self.places = recipe, places
        self.source = recipe.open_source()
        self._pool, self._window, self._stop = pool, window, stop
        self._on_broken, self._together = on_broken, together
        self._next: int | None = None
        self._asked = self._fed = 0
        self._plans: dict[int, StepPlan] = {}
        self._requested: dict[int, dict[StageMicrobatch, FeedRequest]] = {}
        self.waited_s: list[float] = []
        "Seconds that the trainer waited for each step."
        self.left_out: frozenset[int] = frozenset()
        "Samples that the run continues without, because their images are broken: the same on all devices."
        self.found: list[BrokenImage] = []
        "Broken images whose samples were left out since the prefetcher was created."

    def prepare_by(self, pool: WorkerPool | None) -> None:
        """Use this pool for the next steps; its workers must have the same recipe."""
        self._pool = pool

    def skip_samples(self, samples: Collection[int]) -> None:
        """Also leave out these samples, as the run did before its checkpoint."""
        self.left_out |= frozenset(samples)

    def take_step(self, step: int) -> PreparedStep:
        """Return a step. The step after the last one is ready soonest; any other restarts prefetching there.

        Raises BrokenSinceError, on all devices, if any device found a broken image and `on_broken` is `fail`.
        """
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
        """Return batch `index` of an evaluation, built in this process. Raises as `take_step` does."""
        plan = multimodal_evaluation(self.recipe.shape, self.source.rows, index)
        requested = dict(self._feed_requests(plan))
        feeds = {key: run_feed(self.source, *request) for key, request in requested.items()}
        return self._agree_on_broken(plan, requested, feeds, f"batch {index + 1} of the evaluation")

    def _agree_on_broken(
        self,
        plan: StepPlan,
        requested: dict[StageMicrobatch, FeedRequest],
        feeds: dict[StageMicrobatch, ModuleArrays],
        when: str,
    ) -> PreparedStep:
        """Return the step without the left-out samples, once no device finds further broken images.

        Arrays that were requested before one of their samples was left out are rebuilt in this process.
        """
        while True:
            for key, request in self._feed_requests(plan):
                if (request.left_out, request.some) != (requested[key].left_out, requested[key].some):
                    requested[key], feeds[key] = request, run_feed(self.source, *request)
            broken = self._together([image for arrays in feeds.values() for image in arrays.broken])
            if not broken:
                return PreparedStep(plan=self._without_skipped(plan), feeds=feeds)
            if self._on_broken == "fail":
                raise broken_since_error(broken, when)
            self.found += broken
            self.skip_samples([image.sample for image in broken])
            self._require_readable(plan, broken, when)

    def _require_readable(self, plan: StepPlan, found: list[BrokenImage], when: str) -> None:
        """Raise BrokenSinceError, on all devices, if all images of several samples are unreadable.

        The usual cause is a missing disk, or an index that was moved without its images.
        """
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
    ) -> tuple[StepPlan, dict[StageMicrobatch, FeedRequest], dict[StageMicrobatch, ModuleArrays]]:
        if self._next != step:
            pool.clear()
            self._plans.clear()
            self._requested.clear()
            self._asked = self._fed = step
        self._next = step + 1
        last = max(step, step + self._window if self._stop is None else min(step + self._window, self._stop - 1))
        while self._asked <= last + 1:  # one step further than arrays, which need the arranged step first
            pool.add(("step", self._asked), StepRequest(self._asked), 0, "step")
            self._asked += 1
        self._feed_to(last, pool, step)
        requested = self._requested.pop(step)
        feeds = {key: pool.take(("feed", step, *key)) for key in requested}
        self._feed_to(last, pool, step)  # arrays of steps arranged meanwhile are built while the trainer runs this step
        return self._plans.pop(step), requested, feeds

    def _feed_to(self, last: int, pool: WorkerPool, step: int) -> None:
        """Request the arrays of all arranged steps up to `last`; `step` itself is waited for."""
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

    def _feed_requests(self, plan: StepPlan) -> Iterator[tuple[StageMicrobatch, FeedRequest]]:
        plan = self._without_skipped(plan)
        for stage, space, replica, decode in self.places:
            for microbatch in plan.shape.own_units(stage):
                start, stop = plan.batch_run(stage, microbatch, replica)
                rows, image_range = plan.rows[start:stop], plan.image_run(stage, space, microbatch, replica)
                left_out = self._skipped_in(rows)
                yield (stage, microbatch), FeedRequest(space, plan.step, rows, start, left_out, image_range, decode)

    def _skipped_in(self, rows: NDArray[np.int64]) -> frozenset[int]:
        known, chosen = self.source.rows, rows.tolist()
        positions = find_places(known, chosen, self.left_out)
        return self.left_out & {sample for position in positions for sample in samples_of(known, chosen[position])}
