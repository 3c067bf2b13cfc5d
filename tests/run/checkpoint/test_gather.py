"""Checkpoints with real ranks over gloo: saved by four, loaded by three and by one; errors reach every rank."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import traceback
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.checkpoint_toys import put_together, random_pieces, random_tensors

from pipefit.errors import CheckpointError
from pipefit.run.checkpoint.checkpoint import files as checkpoint_files
from pipefit.run.checkpoint.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint, save_in_thread
from pipefit.run.checkpoint.gather import gather_full
from pipefit.run.checkpoint.pieces import CheckpointPiece

RANKS = 4
TIME_LIMIT_S = 120


def _tensors() -> dict[str, torch.Tensor]:
    return random_tensors(random.Random(11), 12)


def _held(rank: int, ranks: int, fill: bool, seed: int = 5) -> list[CheckpointPiece]:
    return random_pieces(random.Random(seed), _tensors(), ranks, fill)[rank]


def _save_and_reload(rank: int, directory: Path, three: dist.ProcessGroup) -> dict[str, Any]:
    """Saved by 4; loaded by the first three together, and by the fourth alone."""
    folder = save_checkpoint(directory, 1, _held(rank, RANKS, fill=True), {"seed": 3})
    ranks, place = (3, rank) if rank < 3 else (1, 0)
    last = dist.new_group([3])  # by all ranks: torch numbers groups in the order of their making
    group = three if rank < 3 else last
    wanted = _held(place, ranks, fill=False, seed=6)
    extra = load_checkpoint(folder, wanted, group=group)
    put_together(_tensors(), [wanted])
    return {"extra": extra, "loaded": len(wanted), "files": sorted(path.name for path in folder.iterdir())}


def _gather(rank: int, directory: Path, three: dist.ProcessGroup) -> dict[str, Any]:
    found = {}
    for name, tensor in gather_full(_held(rank, RANKS, fill=True)):
        assert (tensor is None) == (rank != 0)
        if tensor is not None:
            found[name] = tensor
    tensors = _tensors() if rank == 0 else {}
    assert set(found) == set(tensors)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    if rank < 3:  # a group that is not everybody
        part = [(name, tensor) for name, tensor in gather_full(_held(rank, 3, fill=True), group=three)]
        assert len(part) == len(_tensors())
    return {"gathered": len(found)}


def _save_while_training(rank: int, directory: Path, three: dist.ProcessGroup) -> dict[str, Any]:
    """A thread saves over its own group while the main thread changes the tensors and uses the default group."""
    own = dist.new_group(backend="gloo")
    held = _held(rank, RANKS, fill=True)
    pending = save_in_thread(directory, 2, held, {"seed": 4}, group=own)
    total = torch.ones(1)
    for _ in range(50):
        for piece in held:
            piece.tensor.zero_()
        dist.all_reduce(total)
        total.fill_(1)
    folder = pending.wait()
    wanted = _held(rank, RANKS, fill=False, seed=7)
    load_checkpoint(folder, wanted)
    put_together(_tensors(), [wanted])
    return {"folder": folder.name}


def _refuse(rank: int, directory: Path, three: dist.ProcessGroup) -> dict[str, Any]:
    """One rank cannot write; one rank wants what is not there; one rank finds a flipped byte: all ranks say so."""
    texts = {}
    real = checkpoint_files.write
    if rank == 2:

        def full(file: Any, data: Any) -> None:
            raise OSError(28, "No space left on device")

        checkpoint_files.write = full  # type: ignore[assignment]
    try:
        save_checkpoint(directory, 3, _held(rank, RANKS, fill=True), {})
    except CheckpointError as error:
        texts["full"] = error.full_text()
    checkpoint_files.write = real  # type: ignore[assignment]
    texts["latest"] = latest_checkpoint(directory).name  # type: ignore[union-attr]
    stranger = [CheckpointPiece(name="stranger", shape=(2,), tensor=torch.zeros(2))] if rank == 1 else []
    try:
        load_checkpoint(directory / "step-00000001", [*_held(rank, RANKS, fill=False), *stranger])
    except CheckpointError as error:
        texts["missing"] = error.full_text()
    dist.barrier()
    if rank == 0:
        path = directory / "step-00000001" / "tensors-00003.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    dist.barrier()
    wanted = _held(rank, RANKS, fill=False)
    try:
        load_checkpoint(directory / "step-00000001", wanted)
    except CheckpointError as error:
        texts["flipped"] = error.full_text()
    texts["touched"] = str(any(bool(piece.tensor.any()) for piece in wanted))
    return texts


SCENARIOS = (_save_and_reload, _gather, _save_while_training, _refuse)


def _rank_main(rank: int, rendezvous: str, directory: str, results: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
        )
        three = dist.new_group([0, 1, 2])
        said = {}
        for scenario in SCENARIOS:
            said[scenario.__name__] = scenario(rank, Path(directory), three)  # type: ignore[arg-type]
            dist.barrier()
        results.put((rank, json.dumps(said)))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank reported, by rank. All scenarios run in one set of processes: starting them is the dear part."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_rank_main, args=(rank, str(folder / "rendezvous"), str(folder / "run"), results))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=TIME_LIMIT_S) for _ in processes)
    except Empty:
        pytest.fail(f"a rank said nothing within {TIME_LIMIT_S} s")
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    for rank, text in found.items():
        assert text.startswith("{"), f"rank {rank}:\n{text}"
    return [json.loads(found[rank]) for rank in range(RANKS)]


@pytest.mark.gloo
def test_saved_by_four_ranks_loaded_by_three_and_by_one(said: list[dict[str, Any]]) -> None:
    for rank in said:
        assert rank["_save_and_reload"]["extra"] == {"seed": 3} and rank["_save_and_reload"]["loaded"] > 3
        assert rank["_save_and_reload"]["files"] == [
            "checkpoint.json",
            *(f"tensors-0000{i}.safetensors" for i in range(4)),
        ]


@pytest.mark.gloo
def test_whole_tensors_come_to_rank_0(said: list[dict[str, Any]]) -> None:
    assert [rank["_gather"]["gathered"] for rank in said] == [12, 0, 0, 0]


@pytest.mark.gloo
def test_a_thread_saves_while_the_ranks_go_on(said: list[dict[str, Any]]) -> None:
    assert {rank["_save_while_training"]["folder"] for rank in said} == {"step-00000002"}


@pytest.mark.gloo
def test_what_one_rank_finds_wrong_all_ranks_say(said: list[dict[str, Any]]) -> None:
    for rank in said:
        texts = rank["_refuse"]
        assert "could not be written" in texts["full"] and "No space left on device" in texts["full"]
        assert "rank 2" in texts["full"] and texts["latest"] == "step-00000002"
        assert "no tensor 'stranger'" in texts["missing"]
        assert "was changed after it was written" in texts["flipped"] and "tensors-00003" in texts["flipped"]
        assert texts["touched"] == "False"
