"""Independent measurement of live bytes, without asking the code that allocated them.

`StorageAudit`: a dispatch mode that sees every tensor PyTorch makes while it is active and keeps a weak reference to
its storage. It compares the tensors that a forward saves with the planner's count (`model.ops.saved_bytes`).

`AllocationAudit`: PyTorch's profiler records every allocation and release of the CPU allocator, including those inside
of operators. It compares the peak of a whole step with the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageAudit(TorchDispatchMode):
    """`with StorageAudit() as audit: ...`, then `audit.live_bytes()` at any time, also after the block."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _is_plain(leaf):
                storage = leaf.untyped_storage()
                if storage._cdata not in inputs:
                    self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self) -> int:
        """Return the bytes of storages first seen here that are still alive; each storage counts once."""
        return sum(self.live_sizes())

    def live_sizes(self) -> list[int]:
        """Return the bytes of each live storage, largest first."""
        return sorted((size for reference, size in self._known.values() if not reference.expired()), reverse=True)


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes allocated since the audit began and not yet released, around one named phase."""

    name: str
    peak_bytes: int
    after_bytes: int


class AllocationAudit:
    """`with AllocationAudit() as audit: ...`, then the peak and remaining bytes of this process's CPU memory.

    Memory allocated before the audit does not count, nor does its release. `mark_phase(name, call)` returns a function
    that runs `call` as a phase of that name; `usage` has one entry for each run.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.after_bytes = 0
        self.usage: list[MemoryUsage] = []
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    @staticmethod
    def mark_phase(name: str, call: Callable[[], None]) -> Callable[[], None]:
        """Return `call` wrapped as a named phase."""

        def run_marked() -> None:
            with record_function(_PREFIX + name):
                call()

        return run_marked

    def __enter__(self) -> AllocationAudit:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        results = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        memory = _own_changes(results.experimental_event_tree())
        events = results.events()
        marks = sorted(
            (e.start_ns(), e.start_ns() + e.duration_ns(), e.name()[len(_PREFIX) :])
            for e in events
            if e.name().startswith(_PREFIX)
        )
        level = cursor = 0
        for start, stop, name in marks:
            while cursor < len(memory) and memory[cursor][0] < start:
                level += memory[cursor][1]
                self.peak_bytes = max(self.peak_bytes, level)
                cursor += 1
            peak = level
            while cursor < len(memory) and memory[cursor][0] <= stop:
                level += memory[cursor][1]
                peak = max(peak, level)
                cursor += 1
            self.peak_bytes = max(self.peak_bytes, peak)
            self.usage.append(MemoryUsage(name, peak, level))
        for _, size in memory[cursor:]:
            level += size
            self.peak_bytes = max(self.peak_bytes, level)
        self.after_bytes = level


_PREFIX = "pipefit: "


def _own_changes(roots: Iterable[Any]) -> list[tuple[int, int]]:
    """Return (time in ns, bytes) of every allocation and of its release, ordered by time.

    The allocator remembers addresses of an earlier audit that were released after it, and reports the release of any
    later block at such an address. A release therefore counts only if its allocation was recorded.
    """
    events, allocations = list(roots), []
    while events:
        event = events.pop()
        events += event.children
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            allocations.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    alive: dict[int, int] = {}
    changes = []
    for time_ns, address, size in sorted(allocations, key=lambda change: change[0]):
        if size > 0:
            alive[address] = size
            changes.append((time_ns, size))
        elif address in alive:
            changes.append((time_ns, -alive.pop(address)))
    return changes


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
