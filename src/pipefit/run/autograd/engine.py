"""Direct start of PyTorch's backward engine, without repeated validation for every microbatch.

`torch.autograd.backward` validates shapes and arguments in Python, about 30 microseconds per call on a slow core, paid
once per action. On the CPU this file calls the engine itself: `Variable._execution_engine.run_backward`, a private
name, with the arguments that `torch.autograd.backward` has passed it since PyTorch 1.8. Only this file uses it, and it
falls back to the public function if the name is gone. On other devices the public function also passes context to the
device's threads, and its cost hides behind the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

_ENGINE: Any = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None)


def run_backward(roots: Sequence[Any], gradients: Sequence[torch.Tensor]) -> None:
    """Accumulate the gradients of all leaves below `roots` (tensors or gradient edges)."""
    if not roots:
        return
    if _ENGINE is None or gradients[0].device.type != "cpu":
        torch.autograd.backward(roots, gradients)
    else:
        _ENGINE(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradient_edge(y: torch.Tensor) -> Any:
    """Return the graph edge that receives the gradient of y, without keeping y's storage; None if y needs no
    gradient."""
    if not y.requires_grad:
        return None
    node = y.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(y)  # a node written in Python needs a token that keeps it alive
    return GradientEdge(node, y.output_nr)
