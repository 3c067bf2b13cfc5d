"""Times and buffers of moving a tensor from stage to stage."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np

from pipefit.cost.comm.network import Network
from pipefit.cost.types import Array, EdgeCost
from pipefit.cost.work import EdgeWork, Message


def edge_cost(edge: EdgeWork, network: Network) -> EdgeCost:
    """Return the times and the buffer bytes of moving a tensor."""
    return with_buffers(edge_times(edge, network), edge)


def edge_times(edge: EdgeWork, network: Network) -> EdgeCost:
    """Return the times of `edge_cost`, without its bytes."""
    ahead, back = [
        [[network.transfer_time(messages) for messages in row] for row in direction]
        for direction in _by_microbatch(edge)
    ]
    return EdgeCost(
        source=edge.source,
        target=edge.target,
        tensor=edge.tensor,
        forward_s=np.array([[time.whole_s for time in row] for row in ahead]),
        backward_s=np.array([[time.whole_s for time in row] for row in back]),
        forward_port_s=np.array([[time.port_s for time in row] for row in ahead]),
        backward_port_s=np.array([[time.port_s for time in row] for row in back]),
        forward_bytes=_NONE,
        backward_bytes=_NONE,
    )


_NONE = np.zeros((1, 1))


def _by_microbatch(
    edge: EdgeWork,
) -> tuple[Sequence[Sequence[Sequence[Message]]], Sequence[Sequence[Sequence[Message]]]]:
    """Return [microbatch][slice] -> messages, forward and backward; one microbatch if all are equal."""
    if not edge.ragged:
        return [edge.forward], [edge.backward]
    return [[ahead] for ahead, _ in edge.ragged], [[back] for _, back in edge.ragged]


def with_buffers(cost: EdgeCost, edge: EdgeWork, members: Container[int] | None = None) -> EdgeCost:
    """Return the cost with the bytes of the devices that receive and send most, among all or among `members`."""

    def largest_buffer(each: Sequence[Sequence[Sequence[Message]]], sending: bool) -> Array:
        return np.array([[_most_bytes(messages, sending, members) for messages in row] for row in each])

    ahead, back = _by_microbatch(edge)
    return replace(
        cost,
        forward_bytes=largest_buffer(ahead, False),
        backward_bytes=largest_buffer(back, False),
        forward_sent_bytes=largest_buffer(ahead, True),
        backward_sent_bytes=largest_buffer(back, True),
    )


def _most_bytes(messages: Sequence[Message], sending: bool, members: Container[int] | None) -> float:
    """Return the largest receive buffer of a device, or with `sending` the largest bytes held until they are sent."""
    totals: dict[int, float] = {}
    for source, target, size in messages:
        end = source if sending else target
        if members is None or end in members:
            totals[end] = totals.get(end, 0.0) + size
    return max(totals.values(), default=0.0)
