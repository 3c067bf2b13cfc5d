"""Bad and odd input: broken and absent images, rows that are no samples, samples that are too long, folders."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from tests.support.multimodal_toys import RULE, SEQUENCE, mixed_index, shape_of, source_of, write_images, write_rows

from pipefit.data.multimodal.feeds import run_feed
from pipefit.data.multimodal.folder import write_manifest
from pipefit.data.multimodal.images import ImageRule
from pipefit.data.multimodal.index import IndexRequest, make_index, open_index
from pipefit.data.multimodal.sample_rows import rows_of_index
from pipefit.data.multimodal.step import multimodal_evaluation, multimodal_step
from pipefit.errors import DataError


def indexed(folder: Path, rows: list[Any], **options: Any) -> Any:
    request = IndexRequest(source=str(write_rows(folder / "m.jsonl", rows)), images=RULE, **options)
    summary = make_index(request, folder / "index")
    assert open_index(folder / "index").summary == summary
    return summary


def three(folder: Path) -> list[Any]:
    """Three samples of an image and a text; the names of the images are a, b, c."""
    folder.mkdir(exist_ok=True)
    for name, size in (("a", 24), ("b", 30), ("c", 17)):
        pixels = np.random.default_rng(size).integers(0, 256, (size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return [{"id": name, "parts": [{"image": f"{name}.png"}, {"text": name}]} for name in "abc"]


def cut_short(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


def test_a_broken_image_ends_the_indexing_or_leaves_its_sample_out_and_is_reported(tmp_path: Path) -> None:
    rows = three(tmp_path)
    cut_short(tmp_path / "b.png")
    with pytest.raises(DataError) as error:
        indexed(tmp_path, rows)
    assert error.value.what == "An image is broken."
    assert error.value.where == f"{tmp_path}/m.jsonl, line 2 (sample b)"
    assert str(error.value.seen).startswith("b.png: ")
    assert "--on-broken skip" in str(error.value.next_step)
    summary = indexed(tmp_path, rows, on_broken="skip")
    assert (summary.samples, summary.left_out, summary.images) == (2, 1, 2)
    assert [(each.sample, each.image) for each in summary.reported] == [("b", "b.png")]
    index = open_index(tmp_path / "index")
    assert [index.sample_name(sample) for sample in range(2)] == ["a", "c"]
    assert indexed(tmp_path, rows, check="header").samples == 3, "the header is whole"


def test_a_row_without_its_file(tmp_path: Path) -> None:
    rows = three(tmp_path)
    (tmp_path / "c.png").unlink()
    with pytest.raises(DataError) as error:
        indexed(tmp_path, rows)
    assert error.value.what == "The manifest names an image whose file is not there."
    assert (error.value.where, error.value.seen) == (f"{tmp_path}/m.jsonl, line 3 (sample c)", "c.png")
    assert indexed(tmp_path, rows, on_broken="skip").reported[0].reason == "there is no such file"
    (tmp_path / "a.png").write_text("no image")
    (tmp_path / "b.png").unlink()
    with pytest.raises(DataError, match="There is no sample to train on") as error:
        indexed(tmp_path, rows, on_broken="skip")
    assert error.value.seen == "3 samples left out for their images"


def test_the_command_says_what_is_wrong_with_a_row_or_an_image_and_keeps_the_index(
    tmp_path: Path, pipefit: Callable[..., tuple[int, str, str]]
) -> None:
    """Code 2, one message with all its parts, and the index of before stands."""
    rows = three(tmp_path)
    before = indexed(tmp_path, rows).digest
    words = ["data", str(tmp_path / "m.jsonl"), "-o", str(tmp_path / "index"), "--patch", "8"]
    (tmp_path / "c.png").unlink()
    code, _, error = pipefit(*words)
    assert code == 2 and "The manifest names an image whose file is not there." in error
    for part in (
        "where: ",
        "seen: c.png",
        "allowed: image files that are there",
        "try: mend the file or remove the row",
    ):
        assert part in error
    cut_short(tmp_path / "a.png")
    code, _, error = pipefit(*words)
    assert code == 2 and "An image is broken." in error and "seen: a.png: " in error and "--on-broken skip" in error
    assert open_index(tmp_path / "index").summary.digest == before
    code, out, _ = pipefit(*words, "--on-broken", "skip")
    assert code == 0 and "2 samples left out for a broken or absent image" in out


def test_a_sample_longer_than_the_sequence(tmp_path: Path) -> None:
    rows = three(tmp_path)
    rows[1]["parts"].append({"text": "y" * 100})
    indexed(tmp_path, rows)
    index = open_index(tmp_path / "index")
    with pytest.raises(DataError) as error:
        rows_of_index(index, SEQUENCE)
    assert error.value.what == "A sample is longer than the sequence."
    assert error.value.where == f"{tmp_path}/index, sample b"
    assert (error.value.allowed, str(error.value.next_step)[-14:]) == ("at most 96 tokens", "--on-long skip")
    assert str(error.value.seen).startswith("111 tokens, images among them, for a sequence of 96; 1 of 3 samples")
    assert rows_of_index(index, 111).count == 3, "9 patches, 101 bytes and the end"
    kept = rows_of_index(index, SEQUENCE, on_long="skip")
    assert (kept.count, kept.too_long, kept.samples.tolist()) == (2, 1, [0, 2])


@pytest.mark.parametrize(
    ("row", "what", "seen"),
    [
        ("{", "The line is not valid JSON.", "'{'"),
        ('{"id": "x", "text": "y"}', "The row of the manifest has no parts.", "'id', 'text'"),
        ('{"parts": []}', "The row of the manifest has no parts.", "'parts'"),
        ('{"parts": [{"text": "a", "image": "b"}]}', "A part of the sample is neither a text nor an image.", "'image'"),
        ('{"parts": [{"image": 3}]}', "A part of the sample is neither a text nor an image.", "{'image': 3}"),
        ('{"parts": [{"text": "a", "lern": true}]}', "A part of the sample is neither a text nor an image.", "lern"),
    ],
)
def test_rows_that_are_no_samples(tmp_path: Path, row: str, what: str, seen: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"parts": [{{"text": "fine"}}]}}\n{row}\n')
    with pytest.raises(DataError) as error:
        make_index(IndexRequest(source=str(path)), tmp_path / "index")
    assert error.value.what == what and f"{path}, line 2" in str(error.value.where) and seen in str(error.value.seen)
    assert not (tmp_path / "index").exists()


def test_sources_rules_and_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("a,b")
    for source, seen in (("m.csv", "a file of another kind"), ("nowhere", "nothing")):
        with pytest.raises(DataError, match="no such manifest or folder") as error:
            make_index(IndexRequest(source=str(tmp_path / source)), tmp_path / "index")
        assert error.value.seen == seen
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious").touch()
    rows = write_rows(tmp_path / "m.jsonl", [{"parts": [{"text": "a"}]}])
    with pytest.raises(DataError, match="The folder for the index exists and is not an index"):
        make_index(IndexRequest(source=str(rows)), tmp_path / "taken")
    assert (tmp_path / "taken" / "precious").exists()
    with pytest.raises(DataError, match="This is no index of samples") as error:
        open_index(tmp_path / "taken")
    assert "pipefit data MANIFEST -o" in str(error.value.next_step)
    with pytest.raises(DataError, match="Images cannot be cut into such patches") as error:
        ImageRule(patch=16, side=225)
    assert "side 225" in str(error.value.seen)
    with pytest.raises(DataError, match="Images cannot be cut into such patches") as error:
        ImageRule(window=-1)
    assert "window -1" in str(error.value.seen) and "a window of at least 0 patches" in str(error.value.allowed)


def test_damaged_and_foreign_indexes_are_refused(tmp_path: Path) -> None:
    indexed(tmp_path, three(tmp_path))
    side = tmp_path / "index" / "index.json"
    text = side.read_text()
    side.write_text(text.replace('"format": 1', '"format": 9'))
    with pytest.raises(DataError, match="damaged") as error:
        open_index(tmp_path / "index")
    assert error.value.seen == "format 9, not 1"
    side.write_text(text)
    (tmp_path / "index" / "parts.npy").unlink()
    with pytest.raises(DataError, match="damaged"):
        open_index(tmp_path / "index")


def test_parquet_says_what_jsonl_says(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = three(tmp_path)
    rows[0]["parts"].append({"text": "unlearned", "learn": False})
    one = indexed(tmp_path, rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "m.parquet")
    two = make_index(IndexRequest(source=str(tmp_path / "m.parquet"), images=RULE), tmp_path / "other")
    assert two.digest == one.digest and two.samples == 3
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}]), tmp_path / "n.parquet")
    with pytest.raises(DataError, match="There is no column 'parts'"):
        make_index(IndexRequest(source=str(tmp_path / "n.parquet")), tmp_path / "other")


def test_a_manifest_of_a_folder_for_either_task(tmp_path: Path) -> None:
    names = write_images(tmp_path / "deep" / "photos", 3)
    for name in names:
        (tmp_path / "deep" / "photos" / name).with_suffix(".txt").write_text(f"this is {name}\n")
    target = tmp_path / "m.jsonl"
    assert write_manifest(tmp_path / "deep" / "photos", target) == 3
    first = json.loads(target.read_text().splitlines()[0])
    assert first == {"id": "000", "parts": [{"image": "deep/photos/000.png"}, {"text": "this is 000.png"}]}
    of_manifest = make_index(IndexRequest(source=str(target), images=RULE), tmp_path / "one")
    of_folder = make_index(IndexRequest(source=str(tmp_path / "deep" / "photos"), images=RULE), tmp_path / "two")
    assert of_manifest.tokens == of_folder.tokens and of_manifest.image_bytes == of_folder.image_bytes
    write_manifest(tmp_path / "deep" / "photos", target, "generate")
    first = json.loads(target.read_text().splitlines()[0])
    assert first["parts"] == [{"text": "this is 000.png", "learn": False}, {"generate": "deep/photos/000.png"}]
    (tmp_path / "deep" / "photos" / "001.txt").unlink()
    with pytest.raises(DataError, match="has no text beside it") as error:
        write_manifest(tmp_path / "deep" / "photos", target)
    assert str(error.value.where).endswith("001.jpg")
    with pytest.raises(DataError, match="There is no image in the folder"):
        write_manifest(tmp_path / "one", target)


def test_turned_and_grey_and_transparent_images_are_read_as_they_are_seen(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 16, 3), dtype=np.uint8)
    for tag in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = tag
        Image.fromarray(pixels).save(tmp_path / f"turned{tag}.png", exif=exif)
    Image.fromarray(pixels[..., 0]).save(tmp_path / "grey.png")
    Image.fromarray(pixels).convert("RGBA").save(tmp_path / "clear.png")
    names = (*(f"turned{tag}" for tag in range(1, 9)), "grey", "clear")
    rows = [{"parts": [{"image": f"{name}.png"}]} for name in names]
    indexed(tmp_path, rows)
    index = open_index(tmp_path / "index")
    arrays = run_feed(source_of(index), "patches", 0, np.arange(10), 0).arrays["pixels"][0].reshape(10, 8, 3, 4, 4)

    def whole(patches: Any, width: int, height: int) -> Any:
        tiles = patches.reshape(height // 4, width // 4, 3, 4, 4)
        return tiles.transpose(0, 3, 1, 4, 2).reshape(height, width, 3)

    sizes = [tuple(size) for size in index.images[:, :2].tolist()]
    for tag in range(1, 9):
        with Image.open(tmp_path / f"turned{tag}.png") as image:
            want = np.asarray(ImageOps.exif_transpose(image))
        assert sizes[tag - 1] == want.shape[1::-1] == ((16, 8) if tag < 5 else (8, 16))
        assert np.array_equal(whole(arrays[tag - 1], *sizes[tag - 1]), want)
    assert np.array_equal(whole(arrays[8], 16, 8), np.repeat(pixels[..., :1], 3, axis=2))
    assert np.array_equal(whole(arrays[9], 16, 8), pixels)


def test_held_out_rows_come_once_and_are_not_trained_on(tmp_path: Path) -> None:
    index = mixed_index(tmp_path, 20)
    rows, shape = rows_of_index(index, SEQUENCE, held_out=5), shape_of(4, 1, ((1,),))
    batches = [multimodal_evaluation(shape, rows, batch) for batch in range(2)]
    held = [row for batch in batches for row in batch.rows.tolist()]
    assert sorted(held) == [-1, -1, -1, *sorted(set(held) - {-1})] and len(set(held)) == 6
    trained = {row for step in range(8) for row in multimodal_step(shape, rows, step).rows.tolist()}
    assert trained == set(range(20)) - set(held)
    feed = run_feed(replace(source_of(index), rows=rows), "samples", 0, batches[1].rows, 0).arrays
    assert feed["tokens"].shape == (4, SEQUENCE) and (feed["labels"][1:] == -100).all()
    assert batches[1].counts["patches"][1:].tolist() == [0, 0, 0]
    with pytest.raises(DataError, match="There is no sample left to train on"):
        rows_of_index(index, SEQUENCE, held_out=20)
    with pytest.raises(DataError, match="This is not a valid number of rows to hold out"):
        rows_of_index(index, SEQUENCE, held_out=1.5)


def test_pillow_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(DataError, match="needs Pillow") as error:
        make_index(IndexRequest(source=str(tmp_path)), tmp_path / "index")
    assert error.value.next_step == "pip install 'pipefit[images]'"


def test_a_file_that_pretends_to_be_enormous_is_a_broken_image(tmp_path: Path) -> None:
    """A bomb: a small PNG whose header says 200,000 pixels square."""
    data = io.BytesIO()
    Image.new("L", (4, 4)).save(data, "PNG")
    raw = bytearray(data.getvalue())
    raw[16:24] = (200_000).to_bytes(4, "big") * 2
    import zlib

    raw[29:33] = zlib.crc32(raw[12:29]).to_bytes(4, "big")
    (tmp_path / "bomb.png").write_bytes(raw)
    with pytest.raises(DataError, match="An image is broken") as error:
        indexed(tmp_path, [{"parts": [{"image": "bomb.png"}]}])
    assert "bomb.png" in str(error.value.seen)
