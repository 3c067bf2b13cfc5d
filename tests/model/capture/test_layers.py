"""Captured graphs compute what their modules compute; they are symbolic, stable, quick, and honest about failure."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.interpreter import run_graph
from tests.support.variants import VARIANTS, captured
from torch import Tensor, nn

from pipefit import codec
from pipefit.errors import ModelError
from pipefit.model.analysis.totals import infer_shapes
from pipefit.model.capture.layers import OpaqueLayerWarning, capture_family, capture_layers
from pipefit.model.graph import Graph
from pipefit.model.ops import KINDS
from pipefit.model.registry import build_layers, builtin_names, describe_config, open_model, resolve_model, save_model


def example(graph: Graph, rows: int, tokens: int) -> dict[str, Tensor]:
    made = {}
    for tensor in graph.inputs:
        if tensor.role == "activation":
            made["x"] = torch.randn(rows, tokens, int(tensor.shape[-1]), dtype=torch.float64, requires_grad=True)
        elif tensor.role == "positions":
            made["positions"] = torch.arange(7, 7 + tokens).repeat(rows, 1)
        else:
            made[tensor.role] = torch.randint(0, 61, (rows, tokens))
    return made


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("rows,tokens", [(1, 9), (4, 6)])
def test_a_graph_computes_what_its_module_computes(name: str, rows: int, tokens: int) -> None:
    torch.manual_seed(2)
    model = captured(name)
    described = describe_config(VARIANTS[name], name, name)
    layers = build_layers(described.family, described.config, device="cpu", dtype=torch.float64)
    for layer, module in zip(model.layers, layers, strict=True):
        graph = model.layer_graph(layer)
        inputs = example(graph, rows, tokens)
        if "labels" in inputs:
            inputs["labels"][0, 1] = -100
        module_out = module(*inputs.values())
        parameters = dict(module.named_parameters())
        graph_out = run_graph(graph, inputs, parameters)
        torch.testing.assert_close(graph_out, module_out, rtol=1e-10, atol=1e-10)
        weight = torch.randn_like(module_out)
        sources = [*parameters.values(), *([inputs["x"]] if "x" in inputs else [])]
        for ours, theirs in zip(
            torch.autograd.grad(graph_out, sources, weight, retain_graph=True),
            torch.autograd.grad(module_out, sources, weight),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_operator_is_registered_and_its_shapes_are_inferred(name: str) -> None:
    model = captured(name)
    assert model.graphs.keys() == {layer.graph for layer in model.layers}
    for graph in model.graphs.values():
        shapes = {tensor.name: tensor.shape for tensor in (*graph.inputs, *graph.parameters, *graph.tensors)}
        for operator in graph.operators:
            kind = KINDS[operator.kind]
            kind.check_inputs(operator)
            assert set(operator.attributes) <= set(kind.attributes), operator
            given = tuple(shapes[key] if key else None for key in operator.inputs)
            assert infer_shapes(operator.kind, given, operator.attributes) == (shapes[operator.outputs[0]],), operator


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gpt2", "mixtral", "mistral-window"])
def test_no_size_of_the_example_is_frozen_into_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipefit.model.capture.layers._EXAMPLE", {"B": 17, "T": 29})
    monkeypatch.setattr("pipefit.model.capture.layers._REMEMBERED", {})
    described = describe_config(VARIANTS[name], name, name)
    assert capture_family(described.family, described.config) == captured(name)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gpt2", "mixtral", "mistral-window"])
def test_a_block_is_lifted_to_large_operators(name: str) -> None:
    model = captured(name)
    kinds = [operator.kind for operator in model.layer_graph(model.layers[1]).operators]
    assert kinds.count("attention") == 1
    assert kinds.count("rotary") == (0 if name == "gpt2" else 2)
    assert kinds.count("moe") == (1 if name == "mixtral" else 0)
    norms = kinds.count("rms_norm") + kinds.count("layer_norm")
    assert norms == (4 if name == "qwen3" else 2)
    assert "cast" not in kinds and "transpose" not in kinds and "concat" not in kinds
    assert [op.kind for op in model.layer_graph(model.layers[-1]).operators] == ["cross_entropy"]


def test_the_named_rotary_scaling_survives() -> None:
    for name, kind in (("llama3", "llama3"), ("llama-yarn", "yarn"), ("llama-linear", "linear")):
        graph = captured(name).layer_graph(captured(name).layers[1])
        rotary = next(operator for operator in graph.operators if operator.kind == "rotary")
        assert rotary.attributes["scaling"]["rope_type"] == kind
        assert rotary.attributes["theta"] == VARIANTS[name]["rope_theta"]


def test_equal_layers_share_a_graph_and_different_ones_do_not() -> None:
    assert len(captured("llama2").graphs) == 4
    assert len(captured("qwen2-window").graphs) == 5
    assert len(captured("qwen3-moe-dense").graphs) == 5
    assert len(captured("gpt2-inverse-scale").graphs) == 6


def test_dropout_is_captured_with_its_number() -> None:
    config = {**VARIANTS["gpt2"], "resid_pdrop": 0.25, "embd_pdrop": 0.5}
    model = capture_family("gpt2", describe_config(config, "gpt2", "gpt2").config)
    found = [
        (operator.attributes["p"], operator.attributes["index"])
        for layer in model.layers[:2]
        for operator in model.layer_graph(layer).operators
        if operator.kind == "dropout"
    ]
    assert found == [(0.5, 0), (0.25, 0), (0.25, 1)]


@pytest.mark.parametrize("name", ["llama3", "qwen3-moe", "gpt2"])
def test_a_saved_model_reloads_equal(name: str, tmp_path: Path) -> None:
    model = captured(name)
    save_model(model, tmp_path / "model.json")
    again = open_model(str(tmp_path / "model.json"))
    assert again == model
    assert again.hash == model.hash
    assert codec.dump_text(again) == codec.dump_text(model)
    described = resolve_model(str(tmp_path / "model.json"))
    assert (described.family, described.config) == (model.family, model.config)


def test_a_saved_model_is_read_without_torch(tmp_path: Path) -> None:
    save_model(captured("llama2"), tmp_path / "model.json")
    code = (
        "import sys\nfrom pipefit.model.registry import open_model\n"
        f"open_model({str(tmp_path / 'model.json')!r})\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_hashes_are_equal_in_another_process() -> None:
    code = (
        "from pipefit.model.registry import resolve_model\nfrom pipefit.model.capture.layers import capture_family\n"
        "d = resolve_model('tiny-qwen3-moe')\nprint(capture_family(d.family, d.config).hash)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True, env=environment
    )
    described = resolve_model("tiny-qwen3-moe")
    assert done.stdout.strip() == capture_family(described.family, described.config).hash


def test_seventy_billion_parameters_are_captured_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    captured("llama2")  # the first export of a process is slow
    monkeypatch.setattr("pipefit.model.capture.layers._REMEMBERED", {})
    described = resolve_model("llama-3-70b")
    start = time.process_time()
    model = capture_family(described.family, described.config)
    assert time.process_time() - start < 8.0
    assert len(model.layers) == 83 and len(model.graphs) == 4


def test_a_model_captured_before_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipefit.model.capture.layers._REMEMBERED", {})
    described = describe_config(VARIANTS["gpt2"], "gpt2", "gpt2")
    config = {**described.config}
    model = capture_family(described.family, config)
    assert capture_family(described.family, described.config) is model
    config["layers"] = "changed afterwards"
    assert capture_family(described.family, described.config).config == described.config
    monkeypatch.setattr("pipefit.model.capture.layers._MOST_REMEMBERED", 1)
    other = describe_config(VARIANTS["llama2"], "llama2", "llama2")
    assert capture_family(other.family, other.config).config == other.config
    again = capture_family(described.family, described.config)
    assert again == model and again is not model


def test_every_builtin_resolves_and_its_description_is_stable() -> None:
    assert len(builtin_names()) >= 20
    for name in builtin_names():
        described = resolve_model(name)
        assert describe_config(described.config, name, name) == described


# -- a user's own layers ----------------------------------------------------------------------------------------------


class HandWritten(nn.Module):
    """A block in another hand: decomposed norm, interleaved rotary embedding, x @ w.T, repeated keys, split, stack."""

    def __init__(self, features: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, features // heads
        self.scale = nn.Parameter(torch.ones(features))
        self.qkv = nn.Parameter(torch.randn(features + 2 * groups * self.head, features) / 6)
        self.bias = nn.Parameter(torch.randn(self.qkv.shape[0]))
        self.out = nn.Linear(features, features)
        self.register_buffer("inverse", 100.0 ** (-torch.arange(0, self.head, 2) / self.head), persistent=False)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = (positions[:, :, None].float() * self.inverse)[:, :, None, :]
        cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    def forward(self, h: Tensor, positions: Tensor) -> Tensor:
        wide = h.float() if h.dtype != torch.float64 else h
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(h) * self.scale
        mixed = normed @ self.qkv.t() + self.bias
        q, k, v = mixed.split([self.heads * self.head, self.groups * self.head, self.groups * self.head], dim=-1)
        rows, tokens = h.shape[:2]
        q = self.turn(q.view(rows, tokens, self.heads, self.head), positions).permute(0, 2, 1, 3)
        k = self.turn(k.view(rows, tokens, self.groups, self.head), positions).permute(0, 2, 1, 3)
        v = v.view(rows, tokens, self.groups, self.head).permute(0, 2, 1, 3)
        repeat = self.heads // self.groups
        k, v = (
            t[:, :, None].expand(-1, -1, repeat, -1, -1).reshape(rows, self.heads, tokens, self.head) for t in (k, v)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(0, 2, 1, 3).reshape(rows, tokens, -1)
        return h + torch.tanh(self.out(o)) * 0.5


def test_a_hand_written_block_is_captured_and_lifted() -> None:
    torch.manual_seed(3)
    layers = [HandWritten().double(), HandWritten().double()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", OpaqueLayerWarning)
        model = capture_layers(layers, x_features=32)
    assert len(model.graphs) == 1
    graph = model.layer_graph(model.layers[0])
    kinds = [operator.kind for operator in graph.operators]
    assert kinds[:2] == ["rms_norm", "linear"]
    assert kinds.count("linear") == 2 and kinds.count("attention") == 1 and kinds.count("rotary") == 2
    rotary = next(operator for operator in graph.operators if operator.kind == "rotary")
    assert rotary.attributes == {"theta": 100.0, "dim": 8, "scaling": None, "style": "interleaved"}
    attention = next(operator for operator in graph.operators if operator.kind == "attention")
    assert graph.find_tensor(attention.inputs[1]).shape == ("B", "T", 2, 8)
    inputs = {"x": torch.randn(2, 5, 32, dtype=torch.float64), "positions": torch.arange(5).repeat(2, 1)}
    expected = layers[1](inputs["x"], inputs["positions"])
    torch.testing.assert_close(
        run_graph(graph, inputs, dict(layers[1].named_parameters())), expected, rtol=1e-5, atol=1e-5
    )
    assert model.layers[1].parameters["qkv"] == "layers.1.qkv"


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.proj(x)
        return x


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(self.proj(x), dim=1)


class Frozen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(33, 16).view(3, 11, 16)


@pytest.mark.parametrize(
    "layer,reason", [(DataDependent(), "test_layers.py"), (Unknown(), "cumsum"), (Frozen(), "test_layers.py")]
)
def test_what_cannot_be_captured_becomes_opaque_with_its_reason(layer: nn.Module, reason: str) -> None:
    with pytest.warns(OpaqueLayerWarning, match="layer layers.1 .* stays opaque") as caught:
        model = capture_layers([nn.Linear(16, 16), layer], x_features=16)
    assert reason in str(caught[0].message)
    graph = model.layer_graph(model.layers[1])
    (operator,) = graph.operators
    assert operator.kind == "opaque" and reason in operator.attributes["reason"]
    assert operator.attributes["key"] == "layers.1"
    assert operator.inputs == ("x", *(name for name, _ in layer.named_parameters()))
    assert graph.find_tensor("opaque_0").shape == ("B", "T", 16)


def test_two_equal_opaque_layers_keep_their_own_names() -> None:
    with pytest.warns(OpaqueLayerWarning):
        model = capture_layers([Unknown(), Unknown()], x_features=16)
    keys = [model.layer_graph(layer).operators[0].attributes["key"] for layer in model.layers]
    assert keys == ["layers.0", "layers.1"]


def test_a_shared_parameter_has_one_global_name() -> None:
    first, last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    last.weight = first.weight
    model = capture_layers([first, nn.ReLU(inplace=True), last], x_features=16)
    assert [dict(layer.parameters) for layer in model.layers] == [
        {"weight": "layers.0.weight"},
        {},
        {"weight": "layers.0.weight"},
    ]


class MeanLoss(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())


class Strange(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


def test_a_mean_loss_is_refused() -> None:
    with pytest.raises(ModelError, match="must return the sum") as error:
        capture_layers([MeanLoss()], x_features=16)
    assert "reduction='mean'" in str(error.value) and "reduction='sum'" in str(error.value)


def test_an_input_that_nobody_feeds_is_refused() -> None:
    with pytest.raises(ModelError, match="takes an input that has no source") as error:
        capture_layers([Strange()], x_features=16)
    assert "'mask'" in str(error.value) and "positions" in str(error.value)


def test_an_unknown_width_is_refused() -> None:
    with pytest.raises(ModelError, match="its width is not known") as error:
        capture_layers([nn.Linear(16, 16)])
    assert "x_features=D" in str(error.value)


def test_no_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="has no layers"):
        capture_layers([])


def test_a_user_file_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nfrom pipefit.model.families.common import TokenLoss\n"
        "class Embed(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.table = nn.Embedding(9, 8)\n"
        "    def forward(self, tokens):\n        return self.table(tokens)\n"
        "def layers():\n    return [Embed(), nn.Linear(8, 8), TokenLoss()]\n"
        "def without_loss():\n    return [Embed(), nn.Linear(8, 8)]\n"
    )
    model = open_model(f"{tmp_path / 'mine.py'}:layers")
    assert model.family == "user"
    assert [layer.name for layer in model.layers] == ["layers.0", "layers.1", "layers.2"]
    with pytest.raises(ModelError, match=r"(?s)The model has no loss.*last layer, layers.1.*TokenLoss"):
        open_model(f"{tmp_path / 'mine.py'}:without_loss")
    with pytest.raises(ModelError, match="no such function") as error:
        open_model(f"{tmp_path / 'mine.py'}:model")
    assert "layers" in str(error.value)
    with pytest.raises(ModelError, match="does not exist"):
        open_model(f"{tmp_path / 'yours.py'}:layers")
