"""opaque(inputs..., parameters...): a user's module, called unchanged, with our parameters in place of its own.

Its backward is PyTorch's and runs entirely in I: W has nothing to do. The module must have real buffers on the stage's
device; its parameters may be on the meta device.
"""

from __future__ import annotations

from typing import Any

from torch.func import functional_call

from pipefit.errors import ModelError
from pipefit.model.graph import Operator
from pipefit.run.ops import OperatorContext, OperatorStep


def build_opaque(operator: Operator, context: OperatorContext) -> OperatorStep:
    key = str(operator.attributes["key"])
    module = (context.modules or {}).get(key)
    if module is None:
        raise ModelError(
            f"The stage needs your module {key!r}, which could not be captured, and it was not given.",
            where=operator.source or key,
            seen=", ".join(context.modules or {}) or "no modules",
            next_step="pass modules={name: module} when you start the run from Python",
        )
    count = int(operator.attributes["inputs"])
    names = operator.inputs[count:]

    def run_module(*arguments: Any) -> Any:
        return functional_call(module, dict(zip(names, arguments[count:], strict=True)), arguments[:count])

    return OperatorStep(run_module)


BUILDERS = {"opaque": build_opaque}
