"""Stage programs of every family, captured from its modules, against those modules run by plain PyTorch.

Loss and every gradient to 1e-12 of each tensor's largest entry in float64, for every way of running a stage; and the
split backward gives the very bits of the fused one.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.stage_toys import assert_close
from tests.support.variants import VARIANTS

from pipefit.model.capture.layers import capture_family
from pipefit.model.registry import build_layers, describe_config
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.run.stage_inputs import StageInputs

EXACT = 1e-12
ROWS, TOKENS, DIVISOR = 2, 11, 37
QUICK = ("llama3", "llama-tied", "mistral-window", "qwen3", "gpt2", "mixtral")
CASES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(VARIANTS)]


def make_feed(vocabulary, seed=0):
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randint(0, vocabulary, (ROWS, TOKENS + 1), generator=generator)
    labels = stream[:, 1:].clone()
    labels[1, 4:6] = -100
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS).contiguous()
    return StageInputs(tokens=stream[:, :-1].contiguous(), labels=labels, positions=positions, rows=torch.arange(ROWS))


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """(layers of the stage, parameter values, feed, plain loss, plain gradients) of one variant."""
    described = describe_config(VARIANTS[request.param], request.param, request.param)
    model = capture_family(described.family, described.config)
    modules = build_layers(described.family, described.config, device="cpu", dtype=torch.float64)
    values: dict[str, torch.nn.Parameter] = {}
    generator = torch.Generator().manual_seed(1)
    for module in modules:
        for local, parameter in module.named_parameters():
            name = module.parameter_names[local]
            if name not in values:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data.copy_(noise * 0.2 + (1.0 if "norm" in name or "ln_" in name else 0.0))
                values[name] = parameter
            else:
                parameter.data = values[name].data
    feed = make_feed(described.config["vocab_size"])
    loss = plain_loss(modules, feed)
    (loss / DIVISOR).backward()
    uses = {
        (module.parameter_names[local], id(parameter)): parameter
        for module in modules
        for local, parameter in module.named_parameters()
    }
    gradients: dict[str, torch.Tensor] = {}
    for (name, _), parameter in uses.items():
        gradients[name] = gradients.get(name, 0) + parameter.grad
    layers = [StageLayer(layer.name, model.layer_graph(layer), layer.parameters) for layer in model.layers]
    return layers, values, feed, loss.detach(), gradients


def plain_loss(modules, feed):
    """The chain of modules, each called with the inputs that its graph names."""
    import inspect

    x = None
    for module in modules:
        wanted = inspect.signature(module.forward).parameters
        roles = {name: getattr(feed, name) for name in wanted if name in ("tokens", "positions", "labels")}
        x = module(x, **roles) if "x" in wanted else module(**roles)
    return x


def run(program, values, feed, mode):
    buffers = {name: torch.zeros_like(p.data) for name, p in program.parameters.items()}
    for name, parameter in program.parameters.items():
        parameter.data.copy_(values[name].data)
    program.bind_gradients(buffers)
    program.begin_step(0, DIVISOR)
    loss = program.forward(0, 0, {}, feed)["loss"]
    if mode == "B":
        program.backward(0, 0, {})
    else:
        program.backward_input(0, 0, {})
        program.backward_weight(0, 0)
    return loss, buffers


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_family_equals_its_modules(case, recompute):
    layers, values, feed, wanted_loss, wanted = case
    loss, fused = run(StageProgram(layers, StageSetup(recompute=recompute, dtype=torch.float64)), values, feed, "B")
    assert abs(loss - wanted_loss) <= EXACT * abs(wanted_loss)
    assert_close(fused, wanted, EXACT)
    split_loss, split = run(
        StageProgram(layers, StageSetup(recompute=recompute, dtype=torch.float64)), values, feed, "IW"
    )
    assert torch.equal(loss, split_loss)
    for name in fused:
        assert torch.equal(fused[name], split[name]), name
