"""A user's own module inside a stage: its numbers and gradients, and the message when it is missing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipefit.errors import ModelError
from pipefit.model.graph import Graph, Operator, ParameterSpec, TensorSpec
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.run.stage_inputs import StageInputs


class Wave(nn.Module):
    """Something that no operator kind covers, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("shift", torch.full((4,), 0.25, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.mix(x) + self.shift) + x


def wave_layer() -> StageLayer:
    attributes = {"key": "wave", "inputs": 1, "shape": ["B", "T", 4], "parameter_count": 20, "kept_factor": 2.0}
    operator = Operator(
        kind="opaque", inputs=("x", "mix.weight", "mix.bias"), outputs=("y",), attributes=attributes, source="wave"
    )
    graph = Graph(
        inputs=(TensorSpec(name="x", shape=("B", "T", 4)),),
        outputs=("y",),
        operators=(operator,),
        parameters=(ParameterSpec(name="mix.weight", shape=(4, 4)), ParameterSpec(name="mix.bias", shape=(4,))),
        tensors=(TensorSpec(name="y", shape=("B", "T", 4)),),
    )
    return StageLayer("wave", graph, {"mix.weight": "w.mix.weight", "mix.bias": "w.mix.bias"})


@pytest.mark.parametrize("mode", ["B", "IW"])
def test_a_users_module_runs_with_our_parameters(mode):
    module = Wave()
    program = StageProgram([wave_layer()], StageSetup(dtype=torch.float64, modules={"wave": module}))
    buffers = {name: torch.zeros_like(p.data) for name, p in program.parameters.items()}
    program.bind_gradients(buffers)
    program.parameters["w.mix.weight"].data.copy_(module.mix.weight.data)
    program.parameters["w.mix.bias"].data.copy_(module.mix.bias.data)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    wanted = module(leaf)
    wanted.sum().backward()
    program.begin_step(0, 1)
    y = program.forward(0, 0, {"": x}, StageInputs())[""]
    ones = {"": torch.ones_like(x)}
    dx = program.backward(0, 0, ones) if mode == "B" else program.backward_input(0, 0, ones)
    if mode == "IW":
        program.backward_weight(0, 0)
    assert torch.allclose(y, wanted, rtol=1e-14) and torch.allclose(dx[""], leaf.grad, rtol=1e-14)
    assert torch.allclose(buffers["w.mix.weight"], module.mix.weight.grad, rtol=1e-13)
    assert torch.allclose(buffers["w.mix.bias"], module.mix.bias.grad, rtol=1e-13)


def test_a_missing_module_is_named():
    with pytest.raises(ModelError, match=r"needs your module 'wave'(.|\n)*modules=\{name: module\}"):
        StageProgram([wave_layer()], StageSetup(dtype=torch.float64))
