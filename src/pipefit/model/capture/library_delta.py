"""Linear attention of `transformers` as the operator `gated_delta`, for the time of an export.

The library computes the gated delta rule in loops over the tokens of a chunk and over chunks, which an export would
unroll. Its functions are names of a class's file; earlier releases also keep them as attributes of a module.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from pipefit.model.ops.gated_delta import NORM_EPS

if TYPE_CHECKING:
    from torch import nn

FUNCTIONS = ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
"""Names of the functions in the files of classes, and of the attributes of modules."""


@contextmanager
def replace_delta_rules(module: nn.Module) -> Iterator[None]:
    """Replace the functions in all loaded files of classes, and the attributes of this module's parts."""
    files = [file for name, file in [*sys.modules.items()] if name.startswith("transformers.models.")]
    before = []
    for holder in (*files, *module.modules()):
        for name in FUNCTIONS:
            function = vars(holder).get(name)
            if callable(function):
                before.append((holder, name, function))
                setattr(holder, name, _call_rule(function))
    try:
        yield
    finally:
        for holder, name, function in before:
            setattr(holder, name, function)


def _call_rule(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the operator; it calls `function` where states of a cache or packed rows matter."""

    @wraps(function)
    def call_rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **options: Any) -> Any:
        from pipefit.model.families.leaf import call_operator

        stateful = options.get("initial_state") is not None or options.get("output_final_state")
        if stateful or options.get("cu_seqlens") is not None:
            return function(query, key, value, g, beta, **options)
        attributes = {
            "chunk": options.get("chunk_size", 64),
            "scale": query.shape[-1] ** -0.5,
            "norm_eps": NORM_EPS if options.get("use_qk_l2norm_in_kernel") else None,
        }
        tensors = [query, key, value, g, beta]
        return call_operator(tensors, "gated_delta", json.dumps(attributes, sort_keys=True)), None

    return call_rule
