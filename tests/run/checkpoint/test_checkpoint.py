"""Checkpoints in one process: any layout into any other, what is refused, keeping the last ones, saving in a thread."""

from __future__ import annotations

import json
import math
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.checkpoint_toys import put_together, random_pieces, random_tensors, save_by_ranks

from pipefit.errors import CheckpointError
from pipefit.layout import flat_boxes
from pipefit.run.checkpoint.checkpoint import (
    CheckpointPiece,
    latest_checkpoint,
    load_checkpoint,
    locate_checkpoint,
    read_manifest,
    save_checkpoint,
    save_in_thread,
)
from pipefit.run.checkpoint.checkpoint import files as checkpoint_files
from pipefit.run.checkpoint.storage import ManifestReader


def whole(name: str, tensor: torch.Tensor) -> CheckpointPiece:
    return CheckpointPiece(name=name, shape=tuple(tensor.shape), tensor=tensor)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@given(sizes=st.lists(st.integers(1, 6), max_size=4), data=st.data())
def test_a_flat_run_is_few_boxes_in_order(sizes: list[int], data: st.DataObject) -> None:
    total = math.prod(sizes)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = torch.arange(total).reshape(sizes)
    boxes = list(flat_boxes(sizes, start, stop))
    elements = [int(x) for box in boxes for x in numbers[tuple(slice(*run) for run in box)].reshape(-1)]
    assert elements == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(sizes) - 1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), saved_by=st.integers(1, 5), loaded_by=st.integers(1, 4))
def test_any_layout_is_read_into_any_other(
    tmp_path_factory: pytest.TempPathFactory, seed: int, saved_by: int, loaded_by: int
) -> None:
    source = random.Random(seed)
    tensors = random_tensors(source)
    directory = tmp_path_factory.mktemp("save")
    folder = save_by_ranks(directory, 7, random_pieces(source, tensors, saved_by, fill=True), {"x": 1})
    wanted = random_pieces(source, tensors, loaded_by, fill=False)
    for held in wanted:
        assert load_checkpoint(folder, held) == {"x": 1}
    put_together(tensors, wanted)
    elements = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    stored = sum(
        math.prod(chunk.sizes) * getattr(torch, entry.dtype).itemsize
        for entry in read_manifest(folder).tensors.values()
        for chunk in entry.chunks
    )
    assert stored == elements  # what several ranks hold is written once


def test_what_all_ranks_hold_is_written_by_them_in_turn(tmp_path: Path) -> None:
    held = [whole(f"w{index}", torch.full((100,), float(index))) for index in range(8)]
    folder = save_by_ranks(tmp_path, 1, [held] * 4, {})
    files = [chunk.file for entry in read_manifest(folder).tensors.values() for chunk in entry.chunks]
    assert sorted(files) == sorted(2 * [f"tensors-0000{rank}.safetensors" for rank in range(4)])


def test_the_files_are_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {"w": torch.randn(3, 5).to(torch.bfloat16), "scalar": torch.tensor(2.5, dtype=torch.float64)}
    folder = save_checkpoint(tmp_path, 1, [whole(name, tensor) for name, tensor in tensors.items()], {})
    assert names(folder) == ["checkpoint.json", "tensors-00000.safetensors"]
    found = load_file(folder / "tensors-00000.safetensors")
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in found)


def test_the_stock_loader_of_dcp_reads_them_through_our_reader(tmp_path: Path) -> None:
    tensors = random_tensors(random.Random(3), 6)
    folder = save_by_ranks(tmp_path, 1, random_pieces(random.Random(4), tensors, 3, fill=True), {})
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(found, storage_reader=ManifestReader(folder), no_dist=True)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_tensors_without_elements_and_views_and_parameters(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    parameter = torch.nn.Parameter(base.clone())
    pieces = [whole("empty", torch.zeros(0, 3)), whole("transposed", base.t()), whole("parameter", parameter)]
    folder = save_checkpoint(tmp_path, 1, pieces, {})
    target = torch.zeros(12, 8)[::2, ::2]  # not contiguous
    loaded = torch.nn.Parameter(torch.zeros(4, 6))
    load_checkpoint(
        folder, [whole("empty", torch.zeros(0, 3)), whole("transposed", target), whole("parameter", loaded)]
    )
    assert torch.equal(target, base.t()) and torch.equal(loaded, parameter) and loaded.requires_grad


def test_another_precision_is_converted(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, [whole("w", torch.tensor([1.0, 1 / 3], dtype=torch.float64))], {})
    target = torch.zeros(2, dtype=torch.bfloat16)
    load_checkpoint(folder, [whole("w", target)])
    assert torch.equal(target, torch.tensor([1.0, 1 / 3]).to(torch.bfloat16))


def test_pieces_that_do_not_cover_a_tensor_once_are_a_bug_of_the_caller(tmp_path: Path) -> None:
    half = CheckpointPiece(name="w", shape=(4,), tensor=torch.ones(2), box=((0, 2),))
    with pytest.raises(AssertionError, match="no rank holds all of it"):
        save_checkpoint(tmp_path, 1, [half], {})
    rest = CheckpointPiece(name="w", shape=(4,), tensor=torch.ones(3), box=((1, 4),))
    with pytest.raises(AssertionError, match="overlap without being equal"):
        save_checkpoint(tmp_path, 1, [half, rest], {})
    shifted = CheckpointPiece(
        name="w", shape=(4,), tensor=torch.ones(2), box=((1, 3),)
    )  # as many elements, but not the last
    with pytest.raises(AssertionError, match="overlap without being equal"):
        save_checkpoint(tmp_path, 1, [half, shifted], {})
    with pytest.raises(AssertionError, match=r"tensor of \(2,\) for a box of \(3,\)"):
        save_checkpoint(tmp_path, 1, [CheckpointPiece(name="w", shape=(4,), tensor=torch.ones(2), box=((1, 4),))], {})
    assert latest_checkpoint(tmp_path) is None


def test_the_manifest_says_what_is_in_it(tmp_path: Path) -> None:
    extra = {"plan": "abc", "seed": 3, "deep": {"list": [1, 2.5, None]}}
    folder = save_checkpoint(tmp_path, 12, [whole("w", torch.ones(2, 3))], extra)
    manifest = read_manifest(folder)
    assert folder == tmp_path / "step-00000012" and manifest.step == 12 and manifest.extra == extra
    assert manifest.tensors["w"].shape == (2, 3) and manifest.tensors["w"].dtype == "float32"
    assert load_checkpoint(folder, []) == extra


# --- which one is the latest, and how many are kept


def test_latest_is_the_one_written_last_and_never_an_incomplete_one(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "nowhere") is None
    piece = whole("w", torch.ones(3))
    first, second = save_checkpoint(tmp_path, 10, [piece], {}), save_checkpoint(tmp_path, 20, [piece], {})
    assert latest_checkpoint(tmp_path) == second
    resumed = save_checkpoint(tmp_path, 15, [piece], {})  # a run that was resumed from 10
    assert latest_checkpoint(tmp_path) == resumed
    again = save_checkpoint(tmp_path, 15, [piece], {})  # saved again: never written over
    assert again.name == "step-00000015-2" and latest_checkpoint(tmp_path) == again
    (again / "checkpoint.json").unlink()
    assert latest_checkpoint(tmp_path) == resumed
    with (resumed / "tensors-00000.safetensors").open("r+b") as file:
        file.truncate(20)
    assert latest_checkpoint(tmp_path) == second
    (second / "checkpoint.json").write_text("{")
    assert latest_checkpoint(tmp_path) == first
    (tmp_path / "step-00000099").mkdir()
    (tmp_path / ".step-00000100.incomplete").mkdir()
    assert latest_checkpoint(tmp_path) == first


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.incomplete").mkdir()
    (tmp_path / ".step-00000001.deleted").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    for step in (1, 2, 3, 4, 2):
        save_checkpoint(tmp_path, step, [whole("w", torch.ones(3))], {}, keep=3)
    assert names(tmp_path) == ["metrics.jsonl", "step-00000002-2", "step-00000003", "step-00000004"]


def test_locate_takes_a_run_or_a_checkpoint(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoints", 1, [whole("w", torch.ones(3))], {})
    assert (
        locate_checkpoint(tmp_path)
        == locate_checkpoint(tmp_path / "checkpoints")
        == locate_checkpoint(folder)
        == folder
    )
    for path, seen in ((tmp_path / "nowhere", "no such folder"), (tmp_path.parent, "no complete folder")):
        with pytest.raises(CheckpointError, match="There is no checkpoint here") as caught:
            locate_checkpoint(path)
        assert seen in caught.value.full_text() and str(path) in caught.value.full_text()


def cut_tensors(folder: Path) -> None:
    with (folder / "tensors-00000.safetensors").open("r+b") as file:
        file.truncate(20)


def edit_manifest(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_text(path.read_text().replace('"step": 20', '"step": 21'))


def cut_manifest(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_bytes(path.read_bytes()[:50])


DAMAGES = {
    "tensors cut": (cut_tensors, "wrong size; it was probably cut short. 20 bytes"),
    "tensors gone": (
        lambda folder: (folder / "tensors-00000.safetensors").unlink(),
        "A file of the checkpoint is missing",
    ),
    "manifest edited": (edit_manifest, "its checksum does not agree"),
    "manifest cut": (cut_manifest, "manifest was cut short or changed. JSONDecodeError"),
    "manifest gone": (lambda folder: (folder / "checkpoint.json").unlink(), "This is not a checkpoint."),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_an_older_checkpoint_is_not_taken_for_a_damaged_newest_one(tmp_path: Path, case: str) -> None:
    damage, seen = DAMAGES[case]
    piece = whole("w", torch.ones(3))
    only = save_checkpoint(tmp_path / "alone" / "checkpoints", 20, [piece], {})
    older, _, newest = (save_checkpoint(tmp_path / "run" / "checkpoints", step, [piece], {}) for step in (10, 15, 20))
    shutil.rmtree(older.parent / "step-00000015")
    for folder, advice in ((only, "start a new run"), (newest, f"by name: --resume {older}")):
        damage(folder)
        for path in (folder.parent.parent, folder.parent):
            with pytest.raises(CheckpointError, match="The newest checkpoint is damaged") as caught:
                locate_checkpoint(path)
            text = caught.value.full_text()
            assert seen in text and str(folder) in text and advice in text, text
        with pytest.raises(CheckpointError):
            load_checkpoint(locate_checkpoint(folder), [])
    assert locate_checkpoint(older) == older, "asked for by name"
    (older.parent / ".step-00000030.incomplete").mkdir()
    again = save_checkpoint(older.parent, 30, [piece], {})
    if case.startswith("tensors"):
        assert locate_checkpoint(tmp_path / "run") == again, "the damaged one is known to be older"


def test_an_interrupted_save_does_not_stop_a_resume(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoints", 10, [whole("w", torch.ones(3))], {})
    for left in (".step-00000020.incomplete", ".step-00000005.deleted"):
        (tmp_path / "checkpoints" / left).mkdir()
    assert locate_checkpoint(tmp_path) == folder


# --- saving in a thread


def test_tensors_may_change_while_a_thread_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), checkpoint_files.write

    def slow(file, data) -> None:  # type: ignore[no-untyped-def]
        assert go.wait(30)
        real(file, data)

    monkeypatch.setattr(checkpoint_files, "write", slow)
    tensor, extra = torch.arange(10.0), {"step": 1, "list": [1]}
    flat = CheckpointPiece(name="flat", shape=(2, 5), tensor=tensor[3:], flat=(3, 10))
    rest = CheckpointPiece(name="flat", shape=(2, 5), tensor=tensor[:3], flat=(0, 3))
    pending = save_in_thread(tmp_path, 1, [whole("w", tensor), flat, rest], extra)
    tensor.zero_()
    extra["step"], extra["list"] = 2, [2]
    assert not pending.done and latest_checkpoint(tmp_path) is None
    go.set()
    folder = pending.wait()
    assert pending.done
    one, two = torch.zeros(10), torch.zeros(2, 5)
    assert load_checkpoint(folder, [whole("w", one), whole("flat", two)]) == {"step": 1, "list": [1]}
    assert torch.equal(one, torch.arange(10.0)) and torch.equal(two.reshape(-1), torch.arange(10.0))


def test_a_thread_that_fails_says_so_when_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file, data) -> None:  # type: ignore[no-untyped-def]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "write", full)
    pending = save_in_thread(tmp_path, 1, [whole("w", torch.ones(3))], {})
    with pytest.raises(CheckpointError, match="could not be written") as caught:
        pending.wait()
    assert "No space left on device" in caught.value.full_text() and "earlier checkpoints are as they were" in str(
        caught.value
    )


# --- what is refused


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {f"layers.{i}.weight": torch.arange(40.0).reshape(8, 5) + i for i in range(3)}
    pieces = random_pieces(random.Random(1), tensors, 2, fill=True)
    return save_by_ranks(tmp_path, 5, pieces, {"plan": "p"})


def refusal(folder: Path, pieces: list[CheckpointPiece] | None = None, **options: bool) -> str:
    """The text of the error, after checking that no tensor was touched."""
    pieces = pieces or [whole(f"layers.{i}.weight", torch.full((8, 5), -1.0)) for i in range(3)]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, pieces, **options)
    assert all((piece.tensor == -1).all() for piece in pieces)
    return caught.value.full_text()


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        message = refusal(folder)
        assert "This is not a checkpoint." in message and str(folder) in message and "checkpoint.json" in message


def test_a_missing_file(checkpoint: Path) -> None:
    (checkpoint / "tensors-00001.safetensors").unlink()
    message = refusal(checkpoint)
    assert "A file of the checkpoint is missing." in message and "tensors-00001.safetensors" in message


@pytest.mark.parametrize("kept", [0, 1, 7, 100, -1])
def test_a_file_that_was_cut_short(checkpoint: Path, kept: int) -> None:
    path = checkpoint / "tensors-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    message = refusal(checkpoint)
    assert "wrong size; it was probably cut short" in message and str(path) in message
    assert f"{len(content)} bytes" in message


def test_a_manifest_that_was_cut_short(checkpoint: Path) -> None:
    path = checkpoint / "checkpoint.json"
    content = path.read_bytes()
    for kept in range(0, len(content) - 2, 7):
        path.write_bytes(content[:kept])
        assert "The checkpoint's manifest was cut short or changed." in refusal(checkpoint)


def test_one_flipped_byte_anywhere_is_found(checkpoint: Path) -> None:
    source = random.Random(2)
    for path in sorted(checkpoint.iterdir()):
        content = path.read_bytes()
        for place in sorted({0, 7, 8, 9, len(content) - 1, *(source.randrange(len(content)) for _ in range(80))}):
            changed = bytearray(content)
            changed[place] ^= source.randint(1, 255)
            path.write_bytes(changed)
            if path.suffix == ".json" and content[place : place + 1].isspace() and changed[place] in b" \t\r\n":
                load_checkpoint(checkpoint, [])  # another blank between two words of JSON says the same
            elif path.suffix == ".json":
                assert "manifest was cut short or changed" in refusal(checkpoint)
            else:
                message = refusal(checkpoint)
                assert "was changed after it was written" in message and str(path) in message and "SHA-256" in message
        path.write_bytes(content)
    assert load_checkpoint(checkpoint, [whole(f"layers.{i}.weight", torch.zeros(8, 5)) for i in range(3)]) == {
        "plan": "p"
    }


def test_a_tensor_that_is_not_there(checkpoint: Path) -> None:
    message = refusal(checkpoint, [whole("layers.7.weight", torch.full((8, 5), -1.0))])
    assert "The checkpoint has no tensor 'layers.7.weight'" in message and "another model" in message
    assert "3 tensors, such as layers." in message


def test_a_tensor_of_another_shape(checkpoint: Path) -> None:
    good = whole("layers.0.weight", torch.full((8, 5), -1.0))
    message = refusal(checkpoint, [good, whole("layers.1.weight", torch.full((5, 8), -1.0))])
    assert "'layers.1.weight' has another shape in the checkpoint" in message
    assert "[8, 5] in the checkpoint" in message and "[5, 8] in the model" in message
    empty = CheckpointPiece(name="layers.1.weight", shape=(5, 8), tensor=torch.zeros(0), flat=(3, 3))
    assert "another shape" in refusal(checkpoint, [empty])


def test_a_checkpoint_of_another_version(checkpoint: Path) -> None:
    forge(checkpoint, lambda data: data.update(version=99))
    message = refusal(checkpoint)
    assert "another format or version" in message and "pipefit-checkpoint 99" in message


def forge(checkpoint: Path, change) -> None:  # type: ignore[no-untyped-def]
    """Rewrite the manifest with a right checksum, as somebody who means harm would."""
    from pipefit.run.checkpoint.manifest import _json_checksum

    path = checkpoint / "checkpoint.json"
    data = json.loads(path.read_text())
    del data["checksum"]
    change(data)
    path.write_text(json.dumps({**data, "checksum": _json_checksum(data)}))


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda d: d["files"].update({"../../etc/passwd": {"bytes": 1, "sha256": ""}}), "'../../etc/passwd'"),
        (lambda d: d["files"].update({"weights.pkl": {"bytes": 1, "sha256": ""}}), "'weights.pkl'"),
        (lambda d: d["tensors"]["layers.0.weight"].update(dtype="object"), "unknown dtype 'object'"),
        (lambda d: d["tensors"]["layers.0.weight"]["chunks"].pop(), "do not cover it"),
        (lambda d: d["tensors"]["layers.0.weight"].update(shape=[4, 10]), "lies outside of it"),
        (lambda d: d["tensors"]["layers.0.weight"].update(shape=[40]), "another number of dimensions"),
        (lambda d: d["tensors"]["layers.0.weight"]["chunks"][0].update(file="tensors-9.safetensors"), "outside of it"),
        (lambda d: d.pop("step"), "'step' is missing"),
        (lambda d: d.update(more=1), "Unknown field 'more'"),
    ],
)
def test_a_forged_manifest(checkpoint: Path, change, seen: str) -> None:  # type: ignore[no-untyped-def]
    forge(checkpoint, change)
    message = refusal(checkpoint)
    assert "manifest was cut short or changed" in message and seen in message
