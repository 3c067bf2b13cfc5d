"""Chains of lanes: additional arrays for the search over sets (`sets`), and the check that it applies."""

from __future__ import annotations

import numpy as np

from pipefit.cost.types import Ints
from pipefit.plan.placement.kernels.tables import ChainTable
from pipefit.plan.placement.shape import PlacementProblem

MOST_REPLICAS = 64
"""Replicas from which devices are moved one by one again: the work of a matching grows with their square, and with 128
replicas ten seconds over sets found less."""


def chain_arrays(question: PlacementProblem) -> ChainTable | None:
    """Return the arrays of a chain; None if the candidate is not a chain.

    In a chain every flow goes from the devices of a lane, with equal messages, to those of the same pipelines on a
    neighbouring lane, and every device is alone on its host and its lane's shard. Otherwise the pipelines cannot be
    chosen for each boundary alone.
    """
    links, shape = question.links, question.shape
    single = links.single and shape.shards == 1 and shape.allowed.shape[1] == 1
    if not single or shape.lanes < 2 or not 2 <= shape.replicas <= MOST_REPLICAS:
        return None
    edge_of, forward, size = [], [], []
    for flow in range(question.flow_count):
        messages = slice(int(shape.flow_start[flow]), int(shape.flow_start[flow + 1]))
        source, target = shape.source[messages], shape.target[messages]
        if not len(source):  # between stages of one lane
            edge_of.append(-1)
            forward.append(0)
            size.append(0)
            continue
        if len(source) != shape.replicas or len(set(shape.size[messages].tolist())) > 1:
            return None
        lanes = {(a, b) for a, b in zip(source // shape.replicas, target // shape.replicas, strict=True)}
        (sender, receiver), *more = sorted(lanes)
        if more or abs(sender - receiver) != 1 or (source % shape.replicas != target % shape.replicas).any():
            return None
        edge_of.append(min(sender, receiver))
        forward.append(int(sender < receiver))
        size.append(int(shape.size[messages][0]))
    edges = [[flow for flow, edge_flows in enumerate(edge_of) if edge_flows == edge] for edge in range(shape.lanes - 1)]
    matrices: dict[tuple[tuple[int, int], ...], int] = {}
    pair_of = [
        matrices.setdefault(tuple((size[flow], forward[flow]) for flow in edge_flows), len(matrices))
        for edge_flows in edges
    ]
    return ChainTable(
        edge_start=np.cumsum([0, *(len(edge_flows) for edge_flows in edges)], dtype=np.int64),
        edge_flows=np.array([flow for edge_flows in edges for flow in edge_flows], dtype=np.int64),
        edge_of=np.array(edge_of, dtype=np.int64),
        forward=np.array(forward, dtype=np.int64),
        pair_of=np.array(pair_of, dtype=np.int64),
        pair=np.concatenate([_pair_ticks(question, flows).reshape(-1) for flows in matrices]),
        partner=np.zeros((shape.lanes - 1) * shape.replicas, dtype=np.int64),
        back=np.zeros((shape.lanes - 1) * shape.replicas, dtype=np.int64),
        distance=np.zeros(shape.replicas, dtype=np.int64),
        parent=np.zeros(shape.replicas, dtype=np.int64),
        ahead=np.zeros(shape.replicas, dtype=np.int64),
        touched_edge=np.zeros(4, dtype=np.int64),
        kept_edge=np.zeros(4, dtype=np.int64),
        kept_pairs=np.zeros(4 * shape.replicas, dtype=np.int64),
        layout=np.zeros(len(question.devices), dtype=np.int64),
    )


def _pair_ticks(question: PlacementProblem, flows: tuple[tuple[int, int], ...]) -> Ints:
    """Return [device, device]: summed ticks of these messages between the left and the right device of a boundary.

    `flows` are (size, whether forward) of messages sent one after the other.
    """
    links = question.links
    rail, host = links.rail, links.host
    total = np.zeros((len(host), len(host)), dtype=np.int64)
    for size, forward in flows:
        matrix = links.matrix[rail]
        ticks = links.busy[size][matrix[:, None], host[:, None], host[None, :]]
        ticks = ticks + links.latency[matrix[:, None], host[:, None], host[None, :]]
        total += ticks if forward else ticks.T
    return total
