"""Workers as Ray actors on the machines of a Ray cluster, which must see the index and the images at the same paths.

Ray (extra `ray`) starts the actors and reports their deaths; the pool does everything else.
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
    HandlerFactory,
    TaskFailed,
    TaskFinished,
    TaskKey,
    WorkerDied,
    WorkerEvent,
    WorkerReady,
    WorkerStarting,
)
from pipefit.errors import DataError, PipefitError
from pipefit.extras import install_command

_READY, _ENDED = object(), object()
"""Keys of an actor's first two calls. The first returns when the actor is ready. The second never returns, so it fails
when the actor dies, even an idle one."""

_WAIT_S = 0.02


class RayActor:
    """The code of an actor: a handler, opened once."""

    def __init__(self, maker: HandlerFactory) -> None:
        self._refused = ""
        try:
            self._make = maker.open()
        except Exception as error:  # reported like a process worker's error; Ray would bury it in its own words
            self._refused = f"{type(error).__name__}: {error}"

    def ready(self) -> str:
        """Return '' when the handler is open, or the reason for its failure."""
        return self._refused

    def ended(self) -> None:
        """Never return, so that the call fails when the actor dies."""
        threading.Event().wait()

    def make(self, request: Any) -> Any:
        """Return the packed result of one request. A PipefitError is returned, because Ray would wrap a raised one."""
        try:
            return _pack_result(self._make(request))
        except PipefitError as error:
            return error


@dataclass(slots=True)
class _ActorCall:
    worker: int
    key: TaskKey


class RayWorkers:
    """A WorkerExecutor of `count` Ray actors with one core each."""

    def __init__(self, maker: HandlerFactory, count: int, address: str | None = None, ray: Any = None) -> None:
        """`address`: of the cluster; None is the one in this environment, or a new one on this host.

        Raises DataError if Ray is not installed or cannot be reached.
        """
        self._ray = _import_ray() if ray is None else ray
        if not self._ray.is_initialized():
            _connect_ray(self._ray, address)
        self._class = self._ray.remote(num_cpus=1, max_restarts=0, max_concurrency=2)(RayActor)
        self.count = count
        self._maker = self._ray.put(maker)
        self._numbers = itertools.count()
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, _ActorCall] = {}
        self._starting: list[WorkerEvent] = []
        for _ in range(count):
            self._spawn_actor()

    def submit(self, worker: int, key: TaskKey, request: Any) -> None:
        if worker in self._actors:
            self._calls[self._actors[worker].make.remote(request)] = _ActorCall(worker, key)

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """Return new events. Ray cannot be woken up, so this returns after at most 0.02 s."""
        events, self._starting = self._starting, []
        calls = list(self._calls)
        done, _ = self._ray.wait(calls, num_returns=1, timeout=0 if events else min(timeout_s, _WAIT_S))
        if done:  # and all other finished calls
            done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        for reference in sorted(done, key=lambda each: self._calls[each].key is _ENDED):  # results before deaths
            if reference in self._calls:  # not of an actor replaced by an earlier event of this loop
                events.append(self._event_of(reference))
        return events

    def wake(self) -> None:
        """Does nothing; see `wait`."""

    def kill(self, worker: int) -> None:
        if worker in self._actors:
            self._ray.kill(self._actors[worker], no_restart=True)

    def close(self) -> None:
        """End the actors. The connection to Ray stays open: it may be the user's."""
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

    def _event_of(self, reference: Any) -> WorkerEvent:
        call = self._calls.pop(reference)
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            return self._replace_dead(call.worker, _error_reason(error))
        except Exception as error:  # the task's error, wrapped by Ray
            if call.key in (_READY, _ENDED):
                return self._replace_dead(call.worker, _error_reason(error))
            return TaskFailed(call.worker, call.key, error)
        if call.key is _READY:
            return self._replace_dead(call.worker, result) if result else WorkerReady(call.worker)
        if isinstance(result, PipefitError):
            return TaskFailed(call.worker, call.key, result)
        return TaskFinished(call.worker, call.key, _unpack_result(*result))

    def _replace_dead(self, worker: int, reason: str) -> WorkerDied:
        """Replace an actor by a new one and ignore its pending calls."""
        self._ray.kill(self._actors.pop(worker), no_restart=True)
        self._calls = {reference: call for reference, call in self._calls.items() if call.worker != worker}
        self._spawn_actor()
        return WorkerDied(worker, reason)


def _pack_result(result: Any) -> tuple[bytes, list[NDArray[np.uint8]]]:
    """Return a result as its pickle and the buffers of its arrays.

    Arrays that Ray returns lie read-only in its object store; arrays rebuilt from these buffers are writable.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(result, protocol=5, buffer_callback=buffers.append)
    return head, [np.asarray(buffer.raw()) for buffer in buffers]


def _unpack_result(head: bytes, parts: list[NDArray[np.uint8]]) -> Any:
    return pickle.loads(head, buffers=[bytearray(part.data) for part in parts])


def _error_reason(error: Exception) -> str:
    """Return a Ray error in one line: the first line is the event, the last line the cause."""
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
            next_step=f"{install_command('ray')}, or prepare with processes on this host",
        ) from None
    return ray
