"""Small models and clusters as plain data, made without torch: what the planner's tests are run on.

Every layer is real operator graph data with sizes a person can check: `embed` (tied or not), `count` equal layers
of two linears, `head`, `loss`.
"""

from __future__ import annotations

from benchmarks.plain_devices import plain_spec
from pipefit.cluster import Cluster
from pipefit.model.graph import Graph, Layer, Model, ModelModule, Operator, ParameterSpec, TensorSpec

VOCABULARY, WIDTH, INNER = 64, 8, 32


def embed_graph() -> Graph:
    return Graph(
        inputs=(TensorSpec(name="tokens", shape=("B", "T"), dtype="int64", role="tokens"),),
        outputs=("y",),
        operators=(Operator(kind="embedding", inputs=("tokens", "weight"), outputs=("y",)),),
        parameters=(ParameterSpec(name="weight", shape=(VOCABULARY, WIDTH)),),
        tensors=(TensorSpec(name="y", shape=("B", "T", WIDTH)),),
    )


def block_graph(inner: int = INNER) -> Graph:
    return Graph(
        inputs=(TensorSpec(name="x", shape=("B", "T", WIDTH)),),
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
            TensorSpec(name="h", shape=("B", "T", inner)),
            TensorSpec(name="a", shape=("B", "T", inner)),
            TensorSpec(name="d", shape=("B", "T", WIDTH)),
            TensorSpec(name="y", shape=("B", "T", WIDTH)),
        ),
    )


def head_graph() -> Graph:
    return Graph(
        inputs=(TensorSpec(name="x", shape=("B", "T", WIDTH)),),
        outputs=("logits",),
        operators=(Operator(kind="linear", inputs=("x", "weight", ""), outputs=("logits",)),),
        parameters=(ParameterSpec(name="weight", shape=(VOCABULARY, WIDTH)),),
        tensors=(TensorSpec(name="logits", shape=("B", "T", VOCABULARY)),),
    )


def loss_graph() -> Graph:
    return Graph(
        inputs=(
            TensorSpec(name="x", shape=("B", "T", VOCABULARY)),
            TensorSpec(name="labels", shape=("B", "T"), dtype="int64", role="labels"),
        ),
        outputs=("loss",),
        operators=(
            Operator(
                kind="cross_entropy", inputs=("x", "labels"), outputs=("loss",), attributes={"ignore_index": -100}
            ),
        ),
        parameters=(),
        tensors=(TensorSpec(name="loss", shape=(), dtype="float32"),),
    )


def toy_module(count: int = 4, *, name: str = "language", tied: bool = False) -> ModelModule:
    head = "embed.weight" if tied else "head.weight"
    blocks = tuple(
        Layer(
            name=f"layers.{i}",
            graph="block",
            parameters={"up": f"layers.{i}.up", "down": f"layers.{i}.down"},
        )
        for i in range(count)
    )
    return ModelModule(
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
    return plain_spec(f"{hosts}x{devices}xA100-80:25GB/s" if hosts > 1 else f"{devices}xA100-80")


PATCHES, PATCH = 4, 12
"""Patches of a picture, and numbers of a patch."""


def pixels_graph() -> Graph:
    """Patches of a picture to vectors."""
    return Graph(
        inputs=(TensorSpec(name="pixels", shape=("B", "T", PATCH), role="tokens"),),
        outputs=("y",),
        operators=(Operator(kind="linear", inputs=("pixels", "weight", ""), outputs=("y",)),),
        parameters=(ParameterSpec(name="weight", shape=(WIDTH, PATCH)),),
        tensors=(TensorSpec(name="y", shape=("B", "T", WIDTH)),),
    )


def seeing_embed_graph() -> Graph:
    """Tokens to vectors; the two pictures of every row, made one vector, are added to each of them."""
    seen = 2 * PATCHES * WIDTH
    return Graph(
        inputs=(
            TensorSpec(name="tokens", shape=("B", "T"), dtype="int64", role="tokens"),
            TensorSpec(name="pictures", shape=("2*B", PATCHES, WIDTH)),
        ),
        outputs=("y",),
        operators=(
            Operator(kind="embedding", inputs=("tokens", "weight"), outputs=("e",)),
            Operator(kind="reshape", inputs=("pictures",), outputs=("flat",), attributes={"shape": ["B", 1, seen]}),
            Operator(kind="linear", inputs=("flat", "project", ""), outputs=("p",)),
            Operator(kind="add", inputs=("e", "p"), outputs=("y",)),
        ),
        parameters=(
            ParameterSpec(name="weight", shape=(VOCABULARY, WIDTH)),
            ParameterSpec(name="project", shape=(WIDTH, seen)),
        ),
        tensors=(
            TensorSpec(name="e", shape=("B", "T", WIDTH)),
            TensorSpec(name="flat", shape=("B", 1, seen)),
            TensorSpec(name="p", shape=("B", 1, WIDTH)),
            TensorSpec(name="y", shape=("B", "T", WIDTH)),
        ),
    )


def seeing_model() -> Model:
    """A vision module (pixels, one block) that feeds a language module; two pictures a row."""
    vision = ModelModule(
        name="vision",
        layers=(
            Layer(name="vision.pixels", graph="pixels", parameters={"weight": "vision.pixels"}),
            Layer(name="vision.block", graph="block", parameters={"up": "vision.up", "down": "vision.down"}),
        ),
        space="pictures",
    )
    plain = toy_module(2)
    embed = Layer(name="embed", graph="seeing", parameters={"weight": "embed.weight", "project": "embed.project"})
    language = ModelModule(name="language", layers=(embed, *plain.layers[1:]))
    return Model(
        family="user",
        config={"pictures": 2},
        modules=(vision, language),
        graphs={
            "pixels": pixels_graph(),
            "seeing": seeing_embed_graph(),
            "block": block_graph(),
            "head": head_graph(),
            "loss": loss_graph(),
        },
    )
