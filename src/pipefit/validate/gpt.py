"""GPT as Megatron-LM trains it, as operator graphs without torch: one layer, the embedding, and the head with its loss.

Shapes: B rows, T tokens, D features, H heads, K features of a head, V vocabulary. A layer is written for one device;
`shard.megatron` makes its tensor-parallel programs. Embedding and head are written for a part of the vocabulary,
because Megatron splits it, and this project's shard program does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from pipefit.model.graph import Graph, Operator, ParameterSpec, Shape, Tensor
from pipefit.shard.megatron import shard_program

PADDED_VOCABULARY = 51200
"""GPT-2's 50,257 tokens, padded as Megatron-LM pads them for 8 shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT:
    """The sizes of one model."""

    hidden: int
    feedforward: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int = PADDED_VOCABULARY
    activation: Literal["gelu", "relu"] = "gelu"


def layer_graphs(model: GPT, shards: int, sequence_parallel: bool) -> tuple[Graph, ...]:
    """The local graphs of one layer over a shard axis, collectives included; one graph where it is not sharded. Models
    that differ in nothing but their number of layers get the same objects."""
    return _layer_graphs(replace(model, layers=1), shards, sequence_parallel)


@lru_cache(maxsize=256)
def _layer_graphs(model: GPT, shards: int, sequence_parallel: bool) -> tuple[Graph, ...]:
    graph = layer_graph(model)
    if shards == 1:
        return (graph,)
    return shard_program(graph, (1,) * shards, sequence_parallel).graphs


def layer_graph(model: GPT) -> Graph:
    """One transformer layer on one device: x (B,T,D) -> x (B,T,D)."""
    d, f, heads = model.hidden, model.feedforward, model.heads
    k = d // heads
    g = _Writer(("x", ("B", "T", d)))
    g.add("layer_norm", ("x", "ln1.weight", "ln1.bias"), "n1", ("B", "T", d), eps=1e-5)
    g.add("linear", ("n1", "qkv.weight", "qkv.bias"), "qkv", ("B", "T", 3 * d))
    g.add("reshape", ("qkv",), "by_head", ("B", "T", heads, 3 * k), shape=["B", "T", heads, 3 * k])
    for place, name in enumerate("qkv"):
        g.add("slice", ("by_head",), f"{name}_BTHK", ("B", "T", heads, k), dim=3, start=place * k, stop=place * k + k)
    q_k_v = ("q_BTHK", "k_BTHK", "v_BTHK")
    g.add("attention", q_k_v, "o_BTHK", ("B", "T", heads, k), causal=True, scale=k**-0.5, window=None)
    g.add("reshape", ("o_BTHK",), "o", ("B", "T", d), shape=["B", "T", d])
    g.add("linear", ("o", "proj.weight", "proj.bias"), "a", ("B", "T", d))
    g.add("dropout", ("a",), "dropped_a", ("B", "T", d), p=0.1, index=0)
    g.add("add", ("x", "dropped_a"), "y", ("B", "T", d))
    g.add("layer_norm", ("y", "ln2.weight", "ln2.bias"), "n2", ("B", "T", d), eps=1e-5)
    g.add("linear", ("n2", "fc1.weight", "fc1.bias"), "up", ("B", "T", f))
    how = {"approximate": "tanh"} if model.activation == "gelu" else {}
    g.add(model.activation, ("up",), "h", ("B", "T", f), **how)
    g.add("linear", ("h", "fc2.weight", "fc2.bias"), "m", ("B", "T", d))
    g.add("dropout", ("m",), "dropped_m", ("B", "T", d), p=0.1, index=1)
    g.add("add", ("y", "dropped_m"), "z", ("B", "T", d))
    sizes = {"qkv": (3 * d, d), "proj": (d, d), "fc1": (f, d), "fc2": (d, f)}
    parameters = [ParameterSpec(name=f"{name}.weight", shape=shape) for name, shape in sizes.items()]
    parameters += [ParameterSpec(name=f"{name}.bias", shape=shape[:1]) for name, shape in sizes.items()]
    parameters += [ParameterSpec(name=f"{n}.{part}", shape=(d,)) for n in ("ln1", "ln2") for part in ("weight", "bias")]
    return g.finish("z", parameters)


def embedding_graph(model: GPT, shards: int) -> Graph:
    """tokens, positions (B,T) -> x (B,T,D), with this device's part of the vocabulary."""
    return _embedding_graph(replace(model, layers=1), shards)


def head_graph(model: GPT, shards: int) -> Graph:
    """x (B,T,D), labels -> loss, over this device's part of the vocabulary."""
    return _head_graph(replace(model, layers=1), shards)


@lru_cache(maxsize=256)
def _embedding_graph(model: GPT, shards: int) -> Graph:
    d = model.hidden
    g = _Writer(("tokens", ("B", "T")), ("positions", ("B", "T")))
    g.add("embedding", ("tokens", "wte"), "words", ("B", "T", d))
    g.add("embedding", ("positions", "wpe"), "places", ("B", "T", d))
    g.add("add", ("words", "places"), "sum", ("B", "T", d))
    g.add("dropout", ("sum",), "x", ("B", "T", d), p=0.1, index=0)
    parameters = [
        ParameterSpec(name="wte", shape=(model.vocabulary // shards, d)),
        ParameterSpec(name="wpe", shape=(model.sequence, d)),
    ]
    return g.finish("x", parameters)


@lru_cache(maxsize=256)
def _head_graph(model: GPT, shards: int) -> Graph:
    d, part = model.hidden, model.vocabulary // shards
    g = _Writer(("x", ("B", "T", d)), ("labels", ("B", "T")))
    g.add("layer_norm", ("x", "ln.weight", "ln.bias"), "n", ("B", "T", d), eps=1e-5)
    g.add("linear", ("n", "wte", ""), "logits", ("B", "T", part))
    g.add("cross_entropy", ("logits", "labels"), "loss", (), dtype="float32", ignore_index=-100)
    parameters = [ParameterSpec(name="wte", shape=(part, d))]
    parameters += [ParameterSpec(name=f"ln.{name}", shape=(d,)) for name in ("weight", "bias")]
    return g.finish("loss", parameters)


class _Writer:
    """Collects operators in order; step-plan inputs are known by their names."""

    def __init__(self, *inputs: tuple[str, Shape]) -> None:
        roles: dict[str, Any] = {"tokens": "tokens", "positions": "positions", "labels": "labels"}
        self.inputs = tuple(
            Tensor(
                name=name,
                shape=shape,
                role=roles.get(name, "activation"),
                dtype="int64" if name in roles else "compute",
            )
            for name, shape in inputs
        )
        self.operators: list[Operator] = []
        self.tensors: list[Tensor] = []

    def add(
        self, kind: str, inputs: tuple[str, ...], output: str, size: Shape, /, dtype: str = "compute", **attributes: Any
    ) -> None:
        self.operators.append(Operator(kind=kind, inputs=inputs, outputs=(output,), attributes=attributes))
        self.tensors.append(Tensor(name=output, shape=size, dtype=dtype))

    def finish(self, output: str, parameters: Sequence[ParameterSpec]) -> Graph:
        return Graph(
            inputs=self.inputs,
            outputs=(output,),
            operators=tuple(self.operators),
            parameters=tuple(parameters),
            tensors=tuple(self.tensors),
        )
