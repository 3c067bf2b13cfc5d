"""The operator kinds: one file per kind, registered by walking this package. See `docs/reference/operators.md`.

`KINDS` maps the name of a kind to its OperatorKind; a plug-in adds one with `register_operator`. Sums over graphs
(FLOPs, saved bytes) are in `model/analysis/`.
"""

from __future__ import annotations

from pipefit.model.ops.kind import Flops, OperatorKind
from pipefit.model.ops.table import KINDS, register_operator

__all__ = ["KINDS", "Flops", "OperatorKind", "register_operator"]
