"""FLOPs against PyTorch's FlopCounterMode; parameter counts against published models and `transformers`."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.variants import VARIANTS, captured
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipefit.model.analysis.totals import graph_flops, graph_traffic_bytes, recompute_flops
from pipefit.model.capture.layers import capture_family
from pipefit.model.capture.whole import capture_whole
from pipefit.model.example import Example
from pipefit.model.graph import Graph, Operator, ParameterSpec, TensorSpec
from pipefit.model.ops import Flops
from pipefit.model.registry import build_layers, describe_config, parameter_count, resolve_model

ROWS, TOKENS = 2, 12

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}


def counted(layer: nn.Module, graph: Graph) -> Flops:
    """Forward, input gradient and weight gradient as PyTorch counts them: by freezing one side, then the other."""
    inputs = []
    for tensor in graph.inputs:
        if tensor.role == "activation":
            inputs.append(torch.randn(ROWS, TOKENS, int(tensor.shape[-1])))
        elif tensor.role == "positions":
            inputs.append(torch.arange(TOKENS).repeat(ROWS, 1))
        else:
            inputs.append(torch.randint(0, 61, (ROWS, TOKENS)))
    totals = []
    for input_gradient, weight_gradient in ((False, False), (True, False), (True, True)):
        for parameter in layer.parameters():
            parameter.requires_grad_(weight_gradient)
        for value in inputs:
            if value.is_floating_point():
                value.requires_grad_(input_gradient)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            out = layer(*inputs)
            if out.requires_grad:
                out.sum().backward()
        totals.append(counter.get_total_flops())
    return Flops(totals[0], totals[1] - totals[0], totals[2] - totals[1])


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_agree_with_the_flop_counter(name: str) -> None:
    described = describe_config(VARIANTS[name], name, name)
    model = captured(name)
    layers = build_layers(described.family, described.config, device="cpu")
    total = 0
    for layer, module in zip(model.layers, layers, strict=True):
        graph = model.layer_graph(layer)
        ours = graph_flops(graph, {"B": ROWS, "T": TOKENS})
        assert ours == counted(module, graph), layer.name
        total += ours.total_flops
        full = recompute_flops(graph, {"B": ROWS, "T": TOKENS}, "full")
        assert full == (ours.forward if layer.name.startswith("layers.") else 0)
        assert recompute_flops(graph, {"B": ROWS, "T": TOKENS}, "selective") == 0
    assert total > 0


def test_flops_of_a_later_slice_count_the_earlier_keys() -> None:
    graph = captured("llama2").layer_graph(captured("llama2").layers[1])
    first, second = (graph_flops(graph, {"B": 1, "T": 8, "P": earlier}) for earlier in (0, 8))
    assert second.forward - first.forward == 2 * 2 * 1 * 6 * 8 * 8 * 8  # two products, 6 heads, 8 x 8 more, 8 features
    assert second.weight_gradient == first.weight_gradient


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "qwen3-8b", "mixtral-8x7b", "gpt2-xl", "llama-3.2-1b"])
def test_parameters_of_builtin_models_are_the_published_ones(name: str) -> None:
    described = resolve_model(name)
    assert parameter_count(capture_family(described.family, described.config)) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_of_builtin_models_are_those_of_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    described = resolve_model(name)
    config = {key: value for key, value in described.config.items() if key not in ("model_type", "architectures")}
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(described.config["model_type"], **config))
    expected = {key: tuple(parameter.shape) for key, parameter in theirs.named_parameters()}
    ours: dict[str, tuple[int, ...]] = {}
    for layer in build_layers(described.family, described.config):
        for local, parameter in layer.named_parameters():
            key, shape = layer.parameter_names[local], tuple(parameter.shape)
            transposed = key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            ours[key] = shape[::-1] if transposed else shape
    assert ours == expected
    assert sum(math.prod(shape) for shape in ours.values()) == PUBLISHED[name]


class Squared(nn.Module):
    """A layer with a loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().sum()  # type: ignore[no-any-return]


CONVOLUTIONS: list[nn.Module] = [
    nn.Conv2d(4, 6, 3, stride=2, padding=1),
    nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
    nn.ConvTranspose1d(4, 6, 3, dilation=2),
]


@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_flops_of_convolutions_agree_with_the_flop_counter(conv: nn.Module) -> None:
    x = torch.randn(ROWS, 4, *[9] * (conv.weight.dim() - 2), requires_grad=True)
    model = capture_whole(Example(module=Squared(conv), inputs={"x": x.detach()}))
    graph = model.layer_graph(model.layers[0])
    assert graph.operators[0].kind == ("conv_transpose" if "Transpose" in str(conv) else "conv")
    with FlopCounterMode(display=False) as counter:
        y = conv(x)
        forward = counter.get_total_flops()
        y.sum().backward()
    ours = graph_flops(graph, {"B": ROWS})
    assert ours.forward == forward > 0
    assert ours.forward + 2 * ours.weight_gradient == counter.get_total_flops()


def test_traffic_counts_each_input_parameter_and_output_once() -> None:
    graph = Graph(
        inputs=(TensorSpec(name="tokens", shape=("B", "T"), dtype="int64", role="tokens"),),
        outputs=("b",),
        operators=(
            Operator(kind="embedding", inputs=("tokens", "table"), outputs=("a",)),
            Operator(kind="linear", inputs=("a", "weight", ""), outputs=("b",)),
        ),
        parameters=(ParameterSpec(name="table", shape=(1000, 8)), ParameterSpec(name="weight", shape=(6, 8))),
        tensors=(TensorSpec(name="a", shape=("B", "T", 8)), TensorSpec(name="b", shape=("B", "T", 6))),
    )
    embedding = 10 * 8 + 10 * 8 * 2 + 10 * 8 * 2  # int64 tokens, the rows read, the rows written
    linear = 10 * 8 * 2 + 6 * 8 * 2 + 10 * 6 * 2
    assert graph_traffic_bytes(graph, {"B": 2, "T": 5}, 2) == embedding + linear
