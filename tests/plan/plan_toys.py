"""Small models and clusters as plain data, made without torch: what the planner's tests are run on.

Every layer is real operator graph data with sizes a person can check: `embed` (tied or not), `count` equal layers
of two linears, `head`, `loss`.
"""

from __future__ import annotations

from pipefit.cluster import Cluster, parse_spec
from pipefit.model.graph import Graph, Layer, Model, Module, Operator, ParameterSpec, Tensor

VOCABULARY, WIDTH, INNER = 64, 8, 32


def embed_graph() -> Graph:
    return Graph(
        inputs=(Tensor(name="tokens", shape=("B", "T"), dtype="int64", role="tokens"),),
        outputs=("y",),
        operators=(Operator(kind="embedding", inputs=("tokens", "weight"), outputs=("y",)),),
        parameters=(ParameterSpec(name="weight", shape=(VOCABULARY, WIDTH)),),
        tensors=(Tensor(name="y", shape=("B", "T", WIDTH)),),
    )


def block_graph(inner: int = INNER) -> Graph:
    return Graph(
        inputs=(Tensor(name="x", shape=("B", "T", WIDTH)),),
        outputs=("y",),
        operators=(
            Operator(kind="linear", inputs=("x", "up", ""), outputs=("h",)),
            Operator(kind="silu", inputs=("h",), outputs=("a",)),
            Operator(kind="linear", inputs=("a", "down", ""), outputs=("d",)),
            Operator(kind="add", inputs=("x", "d"), outputs=("y",)),
        ),
        parameters=(
            ParameterSpec(name="up", shape=(inner, WIDTH)),
            ParameterSpec(name="down", shape=(WIDTH, inner)),
        ),
        tensors=(
            Tensor(name="h", shape=("B", "T", inner)),
            Tensor(name="a", shape=("B", "T", inner)),
            Tensor(name="d", shape=("B", "T", WIDTH)),
            Tensor(name="y", shape=("B", "T", WIDTH)),
        ),
    )


def head_graph() -> Graph:
    return Graph(
        inputs=(Tensor(name="x", shape=("B", "T", WIDTH)),),
        outputs=("logits",),
        operators=(Operator(kind="linear", inputs=("x", "weight", ""), outputs=("logits",)),),
        parameters=(ParameterSpec(name="weight", shape=(VOCABULARY, WIDTH)),),
        tensors=(Tensor(name="logits", shape=("B", "T", VOCABULARY)),),
    )


def loss_graph() -> Graph:
    return Graph(
        inputs=(
            Tensor(name="x", shape=("B", "T", VOCABULARY)),
            Tensor(name="labels", shape=("B", "T"), dtype="int64", role="labels"),
        ),
        outputs=("loss",),
        operators=(
            Operator(
                kind="cross_entropy", inputs=("x", "labels"), outputs=("loss",), attributes={"ignore_index": -100}
            ),
        ),
        parameters=(),
        tensors=(Tensor(name="loss", shape=(), dtype="float32"),),
    )


def toy_module(count: int = 4, *, name: str = "language", tied: bool = False) -> Module:
    head = "embed.weight" if tied else "head.weight"
    blocks = tuple(
        Layer(
            name=f"layers.{i}",
            graph="block",
            parameters={"up": f"layers.{i}.up", "down": f"layers.{i}.down"},
        )
        for i in range(count)
    )
    return Module(
        name=name,
        layers=(
            Layer(name="embed", graph="embed", parameters={"weight": "embed.weight"}),
            *blocks,
            Layer(name="head", graph="head", parameters={"weight": head}),
            Layer(name="loss", graph="loss", parameters={}),
        ),
    )


def toy_model(count: int = 4, *, tied: bool = False) -> Model:
    """embed, `count` blocks, head, loss: count + 3 layers."""
    return Model(
        family="user",
        config={"layers": count, "tied": tied},
        modules=(toy_module(count, tied=tied),),
        graphs={"embed": embed_graph(), "block": block_graph(), "head": head_graph(), "loss": loss_graph()},
    )


def toy_cluster(hosts: int = 1, devices: int = 4) -> Cluster:
    return parse_spec(f"{hosts}x{devices}xA100-80:25GB/s" if hosts > 1 else f"{devices}xA100-80")
