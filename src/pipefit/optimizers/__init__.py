"""The optimizers, one file each: options, state, memory traffic and update, for the planner and the runtime.

A file of this package registers its optimizer when it is imported; importing the package imports all of them.
"""

from __future__ import annotations

import importlib
import pkgutil

from pipefit.optimizers.base import (
    DEFAULT,
    OPTIMIZERS,
    ElementwiseState,
    FlatPiece,
    OptimizerKind,
    OptimizerOptions,
    OptimizerState,
    ParameterPart,
    find_optimizer,
    option_text,
    read_options,
    register_optimizer,
    update_elements,
)

for _entry in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_entry.name}")

__all__ = [
    "DEFAULT", "OPTIMIZERS", "ElementwiseState", "FlatPiece", "OptimizerKind", "OptimizerOptions", "OptimizerState",
    "ParameterPart", "find_optimizer", "option_text", "read_options", "register_optimizer", "update_elements",
]  # fmt: skip
