"""The scale of the loss under float16, as in `torch.amp.GradScaler`: dynamic, by the norm of the gradients.

Float16 has no numbers below 6e-8, so the gradients of a mean loss would be zeros. The loss is multiplied by a scale
before its backward, and the reduced gradients are divided by it. A step whose gradients are not finite leaves all
parameters as they are and halves the scale; after `GROWTH_STEPS` steps without one the scale doubles. All ranks know
the global norm, so all of them change the scale alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.errors import RunError
from pipefit.precision import Precision

FIRST_SCALE = 65536.0
GROWTH_STEPS = 2000
GROWTH, BACKOFF = 2.0, 0.5
LEAST_SCALE = 2.0**-14
"""A scale below this one makes gradients smaller than float16 holds: they are not finite for another reason."""


@dataclass(slots=True)
class LossScale:
    """The scale, and the steps that decide on it."""

    scale: float = FIRST_SCALE
    finite_steps: int = 0
    "Finite steps in a row since the scale has changed."
    growth_steps: int = GROWTH_STEPS

    def update_scale(self, finite: bool) -> None:
        """Change the scale after a step. Raises RunError if smaller scales did not help."""
        if not finite:
            self.scale, self.finite_steps = self.scale * BACKOFF, 0
            if self.scale < LEAST_SCALE:
                raise RunError(
                    "The gradients are not finite under any scale of the loss.",
                    where="--precision float16",
                    seen=f"loss scale {self.scale:g}",
                    next_step="use a smaller --lr or bfloat16, or look at the data of these steps",
                )
            return
        self.finite_steps += 1
        if self.finite_steps == self.growth_steps:
            self.scale, self.finite_steps = self.scale * GROWTH, 0

    def to_mapping(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint."""
        self.scale, self.finite_steps = float(state["scale"]), int(state["finite_steps"])


def make_loss_scale(precision: Precision) -> LossScale | None:
    """Return the first scale of a run in this precision; None without one."""
    return LossScale() if precision == "float16" else None
