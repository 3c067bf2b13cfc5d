"""A model of three modules as plain data: packed images, a sequence with them in it, latents conditioned on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tests.support.plan_toys import VOCABULARY, WIDTH, block_graph, pixels_graph

from pipefit.model.graph import Graph, Layer, Model, ModelModule, Operator, ParameterSpec, TensorSpec
from pipefit.plan.request.sampled_batches import SampledBatches

SIZE = ("B", "T")


def see_graph() -> Graph:
    """Tokens to vectors, image patches in their places."""
    return Graph(
        inputs=(
            TensorSpec(name="x", shape=(1, "I", WIDTH)),
            TensorSpec(name="tokens", shape=SIZE, dtype="int64", role="tokens"),
            TensorSpec(name="image_places", shape=(1, "I"), dtype="int64", role="data"),
        ),
        outputs=("y",),
        operators=(
            Operator(kind="embedding", inputs=("tokens", "weight"), outputs=("e",)),
            Operator(kind="put_tokens", inputs=("e", "x", "image_places"), outputs=("y",)),
        ),
        parameters=(ParameterSpec(name="weight", shape=(VOCABULARY, WIDTH)),),
        tensors=(TensorSpec(name="e", shape=(*SIZE, WIDTH)), TensorSpec(name="y", shape=(*SIZE, WIDTH))),
    )


def tell_graph() -> Graph:
    """The loss, and the hidden states that the generator is conditioned on."""
    return Graph(
        inputs=(
            TensorSpec(name="x", shape=(*SIZE, WIDTH)),
            TensorSpec(name="labels", shape=SIZE, dtype="int64", role="labels"),
            TensorSpec(name="condition_places", shape=(1, "L"), dtype="int64", role="data"),
        ),
        outputs=("c", "loss"),
        operators=(
            Operator(kind="take_tokens", inputs=("x", "condition_places"), outputs=("c",)),
            Operator(kind="linear", inputs=("x", "weight", ""), outputs=("logits",)),
            Operator(
                kind="cross_entropy", inputs=("logits", "labels"), outputs=("loss",), attributes={"ignore_index": -100}
            ),
        ),
        parameters=(ParameterSpec(name="weight", shape=(VOCABULARY, WIDTH)),),
        tensors=(
            TensorSpec(name="c", shape=(1, "L", WIDTH)),
            TensorSpec(name="logits", shape=(*SIZE, VOCABULARY)),
            TensorSpec(name="loss", shape=(), dtype="float32"),
        ),
    )


def error_graph() -> Graph:
    """The generator's loss."""
    return Graph(
        inputs=(
            TensorSpec(name="x", shape=(*SIZE, WIDTH)),
            TensorSpec(name="wanted", shape=(*SIZE, WIDTH), role="data"),
        ),
        outputs=("loss",),
        operators=(Operator(kind="squared_error", inputs=("x", "wanted"), outputs=("loss",)),),
        parameters=(),
        tensors=(TensorSpec(name="loss", shape=(), dtype="float32"),),
    )


GRAPHS = {
    "pixels": pixels_graph(),
    "block": block_graph(),
    "see": see_graph(),
    "big": block_graph(4096),
    "tell": tell_graph(),
    "error": error_graph(),
}
CHAIN = {
    "vision": ("patches", ("pixels", "big", "big")),
    "language": ("samples", ("see", "big", "big", "big", "big", "tell")),
    "generator": ("latents", ("big", "big", "error")),
}


def three_modules(frozen: Sequence[str] = ()) -> Model:
    """Vision, language and generator; `frozen` ones have nothing that is trained."""
    graphs: dict[str, Graph] = {}
    modules = []
    for name, (space, keys) in CHAIN.items():
        layers = []
        for place, key in enumerate(keys):
            graph = GRAPHS[key]
            own = key
            if name in frozen:
                graph = replace(graph, parameters=tuple(replace(one, trainable=False) for one in graph.parameters))
                own = f"frozen {key}"
            graphs[own] = graph
            parameters = {one.name: f"{name}.{place}.{one.name}" for one in graph.parameters}
            layers.append(Layer(name=f"{name}.{place}", graph=own, parameters=parameters))
        modules.append(ModelModule(name=name, layers=tuple(layers), space=space))
    return Model(family="user", config={"frozen": list(frozen)}, modules=tuple(modules), graphs=graphs)


def skewed_samples(batch: int, batches: int = 2, sigma: float = 1.0, mean: int = 2000) -> SampledBatches:
    """Lognormal numbers of patches and latents; images of 100 tokens."""
    random = np.random.default_rng(5)
    tokens = {}
    for space in ("patches", "latents"):
        drawn = random.lognormal(0.0, sigma, (batches, batch))
        tokens[space] = np.rint(mean * drawn / drawn.mean()).astype(np.int64)
    squares = {space: 100 * table for space, table in tokens.items()}
    return SampledBatches(tokens=tokens, squares=squares, note="samples: lognormal")
