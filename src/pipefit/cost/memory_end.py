"""What the end of an iteration needs beside what always stays: reductions, shared parameters, the norm and the update.

Activations are gone by then, so this is the peak only where they were few. PyTorch's gloo sums a copy of what it
scatters, and a bucket's copy lives until all buckets have been waited for (`run/reduce.py`); NCCL needs none. Lanes
that share a parameter each send a copy of their gradient and add to another (`run/tied.py`). The norm and the update go
through a run of elements at a time (`run/optimizer.py`), in 8 bytes each at most.
"""

from __future__ import annotations

from pipefit.cost.memory import GRADIENT_BYTES
from pipefit.cost.work import PipelineWork

RUN_ELEMENTS = {"cpu": 1 << 18, "gpu": 1 << 24}
"""Elements that the norm and the update go through at a time."""


def end_bytes(work: PipelineWork, gloo: bool) -> tuple[float, ...]:
    """Of every lane, on its fullest device. Devices that talk over `gloo` are processors."""
    width = GRADIENT_BYTES[work.precision]
    copies, run, exchanged = ([0.0] * work.lanes for _ in range(3))
    for stage in work.stages:
        elements = max(stage.parameters.trainable)
        run[stage.lane] = max(run[stage.lane], 8.0 * min(elements, RUN_ELEMENTS["cpu" if gloo else "gpu"]))
        if gloo and stage.split_state and stage.group.axis("replica").size > 1:
            copies[stage.lane] += elements * width
    for tied in work.tied:
        lanes = {work.stages[index].lane for index in tied.stages}
        for lane in lanes if len(lanes) > 1 else ():
            exchanged[lane] += len(lanes) * tied.elements * width  # a copy for each of the others, and of its own
    return tuple(map(max, copies, run, exchanged))
