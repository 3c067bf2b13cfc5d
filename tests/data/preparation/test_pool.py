"""Preparation by processes: the same bytes as in one process, whoever is killed, stopped or late, and on resuming."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.multimodal_toys import SEQUENCE, mixed_index, shape_of
from tests.support.preparation_toys import PLACES, Garbled, Odd, digest, gone, stands_still

from pipefit.data.multimodal.index import SampleIndex
from pipefit.data.preparation.ahead import BatchRecipe, StepPrefetcher
from pipefit.data.preparation.dispatch import DispatchLimits
from pipefit.data.preparation.pool import WorkerPool
from pipefit.data.preparation.processes import ProcessWorkers
from pipefit.errors import DataError
from pipefit.plan.types import SampleArrangement, SampleLoad

ROOT = Path(__file__).parents[3]
STEPS = 6


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    return mixed_index(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def recipe(index: SampleIndex) -> BatchRecipe:
    loads = tuple(SampleLoad(space=space, token_s=1e-3) for space in ("patches", "samples", "latents"))
    shape = shape_of(12, 3, ((1,), (1, 1), (1, 2)))
    return BatchRecipe(
        index=str(index.folder), shape=replace(shape, arranging=SampleArrangement(loads=loads, swaps=10))
    )


@pytest.fixture
def alone(recipe: BatchRecipe) -> list[str]:
    ahead = StepPrefetcher(recipe, PLACES, None)
    return [digest(ahead.take_step(step)) for step in range(STEPS)]


@pytest.fixture
def opened() -> Iterator[list[WorkerPool]]:
    """Pools that are closed in the end."""
    pools: list[WorkerPool] = []
    yield pools
    for pool in pools:
        pool.close()


def wait_for_deaths(pool: WorkerPool, deaths: int) -> None:
    """Wait until the pool has noticed `deaths` ended workers, the last of which may have been idle."""
    deadline_s = time.monotonic() + 30
    while pool.counts.died < deaths and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert pool.counts.died == deaths


def test_a_pool_gives_the_bytes_of_one_process_though_workers_die_and_however_it_resumes(
    recipe: BatchRecipe, alone: list[str], opened: list[WorkerPool]
) -> None:
    executor = ProcessWorkers(recipe, 2)
    pool = WorkerPool(executor, DispatchLimits(credit_bytes=60_000))  # less than a step: tasks wait for credits
    opened.append(pool)
    ahead = StepPrefetcher(recipe, PLACES, pool)
    assert len(set(alone)) == STEPS
    killed: set[int] = set()
    for step in range(STEPS):
        assert digest(ahead.take_step(step)) == alone[step]
        if step in (1, 3):  # a death may be noticed late: do not kill the dead worker again
            victim = next(process for process in executor.process_ids.values() if process not in killed)
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
    assert [digest(ahead.take_step(step)) for step in (2, 3, 0)] == [alone[2], alone[3], alone[0]]
    wait_for_deaths(pool, len(killed))
    ids = executor.process_ids.values()
    pool.close()
    assert all(gone(process) for process in ids)


def test_a_trainer_that_is_killed_at_any_step_goes_on_with_the_same_bytes_and_leaves_no_worker(
    recipe: BatchRecipe, alone: list[str], tmp_path: Path
) -> None:
    """What it resumes with is the recipe, which is the plan's, and the step."""
    stored, out = tmp_path / "recipe.pickle", tmp_path / "digests"
    stored.write_bytes(pickle.dumps(recipe))
    first, environment = 0, os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for kill_at in (0, 2, -1):
        program = [sys.executable, str(ROOT / "tests" / "support" / "preparation_toys.py"), str(stored), str(out)]
        words = [*program, str(first), str(STEPS), str(kill_at)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == (0 if kill_at < 0 else -signal.SIGKILL), done.stderr
        assert all(gone(int(process)) for process in done.stdout.split())
        first = len(out.read_text().splitlines()) if out.exists() else 0
        assert first == (STEPS if kill_at < 0 else kill_at)
    assert out.read_text().split() == [word for step in range(STEPS) for word in (str(step), alone[step])]


def test_a_run_goes_on_under_another_plan_with_the_same_samples(recipe: BatchRecipe) -> None:
    """Another number of microbatches and replicas, nothing balanced: what each sample is fed with is the same."""
    other = replace(recipe, shape=shape_of(12, 2, ((1, 1), (1,), (1,))))

    def samples(chosen: BatchRecipe, step: int) -> dict[int, tuple[bytes, ...]]:
        places = [
            type(PLACES[0])(stage, space, replica)
            for stage, space in enumerate(("patches", "samples", "latents"))
            for replica in range(len(chosen.shape.shares[stage]))
        ]
        found: dict[int, tuple[bytes, ...]] = {}
        for place in places:
            ahead = StepPrefetcher(chosen, (place,), None)
            prepared = ahead.take_step(step)
            for (stage, microbatch), feed in prepared.feeds.items():
                start, stop = prepared.plan.batch_run(stage, microbatch, place.replica)
                at = 0
                for position in range(start, stop):
                    tokens = 1 if place.space == "samples" else int(prepared.plan.counts[place.space][position])
                    where: Any = position - start if place.space == "samples" else (0, slice(at, at + tokens))
                    names = {"samples": ("tokens", "labels"), "patches": ("pixels",), "latents": ("noisy", "time")}
                    row = int(prepared.plan.rows[position])
                    parts = tuple(feed.arrays[name][where].tobytes() for name in names[place.space])
                    found[row] = (*found.get(row, ()), *parts)
                    at += tokens
        return found

    assert samples(recipe, 1) == samples(other, 1)
    orders = [StepPrefetcher(one, (), None).take_step(1).plan.rows.tolist() for one in (recipe, other)]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    assert recipe.shape.sequence_length == SEQUENCE


def test_workers_that_stop_crash_or_fail_are_made_up_for(tmp_path: Path, opened: list[WorkerPool]) -> None:
    executor = ProcessWorkers(Odd(str(tmp_path)), 2)
    pool = WorkerPool(executor, DispatchLimits(hedge_after_s=0.3, timeout_s=30))
    opened.append(pool)
    requests = [("plain", 0), ("plain", 1), ("crash once", 2), ("stop once", 3), ("plain", 4)]
    for key, request in enumerate(requests):
        pool.add(key, request, 8000)
    results = [pool.take(key) for key in range(len(requests))]
    assert [int(array[0]) for array, _ in results] == [0, 1, 2, 3, 4]
    assert all(array.size == 1000 and array.flags.writeable for array, _ in results)
    assert pool.counts.hedged >= 1 and pool.counts.retried >= 1
    assert os.getpid() not in {process for _, process in results}
    for key, (kind, message, seen, attempts) in enumerate(
        [
            ("raise", "An image is broken.", None, None),
            (
                "fail",
                "A preparation task fails every time.",
                "RuntimeError: KeyError: 'odd'",
                "one success in 3 attempts",
            ),
            (
                "crash",
                "A preparation task has lost its worker every time.",
                "ended by signal 9",
                "a worker that finishes the task within 30 s",
            ),
        ]
    ):
        pool.add((kind, key), (kind, key), 1)
        with pytest.raises(DataError) as error:
            pool.take((kind, key))
        assert error.value.what == message
        assert seen is None or str(error.value.seen).endswith(seen)
        assert error.value.allowed == attempts


def kill_all(executor: ProcessWorkers, sent: int) -> None:
    for process in list(executor.process_ids.values()):
        os.kill(process, sent)


def take_all(recipe: BatchRecipe, pool: WorkerPool) -> list[str]:
    ahead = StepPrefetcher(recipe, PLACES, pool)
    return [digest(ahead.take_step(step)) for step in range(STEPS)]


def test_workers_that_are_killed_before_they_are_up_are_started_again(
    recipe: BatchRecipe, alone: list[str], opened: list[WorkerPool]
) -> None:
    executor = ProcessWorkers(recipe, 2)
    kill_all(executor, signal.SIGKILL)
    opened.append(pool := WorkerPool(executor, DispatchLimits(attempts=1)))
    assert take_all(recipe, pool) == alone
    wait_for_deaths(pool, 2)


def test_workers_that_stand_still_before_they_are_up_are_killed_and_started_again(
    recipe: BatchRecipe, alone: list[str], opened: list[WorkerPool]
) -> None:
    executor = ProcessWorkers(recipe, 1)
    kill_all(executor, signal.SIGSTOP)
    opened.append(pool := WorkerPool(executor, DispatchLimits(start_timeout_s=4, attempts=9)))
    assert take_all(recipe, pool) == alone and pool.counts.killed >= 1


def test_all_workers_are_killed_at_once_while_they_have_tasks(opened: list[WorkerPool], tmp_path: Path) -> None:
    executor = ProcessWorkers(Odd(str(tmp_path)), 2)
    opened.append(pool := WorkerPool(executor))
    for key in range(2):
        pool.add(key, ("stop once", key), 8000)
    stopped = list(executor.process_ids.values())
    assert all(stands_still(process) for process in stopped)
    kill_all(executor, signal.SIGKILL)
    results = [pool.take(key) for key in range(2)]
    assert [array.tobytes() for array, _ in results] == [np.full(1000, key).tobytes() for key in range(2)]
    assert pool.counts.died == pool.counts.retried == 2 and not {process for _, process in results} & set(stopped)


def test_all_workers_are_killed_at_once_between_steps(
    recipe: BatchRecipe, alone: list[str], opened: list[WorkerPool]
) -> None:
    executor = ProcessWorkers(recipe, 3)
    opened.append(pool := WorkerPool(executor, DispatchLimits(credit_bytes=60_000)))
    ahead = StepPrefetcher(recipe, PLACES, pool)
    found = []
    for step in range(STEPS):
        found.append(digest(ahead.take_step(step)))
        if step == 2:
            kill_all(executor, signal.SIGKILL)
    assert found == alone
    wait_for_deaths(pool, 3)


def test_a_worker_that_stands_still_is_killed_after_the_time_limit_and_another_does_its_task(
    recipe: BatchRecipe, alone: list[str], opened: list[WorkerPool]
) -> None:
    executor = ProcessWorkers(recipe, 1)
    opened.append(pool := WorkerPool(executor, DispatchLimits(timeout_s=2, hedge_after_s=60, attempts=9)))
    ahead = StepPrefetcher(recipe, PLACES, pool)
    found = [digest(ahead.take_step(0))]
    kill_all(executor, signal.SIGSTOP)
    found += [digest(ahead.take_step(step)) for step in range(1, STEPS)]
    assert found == alone and pool.counts.killed >= 1 and pool.counts.died >= 1


def test_an_answer_that_cannot_be_read_costs_its_worker_and_says_why(opened: list[WorkerPool]) -> None:
    opened.append(pool := WorkerPool(ProcessWorkers(Garbled(), 1), DispatchLimits(attempts=2)))
    pool.add(0, "garbled", 1)
    with pytest.raises(DataError, match="lost its worker every time") as error:
        pool.take(0)
    assert error.value.seen == "2 workers, the last one: MemoryError: of this size"
    pool.add(1, "plain", 1)
    assert pool.take(1) == "plain"


def test_workers_do_not_take_modules_from_the_folder_that_the_trainer_stands_in(
    recipe: BatchRecipe, alone: list[str], opened: list[WorkerPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "socket.py").write_text("raise RuntimeError('not the one that is meant')")
    monkeypatch.setattr(sys, "path", [path or os.getcwd() for path in sys.path])
    monkeypatch.chdir(tmp_path)
    opened.append(pool := WorkerPool(ProcessWorkers(recipe, 1), DispatchLimits(attempts=1)))
    assert take_all(recipe, pool) == alone and pool.counts.died == 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_a_worker_that_stands_still_does_not_outlive_a_killed_trainer(tmp_path: Path) -> None:
    program = [sys.executable, "-c", STOPPED, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    out = tmp_path / "out"
    with out.open("w") as file:  # no pipe, which the worker would hold open
        done = subprocess.run(program, env=environment, stdout=file, stderr=file, timeout=60)
    assert done.returncode == -signal.SIGKILL, out.read_text()
    worker = int(out.read_text())
    try:
        assert gone(worker)
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


STOPPED = """
import os, signal, sys
from tests.support.preparation_toys import Odd, stands_still
from pipefit.data.preparation.pool import WorkerPool
from pipefit.data.preparation.processes import ProcessWorkers
executor = ProcessWorkers(Odd(sys.argv[1]), 1)
WorkerPool(executor).add(0, ("stop once", 0), 1)
[worker] = executor.process_ids.values()
assert stands_still(worker)
print(worker, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
"A trainer that is killed while its worker stands still over a task."


def test_workers_that_cannot_open_what_they_are_told_are_an_error_where_it_is_waited_for(
    tmp_path: Path, opened: list[WorkerPool], recipe: BatchRecipe
) -> None:
    """An index that is gone when workers open it: they die before they have done anything."""
    pool = WorkerPool(ProcessWorkers(replace(recipe, index=str(tmp_path / "nowhere")), 1), DispatchLimits(attempts=2))
    opened.append(pool)
    pool.add(0, None, 1)
    with pytest.raises(DataError, match="die before they have done anything") as error:
        pool.take(0)
    assert "This is no index of samples" in str(error.value.seen)
