"""Experts of `transformers` with rows apart, for the time of an export.

The library sorts the tokens of a batch by expert, so rows of different requests meet in one product. Here every expert
computes every token, and the weights of experts not selected are zero. Results and gradients are equal;
all experts are paid for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def separate_rows() -> Iterator[None]:
    """Replace all implementations of experts in `transformers`, if it is loaded."""
    library = sys.modules.get("transformers.integrations.moe")
    known = getattr(getattr(library, "ALL_EXPERTS_FUNCTIONS", None), "_global_mapping", None)
    if known is None:
        yield
        return
    before = dict(known)
    known.update(dict.fromkeys((*before, "eager"), run_all_experts))
    try:
        yield
    finally:
        known.clear()
        known.update(before)


def run_all_experts(experts: Any, x_ND: Any, selected_NS: Any, weight_NS: Any) -> Any:
    """The weighted sum of the experts' results; N tokens, D features, E experts, S selected ones of a token.

    A number beyond the last expert selects none.
    """
    import torch

    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    numbers_E = torch.arange(first.shape[0], device=x_ND.device)
    chosen_NSE = (selected_NS[..., None] == numbers_E).to(weight_NS.dtype)
    weight_NE = (chosen_NSE * weight_NS[..., None]).sum(1)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    hidden_ENF = _multiply(experts, name, x_ND, "nd")
    hidden_ENF = experts._apply_gate(hidden_ENF) if experts.has_gate else experts.act_fn(hidden_ENF)
    y_END = _multiply(experts, "down_proj", hidden_ENF, "end")
    if experts.has_post_expert_norm:
        y_END = experts.post_expert_norm(y_END)
    return (y_END * weight_NE.transpose(0, 1)[..., None].to(y_END.dtype)).sum(0).to(x_ND.dtype)


def _multiply(experts: Any, name: str, x: Any, labels: str) -> Any:
    import torch

    weight = getattr(experts, name)
    y_ENF = torch.einsum(f"{labels},{'edf' if experts.is_transposed else 'efd'}->enf", x, weight)
    return y_ENF + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else y_ENF
