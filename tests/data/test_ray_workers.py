"""Ray actors behind the pool: with a stand-in that keeps Ray's interface, and with Ray where it is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from preparation_toys import Odd

from pipefit.data.preparation.dispatch import Limits
from pipefit.data.preparation.pool import Pool
from pipefit.data.preparation.ray_workers import RayWorkers
from pipefit.errors import DataError


class ActorError(Exception):
    """As ray.exceptions.RayActorError: what `get` raises of an actor that is gone."""


class Threads:
    """The part of Ray's interface that is used, with a thread for an actor. `dies(request)`: whoever gets it."""

    exceptions = SimpleNamespace(RayActorError=ActorError)

    def __init__(self, dies: Any) -> None:
        self.dies, self.actors, self.initialized = dies, list[Any](), False
        self.threads: list[ThreadPoolExecutor] = []

    def is_initialized(self) -> bool:
        return self.initialized

    def init(self, **options: Any) -> None:
        self.initialized = True

    def put(self, value: Any) -> Any:
        return value

    def remote(self, **options: Any) -> Any:
        assert options == {"num_cpus": 1, "max_restarts": 0, "max_concurrency": 1}
        return lambda kind: SimpleNamespace(remote=lambda *arguments: self._actor(kind(*arguments)))

    def get(self, reference: Future[Any]) -> Any:
        return reference.result()

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        done, rest = wait_for(references, timeout=timeout, return_when="FIRST_COMPLETED")
        return list(done), list(rest)

    def kill(self, actor: Any, no_restart: bool) -> None:
        actor.dead.append(True)

    def _actor(self, made: Any) -> Any:
        thread, dead = ThreadPoolExecutor(1), list[bool]()
        self.threads.append(thread)

        def call(method: Any, *arguments: Any) -> Any:
            if dead or (arguments and self.dies(arguments[0])):
                dead.append(True)
                raise ActorError("The actor died unexpectedly.\nmore")
            return method(*arguments)

        methods = {
            name: SimpleNamespace(remote=partial(thread.submit, call, getattr(made, name)))
            for name in ("ready", "make")
        }
        self.actors.append(SimpleNamespace(dead=dead, **methods))
        return self.actors[-1]


def run(pool: Pool, tasks: int) -> None:
    """Results in order, errors where they are waited for."""
    for key in range(tasks):
        pool.add(key, ("plain", key), 8000)
    assert [int(pool.take(key)[0][0]) for key in range(tasks)] == list(range(tasks))
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
    pool = Pool(RayWorkers(Odd(str(tmp_path)), 2, ray=ray))
    run(pool, 12)
    assert ray.initialized and len(ray.actors) == 4 and pool.counts.died == pool.counts.retried == 2
    pool.close()
    assert all(actor.dead for actor in ray.actors)
    for thread in ray.threads:
        thread.shutdown()


def test_a_task_that_kills_every_actor_is_given_up(tmp_path: Path) -> None:
    ray = Threads(lambda request: request[1] == 1)
    pool = Pool(RayWorkers(Odd(str(tmp_path)), 1, ray=ray), Limits(attempts=2))
    pool.add(0, ("plain", 1), 1)
    with pytest.raises(DataError, match="lost its worker every time") as error:
        pool.take(0)
    assert error.value.seen == "2 workers, the last one: The actor died unexpectedly."
    pool.close()
    for thread in ray.threads:
        thread.shutdown()


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
    pool = Pool(RayWorkers(Odd(str(tmp_path)), 2))
    run(pool, 8)
    pool.add("crash", ("crash once", 5), 8000)
    array, process = pool.take("crash")
    assert int(array[0]) == 5 and process != os.getpid() and pool.counts.died >= 1
    pool.close()
