"""Workers as Ray actors, on whatever machines the Ray cluster has; they must see the index and the images by the same
paths. Ray (extra `ray`) starts them and tells when one has died; everything else is the pool's.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.data.preparation.executor import (
    Event,
    HandlerFactory,
    Key,
    TaskFailed,
    TaskFinished,
    WorkerDied,
    WorkerReady,
    WorkerStarting,
)
from pipefit.errors import DataError, PipefitError

_READY, _ENDED = object(), object()
"""The keys of an actor's first calls: by the one it is known to be there; by the other, which never returns, to be
gone, also while it has nothing to do."""

_WAIT_S = 0.02


class RayActor:
    """What runs in an actor: the maker, opened once."""

    def __init__(self, maker: HandlerFactory) -> None:
        self._refused = ""
        try:
            self._make = maker.open()
        except Exception as error:  # told to the trainer as processes tell it; Ray would bury it in its own words
            self._refused = f"{type(error).__name__}: {error}"

    def ready(self) -> str:
        """Answers when the maker is open, or why it is not."""
        return self._refused

    def ended(self) -> None:
        """Never answers, so it fails when the actor has died."""
        threading.Event().wait()

    def make(self, request: Any) -> Any:
        """The result of one request, packed. An error of ours is a result as well: Ray would wrap it."""
        try:
            return _pack_result(self._make(request))
        except PipefitError as error:
            return error


@dataclass(slots=True)
class _ActorCall:
    worker: int
    key: Key


class RayWorkers:
    """An Executor of `count` Ray actors of one core each."""

    def __init__(self, maker: HandlerFactory, count: int, address: str | None = None, ray: Any = None) -> None:
        """`address`: of the cluster; None is the one of this environment, or a new one on this host. Raises DataError
        if Ray is not installed or cannot be reached."""
        self._ray = _import_ray() if ray is None else ray
        if not self._ray.is_initialized():
            _connect_ray(self._ray, address)
        self._class = self._ray.remote(num_cpus=1, max_restarts=0, max_concurrency=2)(RayActor)
        self.count = count
        self._maker = self._ray.put(maker)
        self._numbers = itertools.count()
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, _ActorCall] = {}
        self._starting: list[Event] = []
        for _ in range(count):
            self._spawn_actor()

    def submit(self, worker: int, key: Key, request: Any) -> None:
        if worker in self._actors:
            self._calls[self._actors[worker].make.remote(request)] = _ActorCall(worker, key)

    def wait(self, timeout_s: float) -> list[Event]:
        """Ray cannot be woken up, so this returns after a fiftieth of a second at the latest."""
        found, self._starting = self._starting, []
        calls = list(self._calls)
        done, _ = self._ray.wait(calls, num_returns=1, timeout=0 if found else min(timeout_s, _WAIT_S))
        if done:  # and whatever else is
            done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        for reference in sorted(done, key=lambda each: self._calls[each].key is _ENDED):  # results before deaths
            if reference in self._calls:  # and not of an actor that another of them was about
                found.append(self._event_of(reference))
        return found

    def wake(self) -> None:
        """See `wait`."""

    def kill(self, worker: int) -> None:
        if worker in self._actors:
            self._ray.kill(self._actors[worker], no_restart=True)

    def close(self) -> None:
        """End the actors. The connection to Ray stays: it may be the user's own."""
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._calls.clear()

    def _spawn_actor(self) -> None:
        number = next(self._numbers)
        self._actors[number] = self._class.remote(self._maker)
        self._calls[self._actors[number].ready.remote()] = _ActorCall(number, _READY)
        self._calls[self._actors[number].ended.remote()] = _ActorCall(number, _ENDED)
        self._starting.append(WorkerStarting(number))

    def _event_of(self, reference: Any) -> Event:
        call = self._calls.pop(reference)
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            return self._replace_dead(call.worker, _error_reason(error))
        except Exception as error:  # what the task raised, as Ray wraps it
            if call.key in (_READY, _ENDED):
                return self._replace_dead(call.worker, _error_reason(error))
            return TaskFailed(call.worker, call.key, error)
        if call.key is _READY:
            return self._replace_dead(call.worker, result) if result else WorkerReady(call.worker)
        if isinstance(result, PipefitError):
            return TaskFailed(call.worker, call.key, result)
        return TaskFinished(call.worker, call.key, _unpack_result(*result))

    def _replace_dead(self, worker: int, reason: str) -> WorkerDied:
        """Another actor in place of this one, of which nothing more is heard."""
        self._ray.kill(self._actors.pop(worker), no_restart=True)
        self._calls = {reference: call for reference, call in self._calls.items() if call.worker != worker}
        self._spawn_actor()
        return WorkerDied(worker, reason)


def _pack_result(result: Any) -> tuple[bytes, list[NDArray[np.uint8]]]:
    """A result as its pickle and what its arrays hold, apart. Arrays that Ray itself gives lie in its store, read-only;
    those that are made of this are the trainer's own."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(result, protocol=5, buffer_callback=buffers.append)
    return head, [np.asarray(buffer.raw()) for buffer in buffers]


def _unpack_result(head: bytes, parts: list[NDArray[np.uint8]]) -> Any:
    return pickle.loads(head, buffers=[bytearray(part.data) for part in parts])


def _error_reason(error: Exception) -> str:
    """What Ray says of an error, in a line: its first line tells what happened, its last one why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else type(error).__name__


def _connect_ray(ray: Any, address: str | None) -> None:
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
    except Exception as error:
        named = address or os.environ.get("RAY_ADDRESS")
        raise DataError(
            "Ray cannot be reached." if named else "Ray cannot be started on this host.",
            where=f"preparation, the Ray cluster at {named}" if named else "preparation",
            seen=_error_reason(error),
            allowed="a running Ray cluster of this version of Ray and Python, or a host that can start one",
            next_step="ray status; set RAY_ADDRESS to the cluster's address, or prepare with processes on this host",
        ) from error


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise DataError(
            "Preparing on other machines needs Ray, which is not installed.",
            where="preparation",
            next_step="pip install 'pipefit[ray]', or prepare with processes on this host",
        ) from None
    return ray
