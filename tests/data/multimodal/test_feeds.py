"""Samples of text and images from manifest to arrays, against a plain reading of the manifest and its files."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.multimodal_toys import LATENT_RULE, RULE, SEQUENCE, mixed_index, shape_of, source_of

from pipefit.data.feed_arrays import IGNORE
from pipefit.data.multimodal import feeds as feeds_module
from pipefit.data.multimodal.feeds import DECODED, SampleSource, feed_bytes, module_feed, run_feed
from pipefit.data.multimodal.images import ImageRule
from pipefit.data.multimodal.index import SampleIndex
from pipefit.data.multimodal.sample_rows import LATENTS, PATCHES, SAMPLES, rows_of_index
from pipefit.data.multimodal.step import count_step, multimodal_step
from pipefit.data.preparation.ahead import BatchRecipe, HeldStage, StepPrefetcher

SPACES = (PATCHES, SAMPLES, LATENTS)
COMPARED = {SAMPLES: ("tokens", "labels"), PATCHES: ("pixels", "grid"), LATENTS: ("noisy", "target", "time")}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    return mixed_index(tmp_path_factory.mktemp("mixed"))


def told(index: SampleIndex, sample: int) -> dict[str, list[Any]]:
    """The sequence of a sample by a loop over its row of the manifest: ids, what is learned, images in order."""
    root = Path(index.summary.root)
    row = json.loads((root / "manifest.jsonl").read_text().splitlines()[sample])
    found: dict[str, list[Any]] = {"ids": [], "learn": [], "image": [], "generate": [], "kind": []}
    for part in row["parts"]:
        if "text" in part:
            ids, kind, learn = list(part["text"].encode()), "text", part.get("learn", True)
        else:
            kind = "image" if "image" in part else "generate"
            rule = RULE if kind == "image" else LATENT_RULE
            with Image.open(root / part[kind]) as image:
                rows, columns = rule.patch_grid(*image.size)
            found[kind].append((root / part[kind], rows, columns))
            ids, learn = [1 if kind == "image" else 2] * (rows * columns), False
        found["ids"] += ids
        found["learn"] += [learn] * len(ids)
        found["kind"] += [kind] * len(ids)
    for key, value in (("ids", 0), ("learn", True), ("kind", "text")):
        found[key].append(value)
    return found


def test_tokens_labels_and_places_are_those_of_the_manifest(index: SampleIndex) -> None:
    source = source_of(index)
    arrays = run_feed(source, SAMPLES, 0, np.arange(index.samples), 5).arrays
    seen, generated = arrays["image_places"][0].tolist(), arrays["condition_places"][0].tolist()
    for sample in range(index.samples):
        want = told(index, sample)
        length = len(want["ids"])
        assert arrays["tokens"][sample, :length].tolist() == want["ids"]
        assert not arrays["tokens"][sample, length:].any()
        labels = [want["ids"][t] if want["learn"][t] else IGNORE for t in range(1, length)]
        assert arrays["labels"][sample].tolist() == labels + [IGNORE] * (SEQUENCE - length + 1)
        for places, kind in ((seen, "image"), (generated, "generate")):
            own = [place % SEQUENCE for place in places if place // SEQUENCE == sample]
            assert own == [t for t in range(length) if want["kind"][t] == kind]
    assert arrays["rows"].tolist() == list(range(5, 5 + index.samples))
    assert source.rows.label_counts.tolist() == (arrays["labels"] != IGNORE).sum(axis=1).tolist()
    assert seen and generated


def test_pixels_are_those_of_the_files_patch_by_patch(index: SampleIndex) -> None:
    arrays = run_feed(source_of(index), PATCHES, 0, np.arange(index.samples), 0).arrays
    at = 0
    for sample in range(index.samples):
        for path, rows, columns in told(index, sample)["image"]:
            side = RULE.patch
            with Image.open(path) as image:
                image.draft("RGB", (columns * side, rows * side))
                whole = image.convert("RGB").resize((columns * side, rows * side), Image.Resampling.BICUBIC)
            for row in range(rows):
                for column in range(columns):
                    box = (column * side, row * side, (column + 1) * side, (row + 1) * side)
                    tile = np.asarray(whole.crop(box))
                    assert arrays["pixels"][0, at].reshape(3, side, side).tolist() == tile.transpose(2, 0, 1).tolist()
                    assert arrays["grid"][0, at].tolist() == [row, column, rows, columns]
                    assert arrays["documents"][0, at] == at - row * columns - column
                    at += 1
    assert at == arrays["pixels"].shape[1] > 50 and arrays["pixels"].dtype == np.uint8


def test_noise_and_target_lie_on_the_straight_way_to_the_pixels(index: SampleIndex) -> None:
    source = source_of(index)
    arrays = run_feed(source, LATENTS, 7, np.arange(index.samples), 0).arrays
    time, noisy, target = (arrays[name] for name in ("time", "noisy", "target"))
    pixels = noisy + (1 - time[..., None]) * target  # where the way ends, whatever the noise
    values = (pixels + 1) * 127.5
    assert np.abs(values - np.rint(values)).max() < 1e-3 and values.min() > -0.01 and values.max() < 255.01
    noise = pixels - target
    assert abs(noise.mean()) < 0.1 and abs(noise.std() - 1) < 0.1
    starts = arrays["documents"][0]
    assert all(len(set(time[0][starts == start])) == 1 for start in set(starts.tolist()))
    assert len(set(time[0].tolist())) == len(set(starts.tolist())) == 8
    later = run_feed(source, LATENTS, 8, np.arange(index.samples), 0).arrays
    assert np.abs(later["noisy"] - noisy).max() > 0.1 and not np.array_equal(later["time"], time)


def by_sample(source: SampleSource, shape: Any, step: int) -> tuple[dict[int, bytes], dict[str, int]]:
    """What every row of a step is fed with, in all spaces, gathered from all replicas; and the divisors."""
    plan = multimodal_step(shape, source.rows, step)
    found: dict[int, bytes] = {}
    for stage, space in enumerate(SPACES):
        for microbatch in range(shape.stage_microbatches(stage)):
            for replica in range(len(shape.shares[stage])):
                start, stop = plan.batch_run(stage, microbatch, replica)
                arrays = module_feed(source, plan, stage, space, microbatch, replica).arrays
                ends = np.cumsum(plan.counts[space][start:stop]).tolist() if space != SAMPLES else None
                for place, row in enumerate(plan.rows[start:stop].tolist()):
                    for name in COMPARED[space]:
                        array = arrays[name]
                        one = array[place] if ends is None else array[0, ends[place - 1] if place else 0 : ends[place]]
                        found[row] = found.get(row, b"") + one.tobytes()
                assert ends is None or (ends[-1] if ends else 0) == arrays["grid"].shape[1]
    return found, dict(plan.divisors)


def test_every_layout_feeds_the_same_bytes_for_each_sample(index: SampleIndex) -> None:
    """Replica counts 3, 2, 1 with uneven shares, microbatches and multiples, against one process with one of each."""
    source = source_of(index)
    alone = shape_of(12, 1, ((1,), (1,), (1,)))
    for shape in (
        shape_of(12, 2, ((1, 2, 1), (1, 1), (1,))),
        shape_of(12, 6, ((1, 1), (1,), (1, 0)), multiples=(3, 1, 2)),
    ):
        for step in (0, 3):
            one, two = by_sample(source, alone, step), by_sample(source, shape, step)
            assert one == two
            assert len(one[0]) == 12 and one[1]["latents"] % source.rows.latent_values == 0


@pytest.mark.parametrize("multiple", [1, 2])
def test_replicas_that_divide_images_are_fed_each_once_in_their_order(index: SampleIndex, multiple: int) -> None:
    """One behind the other they are what a single replica gets; and as long as was said before anything was read."""
    source = source_of(index)
    shares = ((1, 1, 1), (1, 1), (2, 1))
    whole = multimodal_step(shape_of(12, 4, ((1,), (1,), (1,)), multiples=(multiple, 1, 2)), source.rows, 1)
    shape = replace(shape_of(12, 4, shares, multiples=(multiple, 1, 2)), divides=("images", "samples", "images"))
    plan = multimodal_step(shape, source.rows, 1)
    plan = replace(plan, rows=whole.rows, images=count_step(replace(whole, shape=shape), source.rows).images)
    for stage, space in ((0, PATCHES), (2, LATENTS)):
        for unit in shape.own_units(stage):
            feeds = [module_feed(source, plan, stage, space, unit, replica) for replica in range(len(shares[stage]))]
            alone = module_feed(source, whole, stage, space, unit, 0)
            for name in COMPARED[space]:
                joined = np.concatenate([feed.arrays[name] for feed in feeds], axis=1)
                assert joined.tobytes() == alone.arrays[name].tobytes()
            assert tuple(chain.from_iterable(feed.image_lengths for feed in feeds)) == alone.image_lengths
            for replica, feed in enumerate(feeds):
                rows = plan.rows[slice(*plan.batch_run(stage, unit, replica))]
                some = plan.image_run(stage, space, unit, replica)
                values = (RULE if space == PATCHES else LATENT_RULE).patch_values
                assert feed_bytes(source.rows, space, rows, values, some) == feed.size_bytes
    told_here = [[rows * columns for _, rows, columns in told(index, row)["image"]] for row in plan.rows.tolist()]
    assert [*map(list, plan.images[PATCHES])] == told_here


def test_divisors_are_the_labels_and_the_latent_values_that_are_fed(index: SampleIndex) -> None:
    source, shape = source_of(index), shape_of(12, 2, ((1,), (1,), (1,)))
    plan = multimodal_step(shape, source.rows, 1)
    feeds = {space: [module_feed(source, plan, 0, space, m, 0) for m in range(2)] for space in SPACES}
    assert plan.divisors[SAMPLES] == sum(int((feed.arrays["labels"] != IGNORE).sum()) for feed in feeds[SAMPLES])
    assert plan.divisors[LATENTS] == sum(feed.arrays["target"].size for feed in feeds[LATENTS])
    for space, rule in ((PATCHES, RULE), (LATENTS, LATENT_RULE), (SAMPLES, RULE)):
        for microbatch, feed in enumerate(feeds[space]):
            rows = plan.rows[slice(*plan.batch_run(0, microbatch, 0))]
            assert feed_bytes(source.rows, space, rows, rule.patch_values) == feed.size_bytes


def test_packed_rows_hold_samples_one_behind_the_other(index: SampleIndex) -> None:
    rows = rows_of_index(index, 160, pack=True)
    source = SampleSource(index=index, rows=rows, seed=0)
    arrays = run_feed(source, SAMPLES, 0, np.arange(rows.count), 0).arrays
    assert rows.count < index.samples
    sample = 0
    for row in range(rows.count):
        at = 0
        while sample < index.samples and at + len(told(index, sample)["ids"]) <= 160:
            ids = told(index, sample)["ids"]
            assert arrays["tokens"][row, at : at + len(ids)].tolist() == ids
            assert set(arrays["documents"][row, at : at + len(ids)].tolist()) == {at}
            assert at == 0 or arrays["labels"][row, at - 1] == IGNORE, "nothing asks for the next sample"
            at, sample = at + len(ids), sample + 1
    assert sample == index.samples
    assert rows.label_counts.tolist() == (arrays["labels"] != IGNORE).sum(axis=1).tolist()


@pytest.mark.parametrize(
    ("rule", "size", "grid"),
    [
        (ImageRule(), (512, 512), (32, 32)),
        (ImageRule(), (1024, 1024), (32, 32)),
        (ImageRule(), (2048, 512), (16, 64)),
        (ImageRule(), (5, 900), (56, 1)),
        (ImageRule(max_patches=4), (5, 90000), (4, 1)),
        (ImageRule(side=224), (5, 900), (14, 14)),
    ],
)
def test_grids(rule: ImageRule, size: tuple[int, int], grid: tuple[int, int]) -> None:
    """Width comes first in sizes, rows first in grids."""
    assert rule.patch_grid(*size) == grid


def test_a_start_token_is_one_more_in_front_of_every_image_that_is_looked_at(tmp_path: Path) -> None:
    index = mixed_index(tmp_path, 6, start_token=True)
    plain = mixed_index(tmp_path / "plain", 6)
    with_it, without = (run_feed(source_of(i), PATCHES, 0, np.arange(6), 0) for i in (index, plain))
    grid = with_it.arrays["grid"][0]
    started = grid[:, 0] == -1
    assert started.sum() == len(without.image_lengths) > 3
    assert not with_it.arrays["pixels"][0][started].any()
    assert np.array_equal(with_it.arrays["pixels"][0][~started], without.arrays["pixels"][0])
    assert np.flatnonzero(started).tolist() == sorted(set(with_it.arrays["documents"][0].tolist()))
    places = run_feed(source_of(index), SAMPLES, 0, np.arange(6), 0).arrays["image_places"]
    assert places.size == len(grid) == sum(with_it.image_lengths)


@pytest.mark.parametrize("space", [PATCHES, LATENTS])
def test_what_follows_from_metadata_is_made_without_decoding_an_image(
    index: SampleIndex, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, rows = source_of(index), np.arange(12)
    whole = run_feed(source, space, 3, rows, 0)
    monkeypatch.setattr(feeds_module, "read_patches", lambda *_: pytest.fail("an image is read"))
    without = run_feed(source, space, 3, rows, 0, decode=False)
    assert without.arrays.keys() == whole.arrays.keys() - {*DECODED[space]}
    for name, array in without.arrays.items():
        assert (array.dtype, array.tobytes()) == (whole.arrays[name].dtype, whole.arrays[name].tobytes())
    assert without.image_lengths == whole.image_lengths and sum(without.image_lengths) > 0
    values = (RULE if space == PATCHES else LATENT_RULE).patch_values
    assert feed_bytes(source.rows, space, rows, values, decode=False) == without.size_bytes
    assert feed_bytes(source.rows, space, rows, values) == whole.size_bytes
    assert run_feed(source, space, 3, rows[:0], 0, decode=False).size_bytes == 0


class InOrder:
    """A pool that does a task, and those before it, when its result is waited for."""

    def __init__(self, recipe: BatchRecipe) -> None:
        self._make, self._tasks, self.done = recipe.open(), dict[Any, Any](), dict[Any, Any]()

    def add(self, key: Any, request: Any, *_: Any) -> None:
        self._tasks[key] = request

    def is_done(self, key: Any) -> bool:
        return key in self.done

    def take(self, key: Any) -> Any:
        while key not in self.done:
            first = next(iter(self._tasks))
            self.done[first] = self._make(self._tasks.pop(first))
        return self.done[key]

    def clear(self) -> None:
        self._tasks.clear()

    @property
    def waiting(self) -> set[int]:
        """Steps whose arrays are asked for and not yet made."""
        return {key[1] for key in self._tasks if key[0] == "feed"}


@pytest.mark.parametrize("first", [0, 3])
def test_the_steps_behind_the_first_are_made_while_the_trainer_is_at_it(index: SampleIndex, first: int) -> None:
    """However a run starts: when it has its first step, the arrays of the next are asked for."""
    recipe = BatchRecipe(index=str(index.folder), shape=shape_of(12, 3, ((1,),)))
    pool: Any = InOrder(recipe)
    ahead = StepPrefetcher(recipe, (HeldStage(0, PATCHES, 0),), pool, window=2)
    ahead.take_step(first)
    assert pool.waiting == {first + 1, first + 2}
    ahead.take_step(first + 1)
    assert pool.waiting == {first + 2, first + 3}
