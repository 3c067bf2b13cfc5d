"""Each rewrite of the lifting pass, on small modules that spell one thing in different ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.interpreter import run_graph
from torch import Tensor, nn

from pipefit.model.capture.layers import OpaqueLayerWarning, capture_layers
from pipefit.model.capture.lift import (
    merge_equal_operators,
    merge_reshapes,
    merge_transposes,
    remove_casts_of_equal_types,
    remove_dead,
)
from pipefit.model.graph import Graph, Operator, ParameterSpec, Size
from pipefit.model.graph import TensorSpec as Value
from pipefit.model.ops.rotary import rotary_frequencies

HEADS, DIM = 3, 8
FREQUENCIES = 500.0 ** (-torch.arange(0, DIM, 2) / DIM)


def lifted(function: Callable[..., Tensor], positions: bool = False) -> Graph:
    """The graph of the function, checked against the function itself on numbers."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(HEADS * DIM))
            self.register_buffer("frequency", FREQUENCIES.clone(), persistent=False)

    class WithPositions(Module):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return function(self, x, positions)

    class WithoutPositions(Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(self, x)

    torch.manual_seed(5)
    module = WithPositions() if positions else WithoutPositions()
    with warnings.catch_warnings():
        warnings.simplefilter("error", OpaqueLayerWarning)
        model = capture_layers([module], x_features=HEADS * DIM)
    graph = model.layer_graph(model.layers[0])
    inputs: dict[str, Tensor] = {"x": torch.randn(2, 7, HEADS * DIM)}
    if positions:
        inputs["positions"] = torch.arange(7).repeat(2, 1)
    expected = module(*inputs.values())
    torch.testing.assert_close(run_graph(graph, inputs, {"weight": module.weight}), expected, rtol=1e-4, atol=1e-5)
    return graph


def kinds(graph: Graph) -> list[str]:
    return [operator.kind for operator in graph.operators]


NORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "hugging face": lambda m, x: (
        m.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    ),
    "x * x": lambda m, x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * m.weight,
    "division by a root": lambda m, x: x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * m.weight,
    "weight in float32": lambda m, x: (
        m.weight.float() * (x.float() * (x.float().square().mean(-1, True) + 1e-5).rsqrt())
    ).to(x.dtype),
    "torch": lambda m, x: F.rms_norm(x, (HEADS * DIM,), m.weight, 1e-5),
}


@pytest.mark.parametrize("spelling", NORMS)
def test_rms_norms_are_recovered(spelling: str) -> None:
    graph = lifted(NORMS[spelling])
    (operator,) = graph.operators
    assert operator.kind == "rms_norm" and operator.inputs == ("x", "weight")
    assert operator.attributes == {"eps": 1e-5}


def test_a_norm_without_weight_is_recovered() -> None:
    graph = lifted(lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.5))
    assert kinds(graph) == ["rms_norm"] and graph.operators[0].inputs == ("x", "")


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-5),  # over tokens
        lambda m, x: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).square() + 1e-5),  # not a square
        lambda m, x: (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),  # of something else
    ],
)
def test_what_only_looks_like_a_norm_is_not_lifted(function: Callable[..., Tensor]) -> None:
    module = nn.Module()
    module.forward = lambda x: function(None, x)  # type: ignore[method-assign]
    with pytest.warns(OpaqueLayerWarning, match="no operator for (pow|mean)"):
        model = capture_layers([module], x_features=HEADS * DIM)
    assert kinds(model.layer_graph(model.layers[0])) == ["opaque"]


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, DIM))


def wave(m: Any, positions: Tensor) -> Tensor:
    return positions[..., None].float() * m.frequency


def half_sum(m: Any, x: Tensor, positions: Tensor) -> Tensor:
    x = heads(x)
    angle = torch.cat((wave(m, positions),) * 2, dim=-1)[:, :, None, :]
    turned = torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), dim=-1)
    return (x * angle.cos().to(x.dtype) + turned * angle.sin().to(x.dtype)).flatten(-2)


def half_sum_heads_first(m: Any, x: Tensor, positions: Tensor) -> Tensor:
    x = heads(x).transpose(1, 2)
    angle = torch.cat((wave(m, positions),) * 2, dim=-1)
    cos, sin = angle.cos().to(x.dtype).unsqueeze(1), angle.sin().to(x.dtype).unsqueeze(1)
    a, b = x.chunk(2, dim=-1)
    return ((torch.cat((-b, a), dim=-1) * sin) + (x * cos)).transpose(1, 2).flatten(-2)


def half_pair(m: Any, x: Tensor, positions: Tensor) -> Tensor:
    a, b = heads(x).chunk(2, dim=-1)
    cos, sin = (t.to(x.dtype).unsqueeze(2) for t in (wave(m, positions).cos(), wave(m, positions).sin()))
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def half_part(m: Any, x: Tensor, positions: Tensor) -> Tensor:
    x = torch.cat((heads(x), heads(x)), dim=-1)  # 16 features, 8 of them turn
    front, rest = x[..., :DIM], x[..., DIM:]
    turned = half_sum(m, front.flatten(-2), positions).unflatten(-1, (HEADS, DIM))
    return torch.cat((turned, rest), dim=-1)[..., 4:12].flatten(-2)


def interleaved_pair(m: Any, x: Tensor, positions: Tensor) -> Tensor:
    even, odd = heads(x)[..., ::2], heads(x)[..., 1::2]
    cos, sin = (t.to(x.dtype).unsqueeze(2) for t in (wave(m, positions).cos(), wave(m, positions).sin()))
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).flatten(-2)


def interleaved_sum(m: Any, x: Tensor, positions: Tensor) -> Tensor:
    x = heads(x)
    angle = wave(m, positions).repeat_interleave(2, -1).unsqueeze(2)
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x * angle.cos().to(x.dtype) + turned * angle.sin().to(x.dtype)).flatten(-2)


def from_arange(m: Any, x: Tensor, positions: Tensor) -> Tensor:
    frequency = 1.0 / (500.0 ** (torch.arange(0, DIM, 2, device=x.device).float() / DIM))
    angle = positions.float().unsqueeze(-1) * frequency
    a, b = heads(x).chunk(2, dim=-1)
    cos, sin = angle.cos().to(x.dtype).unsqueeze(2), angle.sin().to(x.dtype).unsqueeze(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


ROTARIES = {
    "half": [half_sum, half_sum_heads_first, half_pair, half_part, from_arange],
    "interleaved": [interleaved_pair, interleaved_sum],
}


@pytest.mark.parametrize("style,function", [(style, f) for style, fs in ROTARIES.items() for f in fs])
def test_rotary_embeddings_are_recovered(style: str, function: Callable[..., Tensor]) -> None:
    graph = lifted(function, positions=True)
    found = [operator for operator in graph.operators if operator.kind == "rotary"]
    assert len(found) == 1, kinds(graph)
    assert found[0].attributes == {"theta": 500.0, "dim": DIM, "scaling": None, "style": style}
    assert not {"mul", "add", "sub", "neg"} & set(kinds(graph))
    if function is not half_part:
        assert set(kinds(graph)) == {"reshape", "rotary"}


def test_unusual_frequencies_are_kept_as_numbers_and_a_factor_as_factor() -> None:
    def stretched(m: Any, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[..., None].float() * (m.frequency * 0.5 + 0.01)
        angle = torch.cat((angle, angle), dim=-1)[:, :, None, :]
        cos, sin = (angle.cos() * 1.25).to(x.dtype), (angle.sin() * 1.25).to(x.dtype)
        a, b = heads(x).chunk(2, dim=-1)
        return (heads(x) * cos + torch.cat((-b, a), dim=-1) * sin).flatten(-2)

    graph = lifted(stretched, positions=True)
    (operator,) = [operator for operator in graph.operators if operator.kind == "rotary"]
    assert operator.attributes["scaling"]["rope_type"] == "frequencies"
    values, factor = rotary_frequencies(operator.attributes)
    torch.testing.assert_close(torch.tensor(values), FREQUENCIES * 0.5 + 0.01)
    assert factor == 1.25


def test_a_turn_with_a_wrong_sign_is_not_a_rotary_embedding() -> None:
    def mirrored(m: Any, x: Tensor, positions: Tensor) -> Tensor:
        a, b = heads(x).chunk(2, dim=-1)
        cos, sin = (t.to(x.dtype).unsqueeze(2) for t in (wave(m, positions).cos(), wave(m, positions).sin()))
        return torch.cat((a * cos + b * sin, b * cos + a * sin), dim=-1).flatten(-2)

    with pytest.warns(OpaqueLayerWarning, match="no operator for (cos|sin|constant)"):
        lifted_or_opaque(mirrored)


def lifted_or_opaque(function: Callable[..., Tensor]) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequency", FREQUENCIES.clone(), persistent=False)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return function(self, x, positions)

    capture_layers([Module()], x_features=HEADS * DIM)


def test_attention_with_transposes_becomes_one_operator() -> None:
    def attend(m: Any, x: Tensor) -> Tensor:
        q = heads(x).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3).transpose(1, 2).flatten(-2)

    graph = lifted(attend)
    assert kinds(graph) == ["reshape", "attention", "reshape"]
    assert graph.operators[1].attributes == {"causal": True, "scale": 0.3, "window": None}


def test_attention_without_transposes_gets_them() -> None:
    def attend(m: Any, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (HEADS, DIM)).permute(0, 2, 1, 3) * 2
        return F.scaled_dot_product_attention(q, q, q).permute(0, 2, 1, 3).flatten(-2)

    graph = lifted(attend)
    assert kinds(graph).count("attention") == 1
    attention = next(operator for operator in graph.operators if operator.kind == "attention")
    assert attention.attributes["causal"] is False and attention.attributes["scale"] == DIM**-0.5
    assert graph.find_tensor(attention.outputs[0]).shape == ("B", "T", HEADS, DIM)


def test_a_flattened_loss_is_unflattened() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            flat = x.float().view(-1, x.size(-1))
            return F.cross_entropy(flat, labels.reshape(-1), reduction="sum", ignore_index=-1)

    model = capture_layers([Loss()], x_features=HEADS * DIM)
    (operator,) = model.layer_graph(model.layers[0]).operators
    assert (operator.kind, operator.inputs) == ("cross_entropy", ("x", "labels"))
    assert operator.attributes == {"ignore_index": -1}


# -- passes on graphs written by hand --


def chain(*steps: tuple[str, dict[str, Any], tuple[Size, ...], str]) -> Graph:
    operators, tensors, last = [], [], "x"
    for i, (kind, attributes, shape, dtype) in enumerate(steps):
        operators.append(Operator(kind=kind, inputs=(last,), outputs=(f"v{i}",), attributes=attributes))
        tensors.append(Value(name=f"v{i}", shape=shape, dtype=dtype))
        last = f"v{i}"
    return Graph(
        inputs=(Value(name="x", shape=("B", "T", 12)),),
        outputs=(last,),
        operators=tuple(operators),
        parameters=(ParameterSpec(name="unused", shape=(3,)),),
        tensors=tuple(tensors),
    )


def test_reshapes_merge_and_vanish() -> None:
    two = chain(
        ("reshape", {"shape": ["B", "T", 3, 4]}, ("B", "T", 3, 4), "compute"),
        ("reshape", {"shape": ["B", "T", 2, 6]}, ("B", "T", 2, 6), "compute"),
    )
    (operator,) = merge_reshapes(two).operators
    assert operator.inputs == ("x",) and operator.attributes == {"shape": ["B", "T", 2, 6]}
    back = chain(
        ("reshape", {"shape": ["B", "T", 3, 4]}, ("B", "T", 3, 4), "compute"),
        ("reshape", {"shape": ["B", "T", 12]}, ("B", "T", 12), "compute"),
    )
    assert merge_reshapes(back).operators == () and merge_reshapes(back).outputs == ("x",)


def test_transposes_merge_and_vanish() -> None:
    turn = chain(
        ("transpose", {"dims": [1, 2, 0]}, ("T", 12, "B"), "compute"),
        ("transpose", {"dims": [1, 2, 0]}, (12, "B", "T"), "compute"),
    )
    (operator,) = merge_transposes(turn).operators
    assert operator.attributes == {"dims": [2, 0, 1]}
    there_and_back = chain(
        ("transpose", {"dims": [1, 2, 0]}, ("T", 12, "B"), "compute"),
        ("transpose", {"dims": [2, 0, 1]}, ("B", "T", 12), "compute"),
    )
    assert merge_transposes(there_and_back).outputs == ("x",)


def test_casts_to_the_own_type_vanish_and_real_ones_stay() -> None:
    graph = chain(
        ("cast", {"dtype": "compute"}, ("B", "T", 12), "compute"),
        ("cast", {"dtype": "float32"}, ("B", "T", 12), "float32"),
        ("cast", {"dtype": "float32"}, ("B", "T", 12), "float32"),
    )
    (operator,) = remove_casts_of_equal_types(graph).operators
    assert operator.inputs == ("x",) and operator.attributes == {"dtype": "float32"}


def test_dead_operators_vanish_and_parameters_stay() -> None:
    graph = chain(("silu", {}, ("B", "T", 12), "compute"), ("neg", {}, ("B", "T", 12), "compute"))
    shorter = Graph(
        inputs=graph.inputs, outputs=("v0",), operators=graph.operators, parameters=graph.parameters,
        tensors=graph.tensors,
    )  # fmt: skip
    result = remove_dead(shorter)
    assert kinds(result) == ["silu"] and [tensor.name for tensor in result.tensors] == ["v0"]
    assert result.parameters == graph.parameters


def test_equal_cheap_operators_merge_and_equal_linears_do_not() -> None:
    twice = [Operator(kind="silu", inputs=("x",), outputs=(name,)) for name in ("a", "b")]
    linears = [
        Operator(kind="linear", inputs=(name, "w", ""), outputs=(out,)) for name, out in (("a", "c"), ("b", "d"))
    ]
    values = [Value(name=name, shape=("B", "T", 12)) for name in ("a", "b", "c", "d", "e")]
    graph = Graph(
        inputs=(Value(name="x", shape=("B", "T", 12)),),
        outputs=("e",),
        operators=(*twice, *linears, Operator(kind="add", inputs=("c", "d"), outputs=("e",))),
        parameters=(ParameterSpec(name="w", shape=(12, 12)),),
        tensors=tuple(values),
    )
    result = merge_equal_operators(graph)
    assert kinds(result) == ["silu", "linear", "linear", "add"]
    assert [operator.inputs[0] for operator in result.operators[1:3]] == ["a", "a"]
