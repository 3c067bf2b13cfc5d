"""The operator kinds: one file a kind, found by walking this package. See `docs/operators.md`.

KINDS            kind -> OperatorKind
graph_flops      FLOPs of a graph: forward, input gradient, weight gradient
saved_bytes      what a forward keeps, and what a pending W holds, under a recomputation choice
owed_bytes       what later slices owe to the keys and values of one
"""

from __future__ import annotations

from pipefit.model.ops.kind import Flops, OperatorKind
from pipefit.model.ops.saved import Kept, Recompute, Saved, effective_recompute, kept, owed_bytes, saved_bytes
from pipefit.model.ops.table import KINDS
from pipefit.model.ops.totals import graph_flops, graph_traffic_bytes, infer, recompute_flops

__all__ = [
    "KINDS",
    "Flops",
    "Kept",
    "OperatorKind",
    "Recompute",
    "Saved",
    "effective_recompute",
    "graph_flops",
    "graph_traffic_bytes",
    "infer",
    "kept",
    "owed_bytes",
    "recompute_flops",
    "saved_bytes",
]
