"""The machines of TeraPipe's experiments as layer costs of this project: V100s in hosts of eight, 25 Gbit/s between.

Three constants are fitted to the ten published steps without slices, and to nothing else: the rate of matrix products,
and the shares of the network's rate that messages and gradient sums reach. Everything else is published or assumed
beforehand, and says so. One layer and its forward, for n tokens of each of b rows with `past` tokens before them:

    max(floor, start + b n 24 h^2 / shards / rate) + scores b n (past + n)

The floor is the 1.45 ms that the paper's figure 3 shows from 1 to 256 tokens of a layer of the 1B model; `start` is
what that layer's products leave of it at the knee. The executor computes all scores of a slice, masked ones too. It
waits for its messages: a stage sends one forward and one backward (the way of their model: 2 x message). Here the
wait is in the layers, in equal parts, and the links of the cluster cost nothing. Embedding, head and loss are not in
their model, so they take no time in this one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pipefit.cluster.types import Cluster, DeviceKind, Host, Link, Provenance, Rail
from pipefit.cost.compute.layer_query import LayerQuery
from pipefit.cost.compute.roofline import LayerCost, RooflineCosts
from pipefit.model.graph import Graph, Model

DATA = Path(__file__).parents[1] / "data" / "terapipe.json"

WIDTH = 2
"""Bytes of an activation and of a gradient that is summed: half precision."""

NETWORK_BYTES_PER_S = 25e9 / 8
"""Of a host."""

NVLINK_BYTES_PER_S = 130e9
"""Assumed: what a ring over the eight V100 of a host reaches."""

HOST = 8
HEAD = 128
"""Width of an attention head: assumed of all models, as GPT-3's are (96 in its table are rounded there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the paper's table."""

    number: int
    model: str
    layers: int
    hidden: int
    batch: int
    replicas: int
    stages: int
    shards: int
    without_s: float
    with_s: float
    slices: tuple[int, ...] = ()
    "The published slicing of a sequence, where there is one."
    read: str = ""
    sequence: int = 2048

    @property
    def sequences(self) -> int:
        """Of a replica."""
        return self.batch // self.replicas

    @property
    def published(self) -> float:
        """The speed-up."""
        return self.without_s / self.with_s

    @property
    def layers_per_stage(self) -> int:
        return self.layers // self.stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the costs are made of."""

    flops_per_s: float = 62e12
    "Fitted: of matrix products. To begin with, what figure 3 shows between 256 and 1024 tokens."
    message_share: float = 0.9
    "Fitted: of the network's rate, in messages between stages."
    reduce_share: float = 0.9
    "Fitted: of the network's rate, in gradient sums over replicas, all devices of a host at once."
    floor_s: float = 1.45e-3
    "Published: the least time of a layer's forward."
    knee_tokens: float = 256.0
    "Published: up to so many tokens of the 1B model's layer."
    knee_hidden: int = 2048
    backward_floors: float = 1.0
    "Assumed: the least time of a backward, in floors. It has twice the kernels, launched by the engine, not by Python."
    score_bytes: float = 10.0
    """Assumed: moved for each score of each head: written by the product, read and written by the fused masked softmax
    (float32 inside), read by the next product."""
    memory_bytes_per_s: float = 0.72e12
    "Assumed: 80 % of a V100's 900 GB/s."
    collective_s: float = 40e-6
    "Assumed: the start of a sum over the devices of a host."
    message_s: float = 200e-6
    "Assumed: the start of a message: TCP, and the broadcast to the receiver's other devices."


ASSUMED = Constants()
"""Before fitting."""

FITTED = ("flops_per_s", "message_share", "reduce_share")
MOST = (112e12, 1.0, 1.0)
"""The data sheets."""


@lru_cache(maxsize=1)
def published() -> Mapping[str, Any]:
    """The figures of the paper, as committed."""
    return json.loads(DATA.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def settings() -> list[Setting]:
    """The ten settings."""
    return [Setting(**{**row, "slices": tuple(row.get("slices", ()))}) for row in published()["settings"]]


def longer() -> list[Setting]:
    """The longer sequences: one setting's layout with fewer of them."""
    known = published()["longer"]
    base = next(one for one in settings() if one.number == known["setting"])
    return [replace(base, slices=(), **row) for row in known["rows"]]


def fit(rows: list[Setting], start: Constants = ASSUMED) -> Constants:
    """The constants that bring the unsliced steps of these rows closest to the published ones: least squares of the
    logarithms, residuals beyond 10 % counting less."""
    from scipy.optimize import least_squares

    first = np.array([getattr(start, name) for name in FITTED])

    def constants(logs: Any) -> Constants:
        return replace(start, **dict(zip(FITTED, (first * np.exp(logs)).tolist(), strict=True)))

    def residuals(logs: Any) -> Any:
        found = constants(logs)
        return np.log([unsliced_s(row, found) / row.without_s for row in rows])

    ceiling = np.log(np.array(MOST) / first)
    done = least_squares(residuals, np.zeros(len(FITTED)), bounds=(-5.0, ceiling), loss="soft_l1", f_scale=0.1)
    return constants(done.x)


def unsliced_s(row: Setting, constants: Constants) -> float:
    """GPipe's closed form with one sequence a microbatch: (m + K - 1) times a stage, and the gradient sum."""
    stage_s = StageTime(row, constants).whole_s
    return (row.sequences + row.stages - 1) * stage_s + reduction_s(row, constants)


def reduction_s(row: Setting, constants: Constants) -> float:
    """Seconds of the sum of a stage's gradients over the replicas, once a step: a ring between hosts, on which the
    eight devices of a host share its port. All slicings and schedules of a setting pay it alike."""
    elements = 12 * row.hidden**2 * row.layers_per_stage / row.shards
    passes = 2 * (row.replicas - 1) / row.replicas
    return passes * elements * WIDTH * HOST / (constants.reduce_share * NETWORK_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer of a setting on one device, as arrays over slices; messages and sums are apart."""

    row: Setting
    constants: Constants

    def products_s(self, tokens: Any) -> Any:
        """Of all matrix products of the forward."""
        return tokens * 24 * self.row.hidden**2 / self.row.shards / self.constants.flops_per_s

    def scores_s(self, tokens: Any, past: Any, rows: int) -> Any:
        """Of attention in the forward: 4 HEAD FLOPs a score and head, and what moves."""
        one = self.constants
        heads = self.row.hidden / HEAD / self.row.shards
        each = 4 * HEAD / one.flops_per_s + one.score_bytes / one.memory_bytes_per_s
        return rows * tokens * (past + tokens) * heads * each

    @property
    def start_s(self) -> float:
        """What a forward takes beside its products: so that figure 3's layer meets the floor at the knee."""
        one = self.constants
        return max(0.0, one.floor_s - one.knee_tokens * 24 * one.knee_hidden**2 / one.flops_per_s)

    def forward_s(self, tokens: Any, past: Any, rows: int = 1) -> Any:
        products = self.products_s(rows * tokens)
        return np.maximum(self.constants.floor_s, self.start_s + products) + self.scores_s(tokens, past, rows)

    def backward_s(self, tokens: Any, past: Any, rows: int = 1) -> Any:
        """Fused."""
        share = self.constants.backward_floors
        products = 2 * self.products_s(rows * tokens)
        least = np.maximum(share * self.constants.floor_s, share * self.start_s + products)
        return least + 2 * self.scores_s(tokens, past, rows)

    def half_s(self, tokens: Any, past: Any, rows: int, with_scores: bool) -> Any:
        """I (with the scores' gradients) or W: half of the products and half of the floor of a fused backward."""
        share = self.constants.backward_floors / 2
        least = np.maximum(share * self.constants.floor_s, share * self.start_s + self.products_s(rows * tokens))
        return least + (2 * self.scores_s(tokens, past, rows) if with_scores else 0.0)

    def collectives_s(self, tokens: Any, rows: int = 1) -> Any:
        """The two sums over the shards, of the forward or of the backward."""
        if self.row.shards == 1:
            return np.zeros_like(np.asarray(tokens, dtype=np.float64))
        part = 2 * (self.row.shards - 1) / self.row.shards
        size = rows * tokens * self.row.hidden * WIDTH
        return 2 * (part * size / NVLINK_BYTES_PER_S + self.constants.collective_s)

    def message_s(self, tokens: Any, rows: int = 1) -> Any:
        """One message to the next stage: between hosts where they have no more stages, and the mean of all where they
        have; then, to the receiver's other devices."""
        one = self.constants
        size = rows * tokens * self.row.hidden * WIDTH
        outside = self.row.shards / HOST
        way = outside / (one.message_share * NETWORK_BYTES_PER_S) + (1 - outside) / NVLINK_BYTES_PER_S
        spread = 1 / NVLINK_BYTES_PER_S if self.row.shards > 1 else 0.0
        return one.message_s + size * (way + spread)


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of a slice on a stage, forward and backward together, its two messages among it: what TeraPipe's dynamic
    program works on (a `TimeOf` of `pipefit.plan.slicing`)."""

    row: Setting
    constants: Constants
    rows: int = 1

    @property
    def whole_s(self) -> float:
        """Of a whole sequence."""
        return float(self(np.array([self.row.sequence]), np.array([0]))[0])

    def __call__(self, tokens: Any, past: Any) -> Any:
        layer = LayerTime(self.row, self.constants)
        each = layer.forward_s(tokens, past, self.rows) + layer.backward_s(tokens, past, self.rows)
        each = each + 2 * layer.collectives_s(tokens, self.rows)
        return self.row.layers_per_stage * each + 2 * layer.message_s(tokens, self.rows)


@dataclass
class V100Costs:
    """Layer costs for `cost_table` and the planner; memory as this project's runtime keeps it."""

    row: Setting
    constants: Constants
    layers_per_stage: int
    "Over which a stage's wait for its messages is spread."
    notes: tuple[str, ...] = ("layer times: a V100 as TeraPipe's unsliced steps show it",)
    _roofline: RooflineCosts = field(default_factory=RooflineCosts)
    _known: dict[object, LayerCost] = field(default_factory=dict)
    _blocks: dict[int, tuple[Graph, bool]] = field(default_factory=dict)

    def layer_cost(self, query: LayerQuery) -> LayerCost:
        """The cost of the layer: no time where it has no attention, because it is no layer of their model."""
        key = (id(query.graph), query.shape, query.recompute)
        if key not in self._known:
            self._known[key] = self._layer(query._replace(collective=_free, collective_key=None))
        return self._known[key]

    def _layer(self, query: LayerQuery) -> LayerCost:
        graph, shape, recompute = query.graph, query.shape, query.recompute
        guess = self._roofline.layer_cost(query)
        if id(graph) not in self._blocks:
            self._blocks[id(graph)] = graph, any(op.kind == "attention" for op in graph.operators)
        if not self._blocks[id(graph)][1] or shape.rows == 0:
            return replace(guess, forward_s=0.0, input_s=0.0, weight_s=0.0, fused_s=0.0)
        rows, tokens, past = shape.rows, shape.tokens, shape.past
        time = LayerTime(self.row, self.constants)
        summed_s = time.collectives_s(tokens, rows)
        waits_s = time.message_s(tokens, rows) / self.layers_per_stage
        forward_s = time.forward_s(tokens, past, rows) + summed_s
        again_s = 0.0
        if recompute == "full":
            again_s = forward_s
        elif recompute == "selective":
            plain = self._roofline.layer_cost(query._replace(recompute="none"))
            again_s = guess.input_s - plain.input_s
        backward_s = time.backward_s(tokens, past, rows)
        input_s = time.half_s(tokens, past, rows, with_scores=True)
        return replace(
            guess,
            forward_s=float(forward_s + waits_s),
            input_s=float(input_s + summed_s + waits_s + again_s),
            weight_s=float(time.half_s(tokens, past, rows, with_scores=False)),
            fused_s=float(backward_s + summed_s + waits_s + again_s),
        )


def _free(kind: str, total_bytes: float, *_: object) -> float:
    """Sums over shards are counted by the layer itself."""
    return 0.0


def cluster_of(row: Setting, memory_bytes: float = 16e9) -> Cluster:
    """The setting's hosts. Links cost nothing: `LayerTime.message_s` and `reduction_s` count what they take."""
    devices = row.replicas * row.stages * row.shards
    hosts = -(-devices // HOST)
    kind = DeviceKind(
        name="V100-16",
        memory_bytes=int(memory_bytes),
        peak_flops_per_s={"bfloat16": 125e12, "float32": 15.7e12, "float64": 7.8e12},
        memory_bandwidth_bytes_per_s=900e9,
    )
    endless = tuple((1e18,) * hosts for _ in range(hosts))
    rail = Rail(name="network", latency_s=((0.0,) * hosts,) * hosts, bandwidth_bytes_per_s=endless, shared_ports=False)
    return Cluster(
        name="p3.16xlarge",
        kinds={kind.name: kind},
        links={"nvlink": Link(latency_s=0.0, bandwidth_bytes_per_s=1e18)},
        hosts=tuple(Host(name=f"host{i}", kind=kind.name, devices=HOST, link="nvlink") for i in range(hosts)),
        rails=(rail,) if hosts > 1 else (),
        provenance=Provenance(source="data-sheet", where=published()["machine"]),
    )


@lru_cache(maxsize=16)
def model_of(hidden: int, layers: int, sequence: int) -> Model:
    """Layers with GPT-3's number of parameters and heads. They are written as Llama's, with a gated MLP of two thirds
    of the width: times come from `LayerTime`, and the planner shards separate queries, keys and values. A vocabulary of
    eight, because the paper leaves embedding and head out."""
    from pipefit.model.capture.layers import capture_family
    from pipefit.model.registry import describe_config

    config = {
        "model_type": "llama", "vocab_size": 8, "hidden_size": hidden, "intermediate_size": 8 * math.ceil(hidden / 3),
        "num_hidden_layers": layers, "num_attention_heads": hidden // HEAD, "num_key_value_heads": hidden // HEAD,
        "head_dim": HEAD, "max_position_embeddings": sequence, "tie_word_embeddings": False,
    }  # fmt: skip
    described = describe_config(config, f"width {hidden}", "TeraPipe's settings")
    return capture_family(described.family, described.config)
