"""Nothing is unpickled at load: pickles that would run code lie in the checkpoint, and the unpicklers are broken."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from pipefit.errors import CheckpointError
from pipefit.run.checkpoint.checkpoint import CheckpointPiece, latest_checkpoint, load_checkpoint, save_checkpoint


class Malicious:
    """Unpickling this makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return os.mkdir, (str(self.path),)


def test_the_trap_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Malicious(tmp_path / "run")))
    assert (tmp_path / "run").exists()


@pytest.fixture
def no_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)


def one(value: float) -> CheckpointPiece:
    return CheckpointPiece(name="w", shape=(3,), tensor=torch.full((3,), value))


@pytest.mark.usefixtures("no_unpickling")
def test_a_pickle_beside_the_tensors_is_never_loaded(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "run", 1, [one(5.0)], {})
    bomb = pickle.dumps(Malicious(tmp_path / "flag"))
    for name in (".metadata", "extra.pkl", "__0_0.distcp", "data.pkl"):
        (folder / name).write_bytes(bomb)
    piece = one(0.0)
    load_checkpoint(folder, [piece])
    assert torch.equal(piece.tensor, torch.full((3,), 5.0))
    assert not (tmp_path / "flag").exists()


@pytest.mark.usefixtures("no_unpickling")
def test_a_stock_dcp_checkpoint_with_a_malicious_pickle_is_refused_unread(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "flag")))
    with pytest.raises(CheckpointError, match="This is not a checkpoint"):
        load_checkpoint(folder, [one(0.0)])
    assert latest_checkpoint(tmp_path / "run") is None and not (tmp_path / "flag").exists()


@pytest.mark.usefixtures("no_unpickling")
@pytest.mark.parametrize("verify", [True, False])
def test_a_pickle_in_the_place_of_a_tensor_file_is_refused_unread(tmp_path: Path, verify: bool) -> None:
    """Manifest, sizes and hashes all forged to fit: the file is opened as safetensors, and is none."""
    folder = save_checkpoint(tmp_path / "run", 1, [one(5.0)], {})
    bomb = pickle.dumps(Malicious(tmp_path / "flag"))
    (folder / "tensors-00000.safetensors").write_bytes(bomb)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    del manifest["checksum"]
    manifest["files"]["tensors-00000.safetensors"] = {"bytes": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()}
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["checksum"] = hashlib.sha256(canonical.encode()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="does not hold the tensors that the manifest says") as caught:
        load_checkpoint(folder, [one(0.0)], verify=verify)
    assert "tensors-00000.safetensors" in caught.value.full_text() and not (tmp_path / "flag").exists()
