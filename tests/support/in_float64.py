"""References in float64: transformers casts to float32 at places."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class AllInFloat64(TorchFunctionMode):
    """transformers casts to float32 at places; this makes every such cast one to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(item: Any) -> Any:
            return torch.float64 if item is torch.float32 else item

        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(widen(item) for item in args)
        return func(*args, **{key: widen(item) for key, item in (kwargs or {}).items()})
