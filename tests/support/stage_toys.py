"""Small graphs written by hand, and the same models in plain PyTorch: what the stage tests compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from pipefit.model.graph import Graph, Operator, ParameterSpec, Shape, TensorSpec
from pipefit.model.ops import KINDS
from pipefit.run.stage.program import StageLayer, StageProgram
from pipefit.run.stage_inputs import StageInputs

WIDTH, HEADS, GROUPS, HEAD, INNER, VOCABULARY = 24, 6, 3, 4, 40, 31


class GraphBuilder:
    """Adds operators one by one; shapes come from the operator kinds."""

    def __init__(self, *inputs: TensorSpec) -> None:
        self.inputs = inputs
        self.shapes: dict[str, Shape] = {tensor.name: tensor.shape for tensor in inputs}
        self.operators: list[Operator] = []
        self.parameters: list[ParameterSpec] = []
        self.tensors: list[TensorSpec] = []

    def parameter(self, name: str, *shape: int, trainable: bool = True) -> str:
        self.parameters.append(ParameterSpec(name=name, shape=shape, trainable=trainable))
        self.shapes[name] = shape
        return name

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self.operators)}"
        shapes = tuple(self.shapes[i] if i else None for i in inputs)
        (shape,) = KINDS[kind].shapes(shapes, attributes)
        self.shapes[name] = shape
        self.tensors.append(TensorSpec(name=name, shape=shape))
        self.operators.append(Operator(kind=kind, inputs=inputs, outputs=(name,), attributes=attributes))
        return name

    def linear(self, x: str, name: str, out: int, bias: bool = False, trainable: bool = True) -> str:
        weight = self.parameter(f"{name}.weight", out, int(self.shapes[x][-1]), trainable=trainable)
        return self.add("linear", x, weight, self.parameter(f"{name}.bias", out) if bias else "")

    def finish(self, *outputs: str) -> Graph:
        return Graph(
            inputs=self.inputs,
            outputs=outputs,
            operators=tuple(self.operators),
            parameters=tuple(self.parameters),
            tensors=tuple(self.tensors),
        )


HIDDEN = TensorSpec(name="x", shape=("B", "T", WIDTH))
TOKENS = TensorSpec(name="tokens", shape=("B", "T"), dtype="int64", role="tokens")
POSITIONS = TensorSpec(name="positions", shape=("B", "T"), dtype="int64", role="positions")
LABELS = TensorSpec(name="labels", shape=("B", "T"), dtype="int64", role="labels")


def embed_graph() -> Graph:
    builder = GraphBuilder(TOKENS)
    return builder.finish(builder.add("embedding", "tokens", builder.parameter("weight", VOCABULARY, WIDTH)))


def block_graph(dropout: float = 0.0, window: int | None = None, trainable: bool = True) -> Graph:
    """A Llama block: grouped-query attention with rotary embedding and biases on q, k, v, then a gated MLP."""
    b = GraphBuilder(HIDDEN, POSITIONS)
    n = b.add("rms_norm", "x", b.parameter("norm1.weight", WIDTH), eps=1e-5)
    heads = []
    for name, count in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
        t = b.linear(n, name, count * HEAD, bias=True, trainable=trainable)
        t = b.add("reshape", t, shape=["B", "T", count, HEAD])
        if name != "v":
            t = b.add("rotary", t, "positions", theta=10000.0, dim=HEAD, scaling=None, style="half")
        heads.append(t)
    o = b.add("attention", *heads, causal=True, scale=HEAD**-0.5, window=window)
    o = b.linear(b.add("reshape", o, shape=["B", "T", HEADS * HEAD]), "o", WIDTH)
    if dropout:
        o = b.add("dropout", o, p=dropout, index=0)
    x = b.add("add", "x", o)
    n = b.add("rms_norm", x, b.parameter("norm2.weight", WIDTH), eps=1e-5)
    h = b.add("mul", b.add("silu", b.linear(n, "gate", INNER)), b.linear(n, "up", INNER))
    return b.finish(b.add("add", x, b.linear(h, "down", WIDTH)))


def head_graph() -> Graph:
    b = GraphBuilder(HIDDEN)
    n = b.add("rms_norm", "x", b.parameter("norm.weight", WIDTH), eps=1e-5)
    return b.finish(b.linear(n, "lm", VOCABULARY))


def loss_graph() -> Graph:
    b = GraphBuilder(TensorSpec(name="x", shape=("B", "T", VOCABULARY)), LABELS)
    return b.finish(b.add("cross_entropy", "x", "labels", ignore_index=-100))


def toy_layers(blocks: int = 2, *, tied: bool = False, **options: Any) -> list[StageLayer]:
    """embed, blocks, head, loss."""

    def layer(name: str, graph: Graph) -> StageLayer:
        return StageLayer(name, graph, {p.name: f"{name}.{p.name}" for p in graph.parameters})

    head = head_graph()
    names = {"norm.weight": "head.norm.weight", "lm.weight": "embed.weight" if tied else "head.lm.weight"}
    middle = [layer(f"layers.{i}", block_graph(**options)) for i in range(blocks)]
    return [layer("embed", embed_graph()), *middle, StageLayer("head", head, names), layer("loss", loss_graph())]


def fill(program: StageProgram, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random parameters by name (equal for equal names, whatever the stage), and zeroed float buffers bound."""
    buffers = {}
    for name, parameter in program.parameters.items():
        generator = torch.Generator().manual_seed(seed * 1000003 + sum(map(ord, name)) * 131 + len(name))
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        parameter.data.copy_(value + (1.0 if "norm" in name else 0.0))
        wide = torch.promote_types(parameter.dtype, torch.float32)
        buffers[name] = torch.zeros(parameter.shape, dtype=wide)
    program.bind_gradients(buffers)
    return buffers


def toy_feed(rows: int = 2, tokens: int = 10, seed: int = 0, start: int = 0) -> StageInputs:
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randint(0, VOCABULARY, (rows, tokens + 1), generator=generator)
    labels = stream[:, 1:].clone()
    labels[0, 3] = -100
    return StageInputs(
        tokens=stream[:, :-1].contiguous(),
        labels=labels,
        positions=torch.arange(start, start + tokens).expand(rows, tokens).contiguous(),
        rows=torch.arange(rows),
    )


def cut_feed(feed: StageInputs, start: int, stop: int) -> StageInputs:
    """The slice [start, stop) of a feed."""

    def cut(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[:, start:stop].contiguous()

    documents = cut(feed.documents)
    return StageInputs(
        tokens=cut(feed.tokens),
        labels=cut(feed.labels),
        positions=cut(feed.positions),
        documents=documents,
        document_bounds=(0, 0) if documents is None else (int(documents[:, 0].min()), int(documents[:, -1].max())),
        rows=feed.rows,
        step=feed.step,
    )


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def plain_rotary(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Written with complex numbers, unlike the operator. x (B, T, H, K)."""
    half = HEAD // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    turn = torch.polar(torch.ones((), dtype=x.dtype), positions.to(x.dtype)[..., None, None] * frequency)
    out = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
    return torch.cat((out.real, out.imag), -1)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """With a dense mask. `documents` (B, T): tokens with equal numbers see each other."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("bthk,bshk->bhts", q, k) * HEAD**-0.5
    t = torch.arange(q.shape[1])
    banned = t[None, :] > t[:, None]
    if window is not None:
        banned |= t[None, :] <= t[:, None] - window
    if documents is not None:
        banned = banned | (documents[:, None, :, None] != documents[:, None, None, :])
    return torch.einsum("bhts,bshk->bthk", scores.masked_fill(banned, -torch.inf).softmax(-1), v)


def plain_block(
    p: Mapping[str, Any], name: str, x: Any, positions: Any, window: int | None = None, documents: Any = None
) -> Any:
    rows, tokens, _ = x.shape
    n = plain_norm(x, p[f"{name}.norm1.weight"])
    q, k, v = (
        functional.linear(n, p[f"{name}.{i}.weight"], p[f"{name}.{i}.bias"]).view(rows, tokens, -1, HEAD) for i in "qkv"
    )
    o = plain_attention(plain_rotary(q, positions), plain_rotary(k, positions), v, window, documents)
    x = x + o.reshape(rows, tokens, -1) @ p[f"{name}.o.weight"].t()
    n = plain_norm(x, p[f"{name}.norm2.weight"])
    h = functional.silu(n @ p[f"{name}.gate.weight"].t()) * (n @ p[f"{name}.up.weight"].t())
    return x + h @ p[f"{name}.down.weight"].t()


def plain_loss(
    p: Mapping[str, Any], feed: StageInputs, blocks: int = 2, tied: bool = False, window: int | None = None
) -> Any:
    """The summed loss of the toy model, by plain PyTorch."""
    assert feed.tokens is not None and feed.labels is not None
    x = p["embed.weight"][feed.tokens]
    for i in range(blocks):
        x = plain_block(p, f"layers.{i}", x, feed.positions, window, feed.documents)
    x = plain_norm(x, p["head.norm.weight"])
    logits = x @ p["embed.weight" if tied else "head.lm.weight"].t()
    return functional.cross_entropy(logits.flatten(0, 1), feed.labels.flatten(), reduction="sum")


def plain_gradients(program: StageProgram, feeds: list[StageInputs], divisor: int, **options: Any) -> tuple[Any, Any]:
    """(summed loss, gradients by name of loss / divisor) of the plain model on copies of the stage's parameters."""
    p = {name: value.detach().clone().requires_grad_() for name, value in program.parameters.items()}
    loss = sum(plain_loss(p, feed, **options) for feed in feeds)
    (loss / divisor).backward()
    return loss.detach(), {name: value.grad for name, value in p.items()}


def assert_close(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float) -> None:
    """Every tensor agrees to `tolerance` of its own largest entry."""
    assert set(found) == set(wanted)
    for name in wanted:
        scale = wanted[name].abs().max()
        error = (found[name] - wanted[name]).abs().max()
        assert error <= tolerance * scale, f"{name}: {float(error / scale):.3g} > {tolerance}"
