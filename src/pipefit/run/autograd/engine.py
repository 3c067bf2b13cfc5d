"""Starting PyTorch's backward engine with what we know already, without checking it again for every microbatch.

`torch.autograd.backward` validates shapes and arguments in Python, about 30 microseconds a call on a slow core, which
a stage pays once an action. On the CPU the engine itself is called: `Variable._execution_engine.run_backward`, a
private name, with the arguments that `torch.autograd.backward` has passed it since PyTorch 1.8; this file is the only
place that knows it, and falls back to the public function where it is gone. On other devices the public function also
hands context to the device's threads, and its cost hides behind the kernels.
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
    """Where the gradient of y enters the graph, without keeping y's storage; None where nothing flows back."""
    if not y.requires_grad:
        return None
    node = y.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(y)  # a node written in Python needs a token that keeps it alive
    return GradientEdge(node, y.output_nr)
