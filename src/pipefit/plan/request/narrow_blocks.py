"""Check that a job in FP8 has products to run in it."""

from __future__ import annotations

from pipefit.errors import PlanError
from pipefit.model.analysis.narrow_products import MULTIPLE, narrow_outputs
from pipefit.model.graph import Model
from pipefit.precision import NARROW, Precision


def check_blocks(model: Model, precision: Precision, where: str) -> None:
    """Raise PlanError for FP8 on a model without a linear layer that can run in it."""
    if precision in NARROW and not any(narrow_outputs(graph, precision) for graph in model.graphs.values()):
        raise PlanError(
            "No linear layer of this model can run in FP8.",
            where=where,
            seen=precision,
            allowed=f"layers that hand on an activation of the shape that they take, with multiples of {MULTIPLE}",
            next_step="use --precision bfloat16",
        )
