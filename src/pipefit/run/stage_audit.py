"""Counts the bytes that are really alive, without asking the code that allocated them.

A dispatch mode sees every tensor that PyTorch makes while it is active and keeps a weak reference to its storage. So
what a forward keeps for its backward can be compared with what the planner says it keeps (`model.ops.saved_bytes`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageAudit(TorchDispatchMode):
    """`with StorageAudit() as audit: ...`, then `audit.live_bytes()` at any time, also after leaving."""

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
        """Bytes of the storages first seen here that something still refers to; each storage once."""
        return sum(self.live_sizes())

    def live_sizes(self) -> list[int]:
        """The same, storage by storage, largest first."""
        return sorted((size for reference, size in self._known.values() if not reference.expired()), reverse=True)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
