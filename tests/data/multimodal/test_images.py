"""Odd files and names: images of every mode, names that are no UTF-8, parquet cut off, indexes that do not fit."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.multimodal_toys import SEQUENCE, mixed_index, shape_of, source_of, write_images, write_rows

from pipefit.data.multimodal import images
from pipefit.data.multimodal.feeds import run_feed
from pipefit.data.multimodal.folder import write_manifest
from pipefit.data.multimodal.images import BrokenImageError, ImageRule, read_patches, read_size
from pipefit.data.multimodal.index import IndexRequest, make_index, open_index
from pipefit.data.multimodal.sample_rows import rows_of_index
from pipefit.data.preparation import ahead as ahead_module
from pipefit.data.preparation.ahead import BatchRecipe, HeldStage, StepPrefetcher
from pipefit.errors import DataError

RULE = ImageRule(patch=4, max_patches=64)
RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)
"""Every grey of 8 bits."""


def grey_of(path: Path) -> Any:
    """(16, 16) the pixels of an image of four by four patches, all channels equal."""
    found = read_patches(path, read_size(path, check=True), RULE).reshape(4, 4, 3, 4, 4)
    assert (found == found[:, :, :1]).all()
    return found[:, :, 0].transpose(0, 2, 1, 3).reshape(16, 16)


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
@pytest.mark.parametrize("kind", [np.uint16, np.int32])
def test_grey_of_16_bits_is_scaled_to_8(tmp_path: Path, name: str, kind: type) -> None:
    """Exactly: 257 x is the 16-bit value of the 8-bit value x. Values between go to the nearest."""
    if kind is np.int32 and name == "a.png":
        pytest.skip("Pillow writes no such PNG")
    wide = RAMP.astype(kind) * kind(257)
    Image.fromarray(wide).save(tmp_path / name)
    assert (grey_of(tmp_path / name) == RAMP).all()
    Image.fromarray(np.clip(wide.astype(np.int64) + 128, 0, 65535).astype(kind)).save(tmp_path / name)
    assert (grey_of(tmp_path / name) == RAMP).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_modes_of_8_bits_have_the_colours_that_pillow_gives_them(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.jpg" if mode in ("CMYK", "YCbCr") else "a.png")
    Image.fromarray(RAMP).convert("L" if mode == "P" else "RGB").convert(mode).save(path)
    if path.suffix == ".png":
        assert (grey_of(path) == np.asarray(Image.fromarray(RAMP).convert(mode).convert("L"))).all()
    else:
        assert np.abs(read_patches(path, read_size(path, True), RULE).mean() - RAMP.mean()) < 3


def test_pixels_without_a_known_range_are_broken_when_they_are_indexed(tmp_path: Path) -> None:
    Image.fromarray(RAMP.astype(np.float32)).save(tmp_path / "f.tif")
    Image.fromarray(RAMP.astype(np.int32) * 1000).save(tmp_path / "i.tif")
    for name, reason in (("f.tif", "floating-point"), ("i.tif", "more than 16 bits")):
        with pytest.raises(BrokenImageError, match=reason):
            read_size(tmp_path / name, check=True)
    rows = [{"parts": [{"image": "f.tif"}]}, {"parts": [{"image": "i.tif"}]}, {"parts": [{"text": "a"}]}]
    source = str(write_rows(tmp_path / "m.jsonl", rows))
    assert make_index(IndexRequest(source=source, on_broken="skip"), tmp_path / "index").left_out == 2


def test_an_animation_is_its_first_picture(tmp_path: Path) -> None:
    frames = [Image.new("L", (16, 16), grey) for grey in (40, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert (grey_of(tmp_path / "a.gif") == 40).all()


@pytest.mark.parametrize(("size", "tokens"), [((1, 1), 1), ((4, 4), 1), ((1000, 1), 64), ((3, 900), 64), ((7, 9), 2)])
def test_images_of_a_patch_or_less_and_very_long_ones(tmp_path: Path, size: tuple[int, int], tokens: int) -> None:
    Image.new("RGB", size).save(tmp_path / "a.png")
    found = read_size(tmp_path / "a.png", check=True)
    assert RULE.token_count(found.width, found.height) == len(read_patches(tmp_path / "a.png", found, RULE)) == tokens


def test_names_with_spaces_other_scripts_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    """From a folder, through a manifest and directly; the file behind the name is found again."""
    folder = tmp_path / "Fotos von früher"
    folder.mkdir()
    names = ["ein Bild.png", "写真.png", os.fsdecode(b"x\xff y.png")]
    for name in names:
        Image.new("RGB", (8, 8)).save(folder / name)
        (folder / name).with_suffix(".txt").write_text("text")
    assert write_manifest(folder, tmp_path / "m.jsonl") == 3
    for source in (folder, tmp_path / "m.jsonl"):
        make_index(IndexRequest(source=str(source), images=RULE), tmp_path / "index")
        index = open_index(tmp_path / "index")
        assert sorted(index.image_path(image).name for image in range(3)) == sorted(names)
        assert all(index.image_path(image).is_file() for image in range(3))
        assert {index.sample_name(sample) for sample in range(3)} == {"ein Bild", "写真", "x\\udcff y"}
    os.unlink(folder / names[2])
    feed = run_feed(replace(source_of(index), rows=rows_of_index(index, SEQUENCE)), "patches", 0, np.arange(3), 0)
    assert len(feed.broken) == 1 and json.dumps(feed.broken, ensure_ascii=False).encode("utf-8")


def test_ids_that_are_no_text_or_the_same_twice(tmp_path: Path) -> None:
    rows = [{"id": "\ud800", "parts": [{"text": "a"}]}, {"id": "x", "parts": [{"text": "b"}]},
            {"id": "x", "parts": [{"image": "\ud800.png"}]}, {"id": "x", "parts": [{"text": "c"}]}]  # fmt: skip
    source = str(write_rows(tmp_path / "m.jsonl", rows))
    summary = make_index(IndexRequest(source=source, on_broken="skip"), tmp_path / "index")
    index = open_index(tmp_path / "index")
    assert [index.sample_name(sample) for sample in range(3)] == ["\\ud800", "x", "x"]
    assert summary.reported[0].image == "\\ud800.png"


def test_parquet_that_is_cut_off(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path = tmp_path / "m.parquet"
    parquet.write_table(pyarrow.table({"parts": [[{"text": "a"}]] * 100}), path)
    assert make_index(IndexRequest(source=str(path)), tmp_path / "index").samples == 100
    whole = path.read_bytes()
    for length in (len(whole) // 2, len(whole) - 4, 3, 0):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="cannot be read as parquet") as error:
            make_index(IndexRequest(source=str(path)), tmp_path / "index")
        assert error.value.where == str(path)


@pytest.mark.parametrize("option", ["image_token", "generation_token"])
def test_token_ids_below_zero(option: str) -> None:
    with pytest.raises(DataError, match="This is no token id") as error:
        IndexRequest(source="m.jsonl", **{option: -1})  # type: ignore[arg-type]
    assert error.value.where == "--" + option.replace("_", "-")


def test_an_index_may_be_replaced_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = mixed_index(tmp_path, 4)
    monkeypatch.chdir(index.folder)
    make_index(index.summary.request, Path("."))
    assert open_index(index.folder).summary.digest == index.summary.digest


def test_an_index_may_be_replaced_through_a_link(tmp_path: Path) -> None:
    index, link = mixed_index(tmp_path, 4), tmp_path / "link"
    link.symlink_to(index.folder)
    make_index(index.summary.request, link)
    assert link.is_symlink() and open_index(index.folder).summary.digest == index.summary.digest
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("at", [0, 1])
def test_an_index_that_cannot_take_the_place_of_another_leaves_it_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The first or the second renaming fails."""
    index, real, calls = mixed_index(tmp_path, 4), os.replace, list[Any]()

    def failing(*ends: Any) -> None:
        calls.append(ends)
        if len(calls) == at + 1:
            raise OSError(errno.EIO, "Input/output error")
        real(*ends)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(DataError, match="The index cannot be written"):
        make_index(index.summary.request, index.folder)
    assert open_index(index.folder).summary.digest == index.summary.digest
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("call", range(3))
def test_there_is_a_whole_index_whenever_the_process_that_replaces_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Before each renaming and each removal: in its place, or beside it under the name that it was given."""
    index, calls = mixed_index(tmp_path, 4), list[Any]()

    def killed(real: Any) -> Any:
        def doing(*arguments: Any, **options: Any) -> Any:
            calls.append(arguments)
            if len(calls) > call:
                raise Killed
            return real(*arguments, **options)

        return doing

    monkeypatch.setattr(os, "replace", killed(os.replace))
    monkeypatch.setattr(shutil, "rmtree", killed(shutil.rmtree))
    with pytest.raises(Killed):
        make_index(index.summary.request, index.folder)
    found = [path.parent for path in tmp_path.glob("*index*/index.json")]
    assert found and (index.folder in found or call == 1)
    assert all(open_index(folder).summary.digest == index.summary.digest for folder in found)


@pytest.mark.parametrize("name", ["tokens", "sample_parts", "parts", "images", "texts", "text_ends"])
def test_an_array_of_an_index_that_is_empty_cut_or_of_another_one(tmp_path: Path, name: str) -> None:
    index, other = mixed_index(tmp_path / "one", 6), mixed_index(tmp_path / "other", 7)
    path = index.folder / f"{name}.npy"
    whole = path.read_bytes()
    for data in (b"", whole[: len(whole) // 2], (other.folder / f"{name}.npy").read_bytes()):
        path.write_bytes(data)
        with pytest.raises(DataError, match="This is no index of samples, or a damaged one"):
            open_index(index.folder)


def test_workers_refuse_an_index_that_has_taken_the_place_of_the_first(tmp_path: Path) -> None:
    index = mixed_index(tmp_path, 6)
    recipe = BatchRecipe(index=str(index.folder), shape=shape_of(6, 3, ((1,),)), digest=index.summary.digest)
    recipe.open()
    write_images(tmp_path / "images", 12, seed=5)
    make_index(index.summary.request, index.folder)
    with pytest.raises(DataError, match="The index has changed since the run began") as error:
        recipe.open()
    assert error.value.allowed == index.summary.digest


def test_images_that_are_all_gone_end_a_run_that_would_skip_some(tmp_path: Path) -> None:
    """The folder of the images is not where it was: to train on without them is not what was meant."""
    index = mixed_index(tmp_path, 12)
    recipe = BatchRecipe(index=str(index.folder), shape=shape_of(12, 3, ((1,), (1,))))
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    ahead = StepPrefetcher(recipe, (HeldStage(0, "patches", 0), HeldStage(1, "latents", 0)), None, on_broken="skip")
    with pytest.raises(DataError, match="broken now") as error:
        ahead.take_step(0)
    assert "whose samples with images are all broken" in str(error.value.where)


def failing(times: int, error: BaseException, real: Any) -> Any:
    """What raises an error so often, and then does what it should."""
    left = [times]

    def doing(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return real(*arguments, **options)

    return doing


@pytest.mark.parametrize("where", ["os.stat", "PIL.Image.open", "PIL.ImageFile.ImageFile.load", "os.path.getsize"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_an_error_of_the_system_that_passes_makes_no_image_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    """Twice it is tried again; what stays is said in the system's words, and not that there is no such file."""
    path = tmp_path / "a.png"
    Image.fromarray(RAMP).save(path)
    size, pixels = read_size(path, True), read_patches(path, read_size(path, True), RULE)
    owner, _, name = where.rpartition(".")
    holder = {"os": os, "os.path": os.path, "PIL.Image": Image, "PIL.ImageFile.ImageFile": Image.Image}[owner]
    if owner.endswith("ImageFile"):
        from PIL import PngImagePlugin

        holder = PngImagePlugin.PngImageFile
    real, error = getattr(holder, name), OSError(number, os.strerror(number), str(path))
    monkeypatch.setattr(images, "_PAUSES_S", (0.0, 0.0))
    for times, whole in ((2, True), (9, False)):
        for read, expected in ((lambda: read_size(path, True), size), (lambda: read_patches(path, size, RULE), pixels)):
            monkeypatch.setattr(holder, name, failing(times, error, real))
            if whole:
                assert np.array_equal(read(), expected)
            else:
                with pytest.raises(BrokenImageError) as caught:
                    read()
                assert str(caught.value) == os.strerror(number)
    monkeypatch.undo()


def test_a_name_that_no_file_has_a_folder_and_a_pipe_are_no_such_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("a")
    for name in ("absent", "pipe", "file/below", ".", "\ud800"):
        with pytest.raises(BrokenImageError, match="there is no such file"):
            read_size(tmp_path / name, True)


@pytest.mark.parametrize("where", ["open", "load", "convert"])
def test_memory_that_runs_out_makes_no_image_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Neither when it is indexed nor when it is read: its sample would be gone for good."""
    from PIL import PngImagePlugin

    index = mixed_index(tmp_path, 6)
    holder: Any = Image if where == "open" else PngImagePlugin.PngImageFile if where == "load" else Image.Image
    monkeypatch.setattr(holder, where, failing(10**6, MemoryError(), None))
    if where != "convert":
        with pytest.raises(MemoryError):
            make_index(replace(index.summary.request, on_broken="skip"), tmp_path / "other")
    with pytest.raises(MemoryError):
        run_feed(source_of(index), "patches", 0, np.arange(6), 0)


def test_workers_with_other_versions_of_what_decodes_images_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = mixed_index(tmp_path, 6)
    recipe = BatchRecipe(index=str(index.folder), shape=shape_of(6, 3, ((1,),)), versions=images.decoder_versions())
    recipe.open()
    assert images.decoder_versions() == f"Pillow {Image.__version__}, numpy {np.__version__}"
    monkeypatch.setattr(ahead_module, "decoder_versions", lambda: "Pillow 1.0, numpy 1.0")
    with pytest.raises(DataError, match="has other versions of the image decoders than the run") as error:
        recipe.open()
    assert (error.value.seen, error.value.allowed) == ("Pillow 1.0, numpy 1.0", images.decoder_versions())
    replace(recipe, versions="").open()
