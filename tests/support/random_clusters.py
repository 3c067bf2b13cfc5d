"""Random devices and links, and small layers priced on them, for the tests of searched programs."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.support.stage_toys import HIDDEN, GraphBuilder

from pipefit.cluster.types import DeviceKind
from pipefit.layout import TensorForm
from pipefit.model.graph import Layer, Model, ModelModule
from pipefit.shard.pricing import ShardSetting, price_layer

WIDE = 256


def mlp_graph():
    """A gated MLP with its norm and residual: few operators, with column, row and token splits."""
    b = GraphBuilder(replace(HIDDEN, shape=("B", "T", WIDE)))
    n = b.add("rms_norm", "x", b.parameter("norm.weight", WIDE), eps=1e-5)
    h = b.add("silu", b.linear(n, "up", 4 * WIDE))
    return b.finish(b.add("add", "x", b.linear(h, "down", WIDE)))


def random_setting(seed: int) -> ShardSetting:
    """Two to four unlike devices with links of any speed from very slow to very fast."""
    draw = random.Random(seed)
    fast = 10 ** draw.uniform(10, 12)
    kinds = tuple(
        DeviceKind(
            name=f"kind{number}",
            memory_bytes=2**34,
            memory_bandwidth_bytes_per_s=fast / draw.uniform(20, 200),
            peak_flops_per_s=dict.fromkeys(("float64", "float32", "bfloat16"), fast / draw.choice((1, 1.5, 3, 9))),
            efficiency=1.0,
            overhead_s=draw.choice((0.0, 1e-6)),
        )
        for number in range(draw.choice((2, 3, 4)))
    )
    latency_s, speed = 10 ** draw.uniform(-7, -4), 10 ** draw.uniform(7, 11)
    count = len(kinds)

    def collective(kind: str, size: float) -> float:
        once = (count - 1) * (latency_s + size / count / speed)
        return 2 * once if kind == "all_reduce" else once

    return ShardSetting(
        kinds=kinds,
        collective=collective,
        rows=draw.choice((4, 8)),
        tokens=draw.choice((16, 128)),
        precision="float32",
        microbatches=draw.choice((1, 4, 32)),
    )


def loose_template(seed: int):
    """The MLP among random devices, everything split at any fraction."""
    setting = random_setting(seed)
    draw = random.Random(seed + 10**6)
    takes = TensorForm("I") if draw.random() < 0.5 else TensorForm("G", 1)
    template = price_layer(mlp_graph(), setting, takes).template

    def loose(one):
        return one if one is None or one.cut < 0 else replace(one, cut=0)

    steps = tuple(
        replace(
            step,
            ways=tuple(replace(loose(way), reduction=loose(way.reduction), talk=loose(way.talk)) for way in step.ways),
        )
        for step in template.steps
    )
    conversions = tuple(
        {move: loose(conversion) for move, conversion in each.items()} for each in template.conversion_costs
    )
    wanted = dict.fromkeys(template.wanted, 0 if takes.kind == "I" else 3)
    return setting, replace(template, steps=steps, conversion_costs=conversions, cuts=(0,), wanted=wanted)


def model_of(layers) -> Model:
    """The toy layers as a model; equal ones share a graph."""
    graphs = {layer.graph.hash: layer.graph for layer in layers}
    chain = tuple(Layer(name=one.name, graph=one.graph.hash, parameters=one.parameters) for one in layers)
    return Model(family="user", config={}, modules=(ModelModule(name="text", layers=chain),), graphs=graphs)
