"""Workers as Ray actors, on whatever machines the Ray cluster has; they must see the index and the images by the same
paths. Ray (extra `ray`) starts them and tells when one has died; everything else is the pool's.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

from pipefit.data.preparation.executor import Died, Event, Failed, Finished, Key, Maker, Up
from pipefit.errors import DataError, PipefitError

_READY = object()
"""The key of an actor's first call, by which it is known to be there."""


class Actor:
    """What runs in an actor: the maker, opened once."""

    def __init__(self, maker: Maker) -> None:
        self._make = maker.open()

    def ready(self) -> None:
        """Answers when the maker is open."""

    def make(self, request: Any) -> Any:
        """The result of one request. An error of ours is a result as well: Ray would wrap it."""
        try:
            return self._make(request)
        except PipefitError as error:
            return error


@dataclass(slots=True)
class _Call:
    worker: int
    key: Key


class RayWorkers:
    """An Executor of `count` Ray actors of one core each."""

    def __init__(self, maker: Maker, count: int, address: str | None = None, ray: Any = None) -> None:
        """`address`: of the cluster; None is the one of this environment, or a new one on this host. Raises DataError
        if Ray is not installed."""
        self._ray = _imported() if ray is None else ray
        if not self._ray.is_initialized():
            self._ray.init(address=address, include_dashboard=False, log_to_driver=False)
        self._class = self._ray.remote(num_cpus=1, max_restarts=0, max_concurrency=1)(Actor)
        self._maker = self._ray.put(maker)
        self._numbers = itertools.count()
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, _Call] = {}
        for _ in range(count):
            self._spawn()

    def submit(self, worker: int, key: Key, request: Any) -> None:
        if worker in self._actors:
            self._calls[self._actors[worker].make.remote(request)] = _Call(worker, key)

    def wait(self, timeout_s: float) -> list[Event]:
        """Ray cannot be woken up, so this returns after a fiftieth of a second at the latest."""
        if not self._calls:
            time.sleep(min(timeout_s, 0.02))
            return []
        calls = list(self._calls)
        done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=min(timeout_s, 0.02))
        return [self._event(reference) for reference in done]

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

    def _spawn(self) -> None:
        number = next(self._numbers)
        self._actors[number] = self._class.remote(self._maker)
        self._calls[self._actors[number].ready.remote()] = _Call(number, _READY)

    def _event(self, reference: Any) -> Event:
        call = self._calls.pop(reference)
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            del self._actors[call.worker]
            self._spawn()
            return Died(call.worker, str(error).splitlines()[0])
        except Exception as error:  # what the task raised, as Ray wraps it
            return Failed(call.worker, call.key, error)
        if call.key is _READY:
            return Up(call.worker)
        if isinstance(result, PipefitError):
            return Failed(call.worker, call.key, result)
        return Finished(call.worker, call.key, result)


def _imported() -> Any:
    try:
        import ray
    except ImportError:
        raise DataError(
            "Preparing on other machines needs Ray, which is not installed.",
            where="preparation",
            next_step="pip install 'pipefit[ray]', or prepare with processes on this host",
        ) from None
    return ray
