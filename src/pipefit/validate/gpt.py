"""GPT as trained by Megatron-LM, as operator graphs without torch: one layer, the embedding, and the head with its
loss.

Shapes: B rows, T tokens, D features, H heads, K features of a head, V vocabulary. A layer is written for one device;
`shard.megatron` builds its tensor-parallel programs. Embedding and head are written for a part of the vocabulary,
without the collectives over its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from pipefit.model.graph import Graph, Operator, ParameterSpec, Shape, TensorSpec
from pipefit.shard.megatron import shard_program

PADDED_VOCABULARY = 51200
"""GPT-2's 50,257 tokens, padded by Megatron-LM for 8 shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptSizes:
    """Sizes of one model."""

    hidden: int
    feedforward: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int = PADDED_VOCABULARY
    activation: Literal["gelu", "relu"] = "gelu"


def layer_graphs(model: GptSizes, shards: int, sequence_parallel: bool) -> tuple[Graph, ...]:
    """Return the local graphs of one layer over a shard axis, collectives included; a single graph if it is not
    sharded. Models that differ only in their number of layers get the same objects."""
    return _layer_graphs(replace(model, layers=1), shards, sequence_parallel)


@lru_cache(maxsize=256)
def _layer_graphs(model: GptSizes, shards: int, sequence_parallel: bool) -> tuple[Graph, ...]:
    graph = layer_graph(model)
    if shards == 1:
        return (graph,)
    return shard_program(graph, (1,) * shards, sequence_parallel).graphs


def layer_graph(model: GptSizes) -> Graph:
    """One transformer layer on one device: x (B,T,D) -> x (B,T,D)."""
    d, f, heads = model.hidden, model.feedforward, model.heads
    k = d // heads
    g = _GraphWriter(("x", ("B", "T", d)))
    g.add_operator("layer_norm", ("x", "ln1.weight", "ln1.bias"), "n1", ("B", "T", d), eps=1e-5)
    g.add_operator("linear", ("n1", "qkv.weight", "qkv.bias"), "qkv", ("B", "T", 3 * d))
    g.add_operator("reshape", ("qkv",), "by_head", ("B", "T", heads, 3 * k), shape=["B", "T", heads, 3 * k])
    for index, name in enumerate("qkv"):
        g.add_operator(
            "slice", ("by_head",), f"{name}_BTHK", ("B", "T", heads, k), dim=3, start=index * k, stop=index * k + k
        )
    q_k_v = ("q_BTHK", "k_BTHK", "v_BTHK")
    g.add_operator("attention", q_k_v, "o_BTHK", ("B", "T", heads, k), causal=True, scale=k**-0.5, window=None)
    g.add_operator("reshape", ("o_BTHK",), "o", ("B", "T", d), shape=["B", "T", d])
    g.add_operator("linear", ("o", "proj.weight", "proj.bias"), "a", ("B", "T", d))
    g.add_operator("dropout", ("a",), "dropped_a", ("B", "T", d), p=0.1, index=0)
    g.add_operator("add", ("x", "dropped_a"), "y", ("B", "T", d))
    g.add_operator("layer_norm", ("y", "ln2.weight", "ln2.bias"), "n2", ("B", "T", d), eps=1e-5)
    g.add_operator("linear", ("n2", "fc1.weight", "fc1.bias"), "up", ("B", "T", f))
    how = {"approximate": "tanh"} if model.activation == "gelu" else {}
    g.add_operator(model.activation, ("up",), "h", ("B", "T", f), **how)
    g.add_operator("linear", ("h", "fc2.weight", "fc2.bias"), "m", ("B", "T", d))
    g.add_operator("dropout", ("m",), "dropped_m", ("B", "T", d), p=0.1, index=1)
    g.add_operator("add", ("y", "dropped_m"), "z", ("B", "T", d))
    sizes = {"qkv": (3 * d, d), "proj": (d, d), "fc1": (f, d), "fc2": (d, f)}
    parameters = [ParameterSpec(name=f"{name}.weight", shape=shape) for name, shape in sizes.items()]
    parameters += [ParameterSpec(name=f"{name}.bias", shape=shape[:1]) for name, shape in sizes.items()]
    parameters += [ParameterSpec(name=f"{n}.{part}", shape=(d,)) for n in ("ln1", "ln2") for part in ("weight", "bias")]
    return g.finish_graph("z", parameters)


def embedding_graph(model: GptSizes, shards: int) -> Graph:
    """tokens, positions (B,T) -> x (B,T,D), with this device's part of the vocabulary."""
    return _embedding_graph(replace(model, layers=1), shards)


def head_graph(model: GptSizes, shards: int) -> Graph:
    """x (B,T,D), labels -> loss, over this device's part of the vocabulary."""
    return _head_graph(replace(model, layers=1), shards)


@lru_cache(maxsize=256)
def _embedding_graph(model: GptSizes, shards: int) -> Graph:
    d = model.hidden
    g = _GraphWriter(("tokens", ("B", "T")), ("positions", ("B", "T")))
    g.add_operator("embedding", ("tokens", "wte"), "words", ("B", "T", d))
    g.add_operator("embedding", ("positions", "wpe"), "places", ("B", "T", d))
    g.add_operator("add", ("words", "places"), "sum", ("B", "T", d))
    g.add_operator("dropout", ("sum",), "x", ("B", "T", d), p=0.1, index=0)
    parameters = [
        ParameterSpec(name="wte", shape=(model.vocabulary // shards, d)),
        ParameterSpec(name="wpe", shape=(model.sequence, d)),
    ]
    return g.finish_graph("x", parameters)


@lru_cache(maxsize=256)
def _head_graph(model: GptSizes, shards: int) -> Graph:
    d, part = model.hidden, model.vocabulary // shards
    g = _GraphWriter(("x", ("B", "T", d)), ("labels", ("B", "T")))
    g.add_operator("layer_norm", ("x", "ln.weight", "ln.bias"), "n", ("B", "T", d), eps=1e-5)
    g.add_operator("linear", ("n", "wte", ""), "logits", ("B", "T", part))
    g.add_operator("cross_entropy", ("logits", "labels"), "loss", (), dtype="float32", ignore_index=-100)
    parameters = [ParameterSpec(name="wte", shape=(part, d))]
    parameters += [ParameterSpec(name=f"ln.{name}", shape=(d,)) for name in ("weight", "bias")]
    return g.finish_graph("loss", parameters)


class _GraphWriter:
    """Collects operators in order. Step-plan inputs are recognised by name."""

    def __init__(self, *inputs: tuple[str, Shape]) -> None:
        roles: dict[str, Any] = {"tokens": "tokens", "positions": "positions", "labels": "labels"}
        self.inputs = tuple(
            TensorSpec(
                name=name,
                shape=shape,
                role=roles.get(name, "activation"),
                dtype="int64" if name in roles else "compute",
            )
            for name, shape in inputs
        )
        self.operators: list[Operator] = []
        self.tensors: list[TensorSpec] = []

    def add_operator(
        self, kind: str, inputs: tuple[str, ...], output: str, size: Shape, /, dtype: str = "compute", **attributes: Any
    ) -> None:
        self.operators.append(Operator(kind=kind, inputs=inputs, outputs=(output,), attributes=attributes))
        self.tensors.append(TensorSpec(name=output, shape=size, dtype=dtype))

    def finish_graph(self, output: str, parameters: Sequence[ParameterSpec]) -> Graph:
        return Graph(
            inputs=self.inputs,
            outputs=(output,),
            operators=tuple(self.operators),
            parameters=tuple(parameters),
            tensors=tuple(self.tensors),
        )
