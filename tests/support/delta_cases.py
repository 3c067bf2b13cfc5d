"""Examples of the gated delta rule, against the recurrence of one token after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.support.op_case import make_example

from pipefit.testing.operator_example import OperatorExample


def run_recurrence(scale: float, norm_eps: float | None) -> Callable[..., Any]:
    """Return the rule one token and one head at a time."""

    def plain(q: Any, k: Any, v: Any, decay: Any, beta: Any) -> Any:
        heads, repeat = [], v.shape[2] // k.shape[2]
        if norm_eps is not None:
            q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + norm_eps) for x in (q, k))
        for h in range(v.shape[2]):
            state, rows = torch.zeros(len(k), k.shape[3], v.shape[3], dtype=v.dtype), []
            for t in range(v.shape[1]):
                key, growth = k[:, t, h // repeat, :, None], decay[:, t, h].exp().view(len(k), -1, 1)
                state = state * growth
                seen = (key * state).sum(1)
                state = state + beta[:, t, h, None, None] * key * (v[:, t, h] - seen)[:, None]
                rows.append(scale * (q[:, t, h // repeat, :, None] * state).sum(1))
            heads.append(torch.stack(rows, 1))
        return torch.stack(heads, 2)

    return plain


def _delta_case(chunk: int, by_feature: bool, norm_eps: float | None) -> OperatorExample:
    attributes = {"chunk": chunk, "scale": 0.4, "norm_eps": norm_eps}
    inputs = {
        "q": ("B", "T", 3, 4),
        "k": ("B", "T", 3, 4),
        "v": ("B", "T", 6, 5),
        "decay": ("B", "T", 6, 4) if by_feature else ("B", "T", 6),
        "beta": ("B", "T", 6),
    }
    return make_example("gated_delta", inputs, run_recurrence(0.4, norm_eps), attributes)


CASES = [
    _delta_case(4, False, 1e-6),
    _delta_case(2, False, None),
    _delta_case(64, True, 1e-6),
    _delta_case(4, True, None),
]
"""Six tokens: with padding, without, and in one short chunk."""
