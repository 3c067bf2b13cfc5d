"""Counting the labels of a microbatch that a captured loss does not ignore, with the model's own graph."""

from __future__ import annotations

import torch

from pipefit.model.capture.counted import LossDivisor
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext
from pipefit.run.stage.compile import compile_layer
from pipefit.run.stage_inputs import StageInputs


class LabelCount:
    """inputs (on the CPU) -> number of labels that are not the ignored one."""

    def __init__(self, counted: LossDivisor) -> None:
        graph = counted.labels
        assert graph is not None, "labels that nobody counts"
        self._ignored = counted.ignore_index
        contexts = [
            OperatorContext(
                graph=graph, layer=0, model_layer=0, operator=index, dtype=torch.float32, device=torch.device("cpu"),
                seed=0, slices=1,
            )
            for index in range(len(graph.operators))
        ]  # fmt: skip
        self._function = compile_layer(graph, {}, contexts)

    @torch.no_grad()
    def __call__(self, feed: StageInputs) -> int:
        record = SavedForward(0, 0, feed, train=False)
        assert feed.rows is not None
        record.rows = len(feed.rows)
        return int((self._function.call(record, None) != self._ignored).sum())
