"""Ray actors behind the pool: with a stand-in that keeps Ray's interface, and with Ray where it is installed."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.preparation_toys import Odd

from pipefit.data.preparation.dispatch import DispatchLimits
from pipefit.data.preparation.pool import WorkerPool
from pipefit.data.preparation.ray_workers import RayWorkers
from pipefit.errors import DataError


class ActorError(Exception):
    """As ray.exceptions.RayActorError: what `get` raises of an actor that is gone."""


class Threads:
    """The part of Ray's interface that is used, with a thread for an actor. `dies(request)`: whoever gets it.
    `pending`: so many actors find no place at first and never answer."""

    exceptions = SimpleNamespace(RayActorError=ActorError)

    def __init__(self, dies: Any = lambda request: False, pending: int = 0) -> None:
        self.dies, self.pending, self.actors, self.initialized = dies, pending, list[Any](), False
        self.threads: list[ThreadPoolExecutor] = []
        self.stalls = 0
        "Waits that went on though a call was ready."

    def is_initialized(self) -> bool:
        return self.initialized

    def init(self, **options: Any) -> None:
        self.initialized = True

    def put(self, value: Any) -> Any:
        return value

    def remote(self, **options: Any) -> Any:
        assert options == {"num_cpus": 1, "max_restarts": 0, "max_concurrency": 2}
        return lambda kind: SimpleNamespace(remote=lambda *arguments: self._actor(kind(*arguments)))

    def get(self, reference: Future[Any]) -> Any:
        """With arrays that are read-only, as those that lie in Ray's store are."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(reference.result(), protocol=5, buffer_callback=buffers.append)
        return pickle.loads(head, buffers=[bytes(buffer.raw()) for buffer in buffers])

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        """Until so many are ready, as Ray does."""
        until = time.monotonic() + timeout
        while True:
            done = [each for each in references if each.done()][:num_returns]
            rest = [each for each in references if each not in done]
            if len(done) == num_returns or time.monotonic() >= until:
                self.stalls += bool(timeout and done and rest and len(done) < num_returns)
                return done, rest
            wait_for(rest, timeout=max(0.0, until - time.monotonic()), return_when="FIRST_COMPLETED")

    def kill(self, actor: Any, no_restart: bool) -> None:
        actor.dead.append(True)
        for call in (actor.gone, *actor.never):
            with suppress(InvalidStateError):
                call.set_exception(ActorError("The actor died unexpectedly.\n\tpid: 7\nIts node has died."))

    def _actor(self, made: Any) -> Any:
        thread, actor = ThreadPoolExecutor(1), SimpleNamespace(dead=list[bool](), gone=Future[None](), never=[])
        self.threads.append(thread)

        def call(method: Any, *arguments: Any) -> Any:
            if actor.dead or (arguments and self.dies(arguments[0])):
                self.kill(actor, no_restart=True)
                raise ActorError("The actor died unexpectedly.\n\tpid: 7\nIts node has died.")
            return method(*arguments)

        for name in ("ready", "make"):
            setattr(actor, name, SimpleNamespace(remote=partial(thread.submit, call, getattr(made, name))))
        assert callable(made.ended)  # which no thread is given to: it never returns
        actor.ended = SimpleNamespace(remote=lambda: actor.gone)
        if self.pending:
            self.pending -= 1
            actor.never.append(Future[str]())
            actor.ready = SimpleNamespace(remote=lambda: actor.never[0])
        self.actors.append(actor)
        return actor

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown()


def run(pool: WorkerPool, tasks: int) -> None:
    """Results in order, errors where they are waited for."""
    for key in range(tasks):
        pool.add(key, ("plain", key), 8000)
    arrays = [pool.take(key)[0] for key in range(tasks)]
    assert [int(array[0]) for array in arrays] == list(range(tasks))
    assert all(array.flags.writeable for array in arrays)
    pool.add("bad", ("raise", 0), 1)
    with pytest.raises(DataError, match="An image is broken"):
        pool.take("bad")


def test_actors_that_die_are_replaced_and_their_tasks_done_again(tmp_path: Path) -> None:
    deadly = {3, 4}

    def dies(request: Any) -> bool:
        """At the first try of either task, whichever actor has it."""
        found = request[1] in deadly
        deadly.discard(request[1])
        return found

    ray = Threads(dies)
    pool = WorkerPool(RayWorkers(Odd(str(tmp_path)), 2, ray=ray))
    run(pool, 12)
    assert ray.initialized and len(ray.actors) == 4 and pool.counts.died == pool.counts.retried == 2
    pool.close()
    assert all(actor.dead for actor in ray.actors)
    ray.close()


def test_a_task_that_kills_every_actor_is_given_up(tmp_path: Path) -> None:
    ray = Threads(lambda request: request[1] == 1)
    pool = WorkerPool(RayWorkers(Odd(str(tmp_path)), 1, ray=ray), DispatchLimits(attempts=2))
    pool.add(0, ("plain", 1), 1)
    with pytest.raises(DataError, match="lost its worker every time") as error:
        pool.take(0)
    assert error.value.seen == "2 workers, the last one: The actor died unexpectedly. Its node has died."
    pool.close()
    ray.close()


def test_a_machine_that_is_lost_with_all_its_idle_actors_costs_no_task(tmp_path: Path) -> None:
    ray = Threads()
    pool = WorkerPool(RayWorkers(Odd(str(tmp_path)), 4, ray=ray))
    run(pool, 4)
    for actor in ray.actors:
        ray.kill(actor, no_restart=True)
    pool.add("after", ("plain", 9), 8000)
    assert int(pool.take("after")[0][0]) == 9 and pool.counts.died == 4 and len(ray.actors) == 8
    pool.close()
    ray.close()


def test_an_actor_that_finds_no_place_is_given_up_for_another(tmp_path: Path) -> None:
    ray = Threads(pending=2)
    pool = WorkerPool(RayWorkers(Odd(str(tmp_path)), 2, ray=ray), DispatchLimits(start_timeout_s=0.3))
    run(pool, 4)
    assert pool.counts.killed == pool.counts.died == 2 and len(ray.actors) == 4
    pool.close()
    ray.close()


def test_a_call_that_is_ready_is_not_kept_waiting_by_others(tmp_path: Path) -> None:
    ray = Threads()
    pool = WorkerPool(RayWorkers(Odd(str(tmp_path)), 2, ray=ray))
    run(pool, 20)
    assert ray.stalls == 0
    pool.close()
    ray.close()


class Closed:
    """A maker that nobody can open."""

    def open(self) -> Any:
        raise DataError("This is no index of samples.", where="/data/index")


def test_actors_that_cannot_open_what_they_are_told_say_why() -> None:
    ray = Threads()
    pool = WorkerPool(RayWorkers(Closed(), 1, ray=ray), DispatchLimits(attempts=2))
    pool.add(0, ("plain", 0), 1)
    with pytest.raises(DataError, match="die before they have done anything") as error:
        pool.take(0)
    assert error.value.seen == "DataError: This is no index of samples.\n  where: /data/index"
    pool.close()
    assert all(actor.dead for actor in ray.actors)
    ray.close()


@pytest.mark.parametrize(
    ("address", "what", "where"),
    [
        ("10.0.0.1:6379", "Ray cannot be reached.", "preparation, the Ray cluster at 10.0.0.1:6379"),
        (None, "Ray cannot be started on this host.", "preparation"),
    ],
)
def test_a_cluster_that_does_not_answer_is_an_error_that_says_which(
    address: str | None, what: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError("Could not find a running Ray instance.\nPlease specify one.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray = Threads()
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(DataError) as error:
        RayWorkers(Closed(), 1, address, ray=ray)
    assert (error.value.what, error.value.where) == (what, where)
    assert error.value.seen == "Could not find a running Ray instance. Please specify one."
    assert "running Ray cluster" in str(error.value.allowed) and "RAY_ADDRESS" in str(error.value.next_step)


def test_ray_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DataError, match="needs Ray, which is not installed") as error:
        RayWorkers(Odd(str(tmp_path)), 1)
    assert error.value.next_step == "pip install 'pipefit[ray]', or prepare with processes on this host"


@pytest.fixture
def ray() -> Iterator[Any]:
    """Ray itself, with the paths of this process, so that its actors find these tests."""
    ray = pytest.importorskip("ray")
    paths = os.pathsep.join(filter(None, sys.path))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_ray_itself_makes_up_for_actors_that_die(tmp_path: Path, ray: Any) -> None:
    pool = WorkerPool(RayWorkers(Odd(str(tmp_path)), 2))
    run(pool, 8)
    pool.add("crash", ("crash once", 5), 8000)
    array, process = pool.take("crash")
    assert int(array[0]) == 5 and process != os.getpid() and pool.counts.died >= 1
    pool.close()
