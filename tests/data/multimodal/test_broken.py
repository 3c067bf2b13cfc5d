"""Images that break after they were indexed: the same samples are left out everywhere, and nothing of them is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.multimodal_toys import SEQUENCE, mixed_index, shape_of, source_of, write_images, write_rows
from tests.support.preparation_toys import PLACES, digest

from pipefit.data.multimodal.broken import BrokenImage, BrokenSinceError, merge_broken, remove_samples
from pipefit.data.multimodal.feeds import run_feed
from pipefit.data.multimodal.index import GENERATE, IMAGE, SampleIndex, make_index, open_index
from pipefit.data.multimodal.sample_rows import rows_of_index
from pipefit.data.multimodal.sequence import images_of
from pipefit.data.multimodal.step import multimodal_step
from pipefit.data.preparation.ahead import BatchRecipe, HeldStage, PreparedStep, StepPrefetcher
from pipefit.data.preparation.pool import WorkerPool
from pipefit.data.preparation.processes import ProcessWorkers
from pipefit.plan.types import SampleArrangement, SampleLoad

SPACES = ("patches", "samples", "latents")
STEPS = 4


def cut_short(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (cut_short, ""),
    "absent": (Path.unlink, "there is no such file"),
    "another size": (lambda path: Image.new("RGB", (50, 41)).save(path), "50 x 41 pixels where "),
    "another file": (lambda path: path.write_bytes(path.read_bytes() + b" "), "another file: "),
    "no image": (lambda path: path.write_text("text"), "not an image that Pillow knows"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_broken_is_said_by_whoever_reads_it_and_by_nobody_else(tmp_path: Path, damage: str) -> None:
    index = mixed_index(tmp_path, 6)
    source, every = source_of(index), np.arange(6)
    use = next(use for row in range(6) for use in images_of(index, source.rows, row, IMAGE))
    path, (harm, reason) = index.image_path(use.image), DAMAGE[damage]
    harm(path)
    found = {space: run_feed(source, space, 0, every, 0).broken for space in SPACES}
    assert [each[:3] for each in found["patches"]] == [(use.sample, f"s{use.sample}", str(path))]
    assert found["patches"][0].reason.startswith(reason)
    assert not found["samples"] and not found["latents"]


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_row_without_a_sample_is_the_row_of_a_manifest_without_it(tmp_path: Path, gone: int) -> None:
    """Three samples in one row, one of them left out, against an index of the other two."""
    names = write_images(tmp_path / "images", 6)
    rows = [
        {"id": name, "parts": [{"text": f"look {name}", "learn": number > 0}, {"image": f"images/{names[number]}"},
                               {"text": "x" * number}, {"generate": f"images/{names[number + 3]}"}]}
        for number, name in enumerate("abc")
    ]  # fmt: skip
    found = []
    for name, kept in (("all", rows), ("some", [row for number, row in enumerate(rows) if number != gone])):
        request = replace(mixed_index(tmp_path / "rules", 3).summary.request)
        source = str(write_rows(tmp_path / f"{name}.jsonl", kept))
        make_index(replace(request, source=source), tmp_path / name)
        index = open_index(tmp_path / name)
        found.append((index, rows_of_index(index, SEQUENCE, pack=True)))
    (index, packed), (other_index, other_packed) = found
    assert (packed.count, other_packed.count) == (1, 1)
    left_out, shape = frozenset({gone}), shape_of(1, 1, ((1,),))
    step = remove_samples(multimodal_step(shape, packed, 5), index, packed, left_out)
    expected = multimodal_step(shape, other_packed, 5)
    assert (step.divisor, step.divisors) == (expected.divisor, expected.divisors)
    assert {space: counts.tolist() for space, counts in step.counts.items()} == {
        space: counts.tolist() for space, counts in expected.counts.items()
    }
    drawn = {"noisy", "target", "time"}  # by the sample's number, which differs
    for space in SPACES:
        mine = run_feed(replace(source_of(index), rows=packed), space, 5, np.arange(1), 0, left_out)
        others = run_feed(replace(source_of(other_index), rows=other_packed), space, 5, np.arange(1), 0)
        assert mine.arrays.keys() == others.arrays.keys() and mine.image_lengths == others.image_lengths
        for name in mine.arrays.keys() - drawn:
            assert mine.arrays[name].tobytes() == others.arrays[name].tobytes(), (space, name)
        assert mine.size_bytes == others.size_bytes


def test_a_step_of_which_nothing_is_left(tmp_path: Path) -> None:
    index = mixed_index(tmp_path, 6)
    source = source_of(index)
    step = remove_samples(multimodal_step(shape_of(6, 3, ((1,),)), source.rows, 0), index, source.rows, set(range(6)))
    assert (step.divisor, step.divisors) == (1, {"samples": 1, "latents": 1})
    assert [int(step.counts[space].sum()) for space in ("patches", "latents")] == [0, 0]


# Several devices that agree.


class Meeting:
    """Devices as threads that tell each other what they found."""

    def __init__(self, count: int) -> None:
        self._found: list[list[BrokenImage]] = [[]] * count
        self._barrier = threading.Barrier(count, timeout=60)
        self.met = 0

    def of(self, device: int) -> Callable[[list[BrokenImage]], list[BrokenImage]]:
        def together(mine: list[BrokenImage]) -> list[BrokenImage]:
            self._found[device] = mine
            self.met += self._barrier.wait() == 0
            everyone = [each for found in self._found for each in found]
            self._barrier.wait()
            return merge_broken(everyone)

        return together


@pytest.fixture
def index(tmp_path: Path) -> SampleIndex:
    """Samples for four steps, an epoch."""
    return mixed_index(tmp_path / "mixed", 12 * STEPS)


@pytest.fixture
def recipe(index: SampleIndex) -> BatchRecipe:
    loads = tuple(SampleLoad(space=space, token_s=1e-3) for space in SPACES)
    shape = shape_of(12, 3, ((1,), (1, 1), (1,)))
    return BatchRecipe(
        index=str(index.folder), shape=replace(shape, arranging=SampleArrangement(loads=loads, swaps=10))
    )


def images_of_step(index: SampleIndex, recipe: BatchRecipe, step: int, kind: int) -> list[tuple[int, Path]]:
    """(sample, file) of what a step reads."""
    source = recipe.open_source()
    rows = multimodal_step(recipe.shape, source.rows, step).rows.tolist()
    uses = [use for row in rows for use in images_of(index, source.rows, row, kind)]
    return [(use.sample, index.image_path(use.image)) for use in uses]


def as_devices(
    recipe: BatchRecipe, work: Callable[[StepPrefetcher], Any], pool: WorkerPool | None = None, **options: Any
) -> list[Any]:
    """What `work` gives on three devices, a stage each; the first prepares by the pool. An error is a result."""
    meeting = Meeting(len(PLACES))
    results: list[Any] = [None] * len(PLACES)

    def device(number: int) -> None:
        own = pool if number == 0 else None
        ahead = StepPrefetcher(recipe, PLACES[number : number + 1], own, together=meeting.of(number), **options)
        try:
            results[number] = work(ahead)
        except BrokenSinceError as error:
            results[number] = error

    threads = [threading.Thread(target=device, args=(number,)) for number in range(len(PLACES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def joined(parts: list[PreparedStep]) -> PreparedStep:
    """What three devices have, as one device has it."""
    return PreparedStep(plan=parts[0].plan, feeds={key: feed for part in parts for key, feed in part.feeds.items()})


def test_all_devices_leave_out_the_samples_that_one_of_them_finds_broken(
    index: SampleIndex, recipe: BatchRecipe
) -> None:
    """Steps 1 and 3 have a broken image each, one to look at and one to generate. Every device, also the one that reads
    no image, has the step that a single process has, with workers ahead or without; and so has a resume behind it,
    under a checkpoint's list, though the files are whole again then."""
    (looked, first), (drawn, second) = (
        next(each for each in images_of_step(index, recipe, step, kind)) for step, kind in ((1, IMAGE), (3, GENERATE))
    )
    whole = [StepPrefetcher(recipe, PLACES, None).take_step(step) for step in range(STEPS)]
    kept = first.read_bytes(), second.read_bytes()
    cut_short(first)
    second.unlink()
    alone = StepPrefetcher(recipe, PLACES, None, on_broken="skip")
    expected = [alone.take_step(step) for step in range(STEPS)]
    assert [image.image for image in alone.found] == [str(first), str(second)]
    assert alone.left_out == {looked, drawn}
    assert [digest(a) == digest(b) for a, b in zip(expected, whole, strict=True)][::2] == [True, True]
    for step, sample in ((1, looked), (3, drawn)):
        assert [a.tolist() for a in (expected[step].plan.rows, whole[step].plan.rows)] == [
            whole[step].plan.rows.tolist()
        ] * 2, "the order does not change"
        place = whole[step].plan.rows.tolist().index(sample)
        before, after = whole[step].plan, expected[step].plan
        for space in ("patches", "latents"):
            assert after.counts[space][place] == 0
            lost = before.counts[space] - after.counts[space]
            assert lost.sum() == before.counts[space][place]
        labels = int(recipe.open_source().rows.label_counts[sample])
        assert before.divisor - after.divisor == labels > 0
    pool = WorkerPool(ProcessWorkers(recipe, 2))
    try:
        parts = as_devices(
            recipe, lambda ahead: ([ahead.take_step(step) for step in range(STEPS)], ahead), pool, on_broken="skip"
        )
    finally:
        pool.close()
    for step in range(STEPS):
        assert digest(joined([steps[step] for steps, _ in parts])) == digest(expected[step])
    assert [ahead.left_out for _, ahead in parts] == [alone.left_out] * 3
    assert [ahead.found for _, ahead in parts] == [alone.found] * 3
    first.write_bytes(kept[0])
    second.write_bytes(kept[1])
    resumed = StepPrefetcher(recipe, PLACES, None)
    resumed.skip_samples(sorted(alone.left_out))
    assert [digest(resumed.take_step(step)) for step in (3, 1)] == [digest(expected[step]) for step in (3, 1)]


def test_what_workers_had_made_before_a_sample_was_left_out_is_made_again(
    index: SampleIndex, recipe: BatchRecipe
) -> None:
    """The pool has the next steps, in a later epoch with the same samples among them, when the image breaks."""
    sample, path = images_of_step(index, recipe, 2, IMAGE)[0]
    before = [StepPrefetcher(recipe, PLACES, None).take_step(step) for step in range(4)]
    pool = WorkerPool(ProcessWorkers(recipe, 1))
    try:
        ahead = StepPrefetcher(recipe, PLACES, pool, window=4)
        for step in range(2):
            assert digest(ahead.take_step(step)) == digest(before[step])
        ahead.skip_samples([sample])
        after = [ahead.take_step(step) for step in (2, 3)]
    finally:
        pool.close()
    path.unlink()
    alone = StepPrefetcher(recipe, PLACES, None, on_broken="skip")
    assert [digest(each) for each in after] == [digest(alone.take_step(step)) for step in (2, 3)]
    assert digest(after[0]) != digest(before[2])


def test_images_are_divided_anew_where_a_sample_is_left_out(index: SampleIndex, recipe: BatchRecipe) -> None:
    """Two replicas of the encoder divide what is left: together they have what a single one has, in its order."""
    sample, path = images_of_step(index, recipe, 1, IMAGE)[0]
    divides = ("images", "samples", "samples")
    shape = replace(shape_of(12, 3, ((1, 1), (1, 1), (1,))), arranging=recipe.shape.arranging, divides=divides)
    order = multimodal_step(shape, source_of(index).rows, 1).rows
    whole = shape_of(12, 3, ((1,), (1, 1), (1,)))
    path.write_bytes(b"")
    meeting = Meeting(2)
    parts: list[Any] = [None, None]

    def device(replica: int) -> None:
        places = (HeldStage(0, "patches", replica),)
        ahead = StepPrefetcher(
            replace(recipe, shape=shape), places, None, on_broken="skip", together=meeting.of(replica)
        )
        parts[replica] = ahead.take_step(1)

    threads = [threading.Thread(target=device, args=(replica,)) for replica in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    source = source_of(index)
    for microbatch in range(3):
        rows = order[slice(*whole.batch_run(0, microbatch, 0))]
        alone = run_feed(source, "patches", 1, rows, 0, frozenset({sample}))
        both = [part.feeds[0, microbatch] for part in parts]
        for name in ("pixels", "grid"):
            assert np.array_equal(np.concatenate([each.arrays[name] for each in both], axis=1), alone.arrays[name])
        tokens = [sum(each.image_lengths) for each in both]
        assert sum(tokens) == sum(alone.image_lengths) and abs(tokens[0] - tokens[1]) <= max(alone.image_lengths)
    assert sum(map(sum, parts[0].plan.images["patches"])) == parts[0].plan.counts["patches"].sum()


def test_every_device_fails_alike_where_one_of_them_finds_a_broken_image(
    index: SampleIndex, recipe: BatchRecipe
) -> None:
    broken = images_of_step(index, recipe, 1, IMAGE)[:2]
    for _, path in broken:
        path.write_bytes(b"")
    errors = as_devices(recipe, lambda ahead: [ahead.take_step(step) for step in range(2)])
    assert [str(error) for error in errors] == [str(errors[0])] * 3
    sample, path = min(broken)
    error = errors[0]
    assert isinstance(error, BrokenSinceError)
    assert error.what == "An image that was intact when it was indexed is broken now."
    assert error.where == f"{path} (sample {index.sample_name(sample)}, step 2)"
    assert str(error.seen).endswith("; and 1 more") and "--on-broken skip" in str(error.next_step)
