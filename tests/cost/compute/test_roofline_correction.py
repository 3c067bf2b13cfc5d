"""Parts of measured layers: their times by an emulated device that the cost model has never seen, against predictions
from measurements of the whole layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from pipefit.cluster import local_cluster
from pipefit.cluster.measured import ClusterMeasurements, LayerCurve, LayerPoint, Setting
from pipefit.cluster.types import Cluster
from pipefit.cost.compute import curves
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.roofline import LayerCost
from pipefit.cost.compute.roofline_correction import LayerLookup, product_kinds, unsharded_shape
from pipefit.lab.pace import layer_facts
from pipefit.lab.tables import ACTION_KINDS, DeviceTable
from pipefit.model.graph import Graph
from pipefit.model.registry import open_model
from pipefit.plan.assemble.shard_programs import ProgramCache
from pipefit.profile.calibrate import add_ratios
from pipefit.profile.fit import fit_layer
from pipefit.profile.points import WorkPoint

MODEL = open_model("tiny")
BLOCK, HEAD = MODEL.modules[0].layers[1], MODEL.modules[0].layers[-2]
TABLE = DeviceTable(flops_per_s=4e9, memory_bytes_per_s=4e9, knee_tokens=16.0, layer_s=0.0)
POINTS = [WorkPoint(1, tokens, 0, 1) for tokens in (8, 16, 24, 32, 48, 64, 128, 192, 256)]
LONG = MicrobatchShape(1, 256, 0, 256)


def truth(graph: Graph, rows: int, tokens: int) -> dict[str, float]:
    facts = layer_facts(graph, {"B": rows, "T": tokens, "P": 0, "S": tokens, "R": rows})
    return {action: TABLE.layer_time_s(action, facts) for action in ACTION_KINDS}


def measured(setting: Setting = "together") -> Cluster:
    """The block and the head, measured whole on the emulated device."""
    cluster = local_cluster(2)
    sheet = replace(cluster.kinds["cpu"], memory_bandwidth_bytes_per_s=4e9, efficiency=0.9)
    kind = replace(sheet, peak_flops_per_s=dict.fromkeys(sheet.peak_flops_per_s, 4e9), overhead_s=0.0)
    found = []
    for layer, attention in ((BLOCK, True), (HEAD, False)):
        graph = MODEL.layer_graph(layer)
        actions, worst = fit_layer(POINTS, [truth(graph, one.rows, one.tokens) for one in POINTS], attention)
        found.append(
            LayerCurve(
                signature=curves.digest_graph(graph),
                name=layer.name,
                kind="cpu",
                dtype="float32",
                setting=setting,
                processes=1,
                actions=actions,
                points=tuple(LayerPoint(**one._asdict(), time_s={}, spread={}) for one in POINTS),
                fit_error=worst,
            )
        )
    layers = add_ratios(kind, [MODEL.layer_graph(BLOCK), MODEL.layer_graph(HEAD)], found)
    return replace(cluster, kinds={"cpu": kind}, measured=ClusterMeasurements(layers=tuple(layers)))


def cost(cluster: Cluster, graph: Graph, graphs: Iterable[Graph] = ()) -> tuple[LayerCost, tuple[str, ...]]:
    found = curves.best_costs(cluster, graphs=graphs)
    query = LayerQuery(graph, LONG, cluster.kinds["cpu"], "float32", "none", lambda *_: 0.0, "none")
    return found.layer_cost(query), found.notes


def error(found: LayerCost, graph: Graph) -> float:
    """Of a forward and a backward against the emulated device."""
    real = truth(graph, LONG.rows, LONG.tokens)
    return (found.forward_s + found.backward_s) / (real["F"] + real["B"]) - 1


def test_a_part_of_a_measured_layer_is_corrected_by_that_layer_at_the_same_sizes() -> None:
    """Half of a block's heads and columns; the mean of the block and of the head, which has no attention, is off."""
    cluster = measured()
    part = ProgramCache(MODEL).layer_program(BLOCK, "megatron", (1, 1)).graphs[0]
    assert product_kinds(part) == product_kinds(MODEL.layer_graph(BLOCK)) != product_kinds(MODEL.layer_graph(HEAD))
    found, notes = cost(cluster, part, MODEL.graphs.values())
    assert abs(error(found, part)) < 0.02
    assert any(
        f"not measured; roofline, corrected by the measurement of {BLOCK.name} at the same sizes" in n for n in notes
    )
    plain, notes = cost(cluster, part)
    assert abs(error(plain, part)) > 0.05 and any("the mean of measured layers" in note for note in notes)


@pytest.mark.parametrize(("name", "sharding"), [("tiny", "megatron"), ("multimodal-tiny", "megatron-sp")])
def test_a_part_is_told_from_parts_of_layers_with_the_same_products(name: str, sharding: str) -> None:
    """The head, the embedding of images and the generator's output each have one product and nothing else alike."""
    model = open_model(name)
    whole, programs = LayerLookup(model.graphs.values()), ProgramCache(model)
    several = 0
    for layer in (layer for module in model.modules for layer in module.layers):
        own = model.layer_graph(layer)
        part = programs.layer_program(layer, sharding, (1, 1)).graphs[0]
        if product_kinds(own) and product_kinds(part) == product_kinds(own):
            assert whole.similar_layers(part)[0] is own, layer.name
            several += len(whole.similar_layers(part)) > 1
    assert several >= (name == "multimodal-tiny")


def test_rows_of_a_part_count() -> None:
    """Where devices split rows, each is as slow as with its own ones: half of the rows, half of the tokens."""
    graph = MODEL.layer_graph(BLOCK)
    sizes = ["R" if size == "B" else size for size in graph.tensors[0].shape]
    part = replace(graph, tensors=(replace(graph.tensors[0], shape=tuple(sizes)), *graph.tensors[1:]))
    place = MicrobatchShape(4, 16, 0, 16, own_rows=1)
    assert unsharded_shape(part, place) == MicrobatchShape(1, 16, 0, 16, own_rows=1)
    assert unsharded_shape(graph, place) == MicrobatchShape(4, 16, 0, 16, own_rows=4)


def test_what_only_one_setting_measured_corrects_the_other() -> None:
    """A host of one device measures its layers alone, never together: they are all that is known of its kind."""
    part = ProgramCache(MODEL).layer_program(HEAD, "megatron", (1, 1)).graphs[0]
    alone, together = (cost(measured(setting), part)[0] for setting in ("alone", "together"))
    assert alone.forward_s == together.forward_s and abs(error(alone, part)) < 0.25
