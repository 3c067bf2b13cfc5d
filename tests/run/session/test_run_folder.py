"""What `pipefit train` leaves and how long it says a step took, in one process: files, checkpoints, a second start."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace

import pytest
import torch
from tests.support import train_toys as toys
from tests.support import worker_plans as plans

from pipefit.plan.check.rules import save_plan
from pipefit.run.checkpoint import checkpoint
from pipefit.run.session.train import TrainingRun
from pipefit.run.transfers.comms import CommGroups
from pipefit.run.update.optimizer import OptimizerConfig
from pipefit.run.worker.build import build_worker
from pipefit.run.worker.state import all_pieces, stored_pieces
from pipefit.run.worker.worker import StepResult


def test_a_disk_that_cannot_be_written_is_told(tmp_path, alone):
    """/dev/full takes no byte; the weights' folder is a file."""
    text = toys.write_text(tmp_path)
    path, _ = toys.write_plan(tmp_path, microbatches=2)
    run = tmp_path / "run"
    assert toys.train_here(path, text, run) == (0, "")
    cases = {"trace.json": "The trace", "weights": "The final weights", "metrics.jsonl": "The metrics file"}
    for steps, (name, what) in enumerate(cases.items(), 2):
        if name == "weights":
            shutil.rmtree(run / name)
            (run / name).write_text("in the way")
        else:
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to("/dev/full")
        code, err = toys.train_here(path, text, run, "--resume", str(run), "--trace", str(steps), steps=steps)
        assert code == 2 and f"pipefit: {what} cannot be written." in err and str(run / name) in err, err
        assert ("File exists" if name == "weights" else "No space left on device") in err and "Traceback" not in err
        (run / name).unlink()


def test_checkpoints_are_written_while_steps_run(tmp_path, monkeypatch, alone):
    """Each save of the thread waits until the next step has been taken; the last before the run ends."""
    real, stepped, seen = checkpoint.save_checkpoint, threading.Event(), []

    def late(directory, step, *arguments, **options):
        if step < 3:
            assert stepped.wait(60), "no step was taken during the save"
        seen.append(step)
        return real(directory, step, *arguments, **options)

    def watched(self, step):
        result = take(self, step)
        if step:
            stepped.set()
        return result

    take = TrainingRun.run_step
    monkeypatch.setattr(checkpoint, "save_checkpoint", late)
    monkeypatch.setattr(TrainingRun, "run_step", watched)
    text = toys.write_text(tmp_path)
    path, _ = toys.write_plan(tmp_path, microbatches=2)
    run = tmp_path / "run"
    assert toys.train_here(path, text, run, "--async-save", "--save-every", "1", "--keep", "2", steps=3) == (0, "")
    assert seen == [1, 2, 3]
    assert [checkpoint.read_manifest(f).step for f in sorted((run / "checkpoints").iterdir())] == [2, 3]
    code, err = toys.train_here(path, text, run, "--resume", str(run), steps=4)
    assert (code, err) == (0, "")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("in the way")
    (run / "metrics.jsonl").unlink()
    code, err = toys.train_here(path, text, run, "--async-save", steps=1)
    assert code == 2 and str(run / "checkpoints") in err and "Traceback" not in err, err


def test_token_ids_of_the_model_outlive_training(tmp_path, alone):
    text = toys.write_text(tmp_path)
    path, one = toys.write_plan(tmp_path, microbatches=2)
    (tmp_path / "model").mkdir()
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 256}  # beyond the vocabulary
    (tmp_path / "model" / "config.json").write_text(json.dumps(dict(one.model.config) | ids | {"dtype": "float16"}))
    save_plan(replace(one, model=replace(one.model, name=str(tmp_path / "model"))), path)
    assert toys.train_here(path, text, tmp_path / "run") == (0, "")
    config = json.loads((tmp_path / "run" / "weights" / "config.json").read_text())
    assert ids.items() <= config.items() and "dtype" not in config and config["hidden_size"] == 32


@pytest.mark.parametrize("precisions", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_continues_in_another_precision_from_its_float32_values(tmp_path, precisions):
    workers = []
    for precision in precisions:
        one = plans.plan("tied", replace(toys.JOB, precision=precision), microbatches=2)
        workers.append(build_worker(one, plans.model("tied"), CommGroups(), torch.device("cpu"), OptimizerConfig()))
    before, after = workers
    generator = torch.Generator().manual_seed(1)
    for optimizer in before.optimizers:
        optimizer.master.normal_(generator=generator)
        optimizer.round_master()
        optimizer.moments["second"].uniform_(generator=generator)
    folder = checkpoint.save_checkpoint(tmp_path, 1, all_pieces(before, saving=True), {})
    checkpoint.load_checkpoint(folder, stored_pieces(after, checkpoint.read_manifest(folder).tensors))
    for old, new in zip(before.optimizers, after.optimizers, strict=True):
        assert old.master.numel() and torch.equal(old.master, new.master), "every bit of the float32 values"
        assert torch.equal(new.parameter, old.master.to(new.parameter.dtype)) and torch.equal(
            old.moments["second"], new.moments["second"]
        )


def test_the_text_may_stand_in_another_field(tmp_path, alone):
    text = tmp_path / "corpus.jsonl"
    text.write_text("".join(json.dumps({"body": toys.TEXT}) + "\n" for _ in range(60)))
    path, _ = toys.write_plan(tmp_path, microbatches=2)
    code, err = toys.train_here(path, text, tmp_path / "run")
    assert code == 2 and "'text'" in err and not (tmp_path / "run").exists(), err
    assert toys.train_here(path, text, tmp_path / "run", "--field", "body") == (0, "")


def test_a_start_that_failed_does_not_block_the_next_one(tmp_path, monkeypatch, alone):
    """Its folder has config.json and empty metrics; the plan may lie in it, and a resume goes on there."""
    run = tmp_path / "run"
    run.mkdir()
    text = toys.write_text(tmp_path)
    path, _ = toys.write_plan(run, microbatches=2)
    monkeypatch.setenv("PIPEFIT_FAULT", "oom@0,0")
    code, err = toys.train_here(path, text, run)
    assert code == 2 and "ran out of memory" in err
    assert (run / "config.json").exists() and (run / "metrics.jsonl").read_text() == ""
    monkeypatch.delenv("PIPEFIT_FAULT")
    assert toys.train_here(path, text, run) == (0, "")
    assert toys.train_here(path, text, run, "--resume", str(run), steps=2) == (0, "")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4, "two steps, two evaluations"


@pytest.mark.parametrize(("every", "shortest_s"), [(1, 0.2), (2, 0.1)])
def test_the_time_of_a_step_holds_the_wait_for_its_results(tmp_path, monkeypatch, alone, every, shortest_s):
    """On a GPU a step returns when it is launched, and reading its loss waits until it is done."""
    read = StepResult.read_values

    def late(self):
        time.sleep(0.2)
        return read(self)

    monkeypatch.setattr(StepResult, "read_values", late)
    text = toys.write_text(tmp_path)
    path, _ = toys.write_plan(tmp_path, microbatches=2)
    assert toys.train_here(path, text, tmp_path / "run", "--log-every", str(every), steps=4) == (0, "")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "step_s" in record]
    assert [record["step"] for record in records] == list(range(every, 5, every))
    for record in records:
        assert record["step_s"] >= shortest_s
        assert record["tps"] == pytest.approx(record["tokens"] / record["step_s"])
