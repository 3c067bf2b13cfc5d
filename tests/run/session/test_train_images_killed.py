"""`pipefit train` on images, killed at each of its steps while workers prepare the next ones: what it goes on with,
under the same plan or another one, is what a run has that nobody disturbs; and no process is left. And samples that are
too long for a plan's sequence."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run.session.test_train_images import JOB, losses, norms, small_model, write_index
from tests.support import modules_toys as toys
from tests.support.modules_toys import Layout
from tests.support.train_toys import TIME_LIMIT_S, command, environment, train_here

from pipefit.data.multimodal.index import make_index, open_index
from pipefit.data.preparation.ahead import PreparedStep, StepPrefetcher
from pipefit.plan.check.rules import save_plan

STEPS = 3
RESUMED = (("one",), ("one", "other"), ("other",))
"""For each step at which a run is killed, the plans that resume it."""

OPTIONS = ("--held-out", "2", "--lr", "0.01", "--workers", "1")

ARRAYS = ("tokens", "labels", "pixels", "grid", "noisy", "target", "time")
"""What is fed, however samples are spread over microbatches and stages."""


def write_plans(folder: Path) -> None:
    """`one`: three stages; `other`: seven, two microbatches; both on one device. `apart`: two more processes."""
    model, cut = small_model(), {"vision": Layout(cuts=(1, 2)), "language": Layout(), "generator": Layout(cuts=(1, 2))}
    whole = dict.fromkeys(toys.ALL, Layout())
    plans = {
        "one": toys.plan(model, whole, together=True, microbatches=3, order="gpipe", job=JOB),
        "other": toys.plan(model, cut, together=True, microbatches=2, order="gpipe", job=JOB),
        "apart": toys.plan(model, whole, microbatches=2, job=JOB),
    }
    for name, plan in plans.items():
        save_plan(plan, folder / f"{name}.json")


def digest(prepared: PreparedStep) -> str:
    """Of the rows of a step in their order, its divisors, and all that they are fed with: arrays of equal name in
    several stages are the same, those of microbatches lie one behind the other."""
    found: dict[str, dict[int, Any]] = {}
    for (_, microbatch), feed in sorted(prepared.feeds.items()):
        axis = 0 if "tokens" in feed.arrays else 1
        for name in feed.arrays.keys() & {*ARRAYS}:
            key = f"{name} {'generated' if 'time' in feed.arrays else ''}"
            known = found.setdefault(key, {}).setdefault(microbatch, np.moveaxis(feed.arrays[name], axis, 0))
            assert np.array_equal(known, np.moveaxis(feed.arrays[name], axis, 0))
    state = hashlib.sha256(prepared.plan.rows.tobytes() + repr(sorted(prepared.plan.divisors.items())).encode())
    for name, parts in sorted(found.items()):
        whole = np.concatenate([parts[microbatch] for microbatch in sorted(parts)])
        state.update(f"{name} {whole.dtype} {whole.shape}".encode() + whole.tobytes())
    assert {name.split()[0] for name in found} == {*ARRAYS}
    return state.hexdigest()


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Step -> digest of what runs in this process are fed with there; a step that differs from before is an error."""
    found: dict[int, str] = {}
    real = StepPrefetcher.take_step

    def take(self: StepPrefetcher, step: int) -> PreparedStep:
        prepared = real(self, step)
        assert found.setdefault(step, digest(prepared)) == digest(prepared), f"step {step} is fed otherwise"
        return prepared

    monkeypatch.setattr(StepPrefetcher, "take_step", take)
    return found


def living(group: int, limit_s: float = 20.0) -> list[int]:
    """The processes of a group that are there when the time is over, or sooner none."""
    deadline = time.monotonic() + limit_s
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            except OSError:  # it has ended meanwhile
                continue
            if int(its_group) == group and state != "Z":
                found.append(int(path.parent.name))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def killed(words: list[str], fault: str) -> tuple[int, list[int]]:
    """(return code, what is left of a run that a fault ends)."""
    process = subprocess.Popen(
        words,
        env=environment(PIPEFIT_FAULT=fault),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(TIME_LIMIT_S)
        return code, living(process.pid)
    finally:
        for each in living(process.pid, 0.0):
            os.kill(each, signal.SIGKILL)


def checkpoints(run: Path) -> list[str]:
    folder = run / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_at_any_step_goes_on_with_the_same_batches(tmp_path: Path, fed: dict[int, str]) -> None:
    """Killed where a step begins, after the checkpoint of the one before: workers prepare this one and the next."""
    write_plans(tmp_path)
    index = write_index(tmp_path, samples=26)
    code, error = train_here(tmp_path / "one.json", index, tmp_path / "whole", *OPTIONS, steps=STEPS)
    assert code == 0, error
    wanted = losses(tmp_path / "whole"), norms(tmp_path / "whole")
    assert len(wanted[1]) == STEPS and len({*fed.values()}) == STEPS
    for step in range(STEPS):
        run = tmp_path / f"killed-{step}"
        saving = (*OPTIONS, "--save-every", "1")
        code, left = killed(command(tmp_path / "one.json", index, run, *saving, steps=STEPS), f"kill@0,{step}")
        assert (code, left) == (-signal.SIGKILL, [])
        assert checkpoints(run) == [f"step-{done:08d}" for done in range(1, step + 1)]
        for name in RESUMED[step]:
            again = tmp_path / f"{name}-{step}"
            shutil.copytree(run, again)
            resume = ("--resume", str(again)) if step else ()
            code, error = train_here(tmp_path / f"{name}.json", index, again, *OPTIONS, *resume, steps=STEPS)
            assert code == 0, error
            assert losses(again) == pytest.approx(wanted[0], rel=1e-9)
            assert norms(again) == pytest.approx(wanted[1], rel=1e-9)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
def test_a_process_of_several_that_is_killed_takes_all_workers_with_it(tmp_path: Path) -> None:
    """The one that decodes images to look at; the run goes on in one process."""
    write_plans(tmp_path)
    index = write_index(tmp_path, samples=26)
    code, error = train_here(tmp_path / "one.json", index, tmp_path / "whole", *OPTIONS, steps=STEPS)
    assert code == 0, error
    run, three = tmp_path / "run", (*OPTIONS, "--local", "3", "--save-every", "1", "--timeout", "10")
    code, left = killed(command(tmp_path / "apart.json", index, run, *three, steps=STEPS), "kill@0,2")
    assert (code, left) == (2, [])
    assert checkpoints(run) == ["step-00000001", "step-00000002"]
    code, error = train_here(tmp_path / "one.json", index, run, *OPTIONS, "--resume", str(run), steps=STEPS)
    assert code == 0, error
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)


def test_a_sample_that_is_too_long_ends_the_run_or_is_left_out_and_counted(
    tmp_path: Path, alone: None, pipefit: Callable[..., tuple[int, str, str]]
) -> None:
    write_plans(tmp_path)
    index = write_index(tmp_path)
    manifest = tmp_path / "manifest.jsonl"
    long = [json.dumps({"id": name, "parts": [{"text": "x" * size}]}) for name, size in (("p", 96), ("q", 500))]
    manifest.write_text(manifest.read_text() + "\n".join(long) + "\n")
    make_index(open_index(index).summary.request, index)
    words = command(tmp_path / "one.json", index, tmp_path / "run", "--held-out", "2", steps=1)[3:]
    code, _, error = pipefit(*words)
    assert code == 2 and error.count("pipefit: ") == 1 and "Traceback" not in error
    for part in ("A sample is longer than the sequence.", f"{index}, sample p", "97 tokens", "2 of 16 samples",
                 "allowed: at most 96 tokens", "--on-long skip"):  # fmt: skip
        assert part in error
    assert not (tmp_path / "run").exists()
    code, out, error = pipefit(*words, "--on-long", "skip")
    assert code == 0, error
    assert out.count("samples left out, longer than the sequence: 2\n") == 1
