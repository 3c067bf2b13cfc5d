"""Bytes that a layer of a decoder keeps, counted by watching storages, against the planner's figure."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.support.decoder_variants import DECODER_VARIANTS
from tests.support.stage_toys import fill, toy_feed
from tests.support.worker_plans import model

from pipefit.model.analysis.saved import saved_bytes
from pipefit.run.stage.memory_audit import StorageAudit
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup

ROWS, TOKENS, WIDTH = 2, 16, 48
QUICK = ("gemma2", "gpt_oss", "deepseek_v3", "cohere-normed", "bloom")
LARGEST_ERROR = 0.005
"""A norm behind a branch keeps one statistic a token under selective recomputation, which the planner leaves out."""


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DECODER_VARIANTS]
)
def test_a_layer_keeps_the_predicted_bytes(name: str, recompute: str) -> None:
    chain = model(name)
    graph = chain.layer_graph(chain.layers[-3])
    layer = StageLayer("layer", graph, {parameter.name: f"layer.{parameter.name}" for parameter in graph.parameters})
    program = StageProgram([layer], StageSetup(recompute=recompute, dtype=torch.float64))
    fill(program)
    program.begin_step(0, 1)
    feed, x = toy_feed(ROWS, TOKENS), torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64)
    saved = saved_bytes(graph, {"B": ROWS, "T": TOKENS}, x.itemsize, recompute)
    # Cos and sin belong to the step's positions.
    sizes = [int(operator.attributes["dim"]) for operator in graph.operators if operator.kind == "rotary"]
    table = 2 * ROWS * TOKENS * (max(sizes, default=0) // 2) * x.itemsize
    with StorageAudit() as audit:
        program.forward(0, 0, {"": x}, feed)
        gc.collect()
        kept = audit.live_bytes() - table
        assert kept == pytest.approx(saved.after_forward - x.nbytes, rel=LARGEST_ERROR), audit.live_sizes()
        dx = program.backward_input(0, 0, {"": torch.randn_like(x)})
        gc.collect()
        assert audit.live_bytes() - dx[""].untyped_storage().nbytes() <= saved.after_input_gradient
        program.backward_weight(0, 0)
        del dx
        gc.collect()
        assert audit.live_bytes() == 0, audit.live_sizes()
