"""Tokens of an image that are not patches, in the sequence and in the packed row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.multimodal_toys import LATENT_RULE, RULE, SEQUENCE, mixed_manifest

from pipefit.data.multimodal.feeds import SampleSource, feed_bytes, run_feed
from pipefit.data.multimodal.index import IndexRequest, SampleIndex, make_index, open_index
from pipefit.data.multimodal.sample_rows import PATCHES, SAMPLES, lengths_of, rows_of_index
from pipefit.data.multimodal.sequence import axis_positions, run_ends

TOKEN = 1


def make_source(folder: Path, name: str, **extra: Any) -> SampleSource:
    request = IndexRequest(
        source=str(mixed_manifest(folder, 12)),
        images=replace(RULE, **extra),
        generated=LATENT_RULE,
        image_token=TOKEN,
        generation_token=2,
    )
    make_index(request, folder / name)
    index: SampleIndex = open_index(folder / name)
    return SampleSource(index=index, rows=rows_of_index(index, SEQUENCE, images=True), seed=3)


@pytest.mark.parametrize(
    "extra", [{"end_token": True}, {"drops_start": True}, {"drops_start": True, "end_token": True}]
)
def test_a_dropped_start_token_is_in_the_packed_row_alone(tmp_path: Path, extra: dict[str, bool]) -> None:
    drops, ends = extra.get("drops_start", False), extra.get("end_token", False)
    plain = make_source(tmp_path, "plain")
    source = make_source(tmp_path, "index", start_token=drops, **extra)
    every = np.arange(source.rows.count)
    images = np.array([len(tokens) for tokens in source.rows.images_in(PATCHES, every)])
    more = int(drops) + int(ends)
    assert (source.rows.counts[PATCHES] == plain.rows.counts[PATCHES] + more * images).all() and images.sum() > 5
    assert (lengths_of(source.index) == lengths_of(plain.index) + int(ends) * images).all()
    for row in every:
        rows = np.array([row])
        words = run_feed(source, SAMPLES, 0, rows, 0).arrays
        patches = run_feed(source, PATCHES, 0, rows, 0)
        places, grid = words["image_places"][0], patches.arrays["grid"][0]
        assert len(places) == len(grid) == sum(patches.image_lengths)
        assert ((places == -1) == (grid[:, 0] == -1)).all() and (np.diff(places[places >= 0]) > 0).all()
        assert (words["tokens"][0][places[places >= 0]] == TOKEN).all()
        assert (grid[:, 0] == -2).sum() == int(ends) * images[row]
        assert not patches.arrays["pixels"][0][grid[:, 0] < 0].any()
        assert feed_bytes(source.rows, SAMPLES, rows, 0) == sum(x.nbytes for x in words.values())


def test_a_token_sees_its_run_of_image_tokens() -> None:
    inside = np.array([0, 1, 1, 0, 1, 0, 1, 1, 1], dtype=np.bool_)
    assert run_ends(inside).tolist() == [0, 2, 2, 3, 4, 5, 8, 8, 8]
    assert run_ends(inside[:0]).tolist() == []


def test_windows_change_the_order_of_patches_for_the_encoder_alone(tmp_path: Path) -> None:
    """Each token of the language model keeps its patch."""
    plain, source = make_source(tmp_path, "plain"), make_source(tmp_path, "index", window=2)
    moved = 0
    for row in range(source.rows.count):
        rows = np.array([row])
        (words, patches), (old_words, old) = (
            (run_feed(s, SAMPLES, 0, rows, 0).arrays, run_feed(s, PATCHES, 0, rows, 0).arrays) for s in (source, plain)
        )
        for name in ("tokens", "axis_positions", "image_ends"):
            assert (words[name] == old_words[name]).all()
        assert (patches["documents"] == old["documents"]).all()
        places, old_places = (w["image_places"][0].tolist() for w in (words, old_words))
        assert sorted(places) == old_places
        for name in ("pixels", "grid"):
            assert (patches[name][0] == old[name][0][[old_places.index(place) for place in places]]).all()
        keys = np.column_stack([patches["documents"][0], patches["grid"][0][:, :2] // 2]).tolist()
        runs = [key for number, key in enumerate(keys) if number == 0 or key != keys[number - 1]]
        assert len(runs) == len({*map(tuple, runs)}), "the patches of a window follow each other"
        moved += int(places != old_places)
    assert moved > 3


def test_tokens_of_images_have_positions_on_three_axes() -> None:
    """An image of 2 x 3 patches behind two words, one of 2 x 1 at once behind it, and two more words."""
    positions = axis_positions(12, {2: (2, 3), 8: (2, 1)}).tolist()
    image = [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]
    assert positions == [[0] * 3, [1] * 3, *image, [5, 5, 5], [5, 6, 5], [7] * 3, [8] * 3]
