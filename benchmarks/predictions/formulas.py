"""Step times by other configurators' formulas, written anew from their descriptions, on what was measured.

All of them get the slowest lane's measured forward f and backward b of one microbatch; what they differ in is what they
make of pipelines and links. M_pp is the message of one microbatch between two stages, M_dp the gradients of the first
stage (as they are, not by a formula for GPT).

- `uniform`: GPipe-like, one bandwidth for all links, as most configurators assume:
  (m + p - 1)(f + b) + 2 (p - 1) M_pp / BW + 2 (D - 1) / D M_dp / BW, BW the mean over pairs of hosts.
- `amp` (AMP, NeurIPS 2022): (m - 1) 3 f + p 3 f + T_pp + T_dp; backward taken as 2 f, messages paid once, the slowest
  ring of all stages.
- `pipette` (arXiv 2405.18093): floor(m / p) (p (f + b) + T_pp) + (p - 1)(f + b) + T_dp where m >= p, else
  p (f + b) + T_pp + (m - 1)(f + b) + T_dp: the messages of a pipeline's whole way are paid m / p times. T_pp is that
  of the slowest pipeline over the symmetric matrix of measured bandwidths, T_dp a hierarchical ring of the first stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from pipefit.cost.comm.network import Network
from pipefit.cost.static_memory import GRADIENT_BYTES
from pipefit.plan.assemble.predict import PlanSimulation
from pipefit.plan.bounds.step_bounds import table_bound_s
from pipefit.plan.types import Plan

Formula = Callable[[Plan, PlanSimulation, Network], float]


def uniform(plan: Plan, simulation: PlanSimulation, network: Network) -> float:
    """GPipe-like, with one bandwidth."""
    f, b, p, m = _compute(plan, simulation)
    bandwidth = _mean_bandwidth(network)
    replicas, gradients = _gradients(simulation, 0)
    message = _message_bytes(simulation)
    return (m + p - 1) * (f + b) + 2 * (p - 1) * message / bandwidth + _ring(replicas, gradients, bandwidth)


def amp(plan: Plan, simulation: PlanSimulation, network: Network) -> float:
    """AMP's: forward times three, messages once."""
    f, _, p, m = _compute(plan, simulation)
    rings = []
    for index, stage in enumerate(simulation.work.stages):
        replicas, gradients = _gradients(simulation, index)
        rings.append(_ring(replicas, gradients, _slowest(network, stage.group.devices)))
    return (m - 1) * 3 * f + p * 3 * f + _way(simulation, network) + max(rings)


def pipette(plan: Plan, simulation: PlanSimulation, network: Network) -> float:
    """Pipette's: the way round the pipeline once every p microbatches."""
    f, b, p, m = _compute(plan, simulation)
    way, ring = _way(simulation, network), _hierarchical(simulation, network)
    if m >= p:
        return (m // p) * (p * (f + b) + way) + (p - 1) * (f + b) + ring
    return p * (f + b) + way + (m - 1) * (f + b) + ring


def closed_form(plan: Plan, simulation: PlanSimulation, network: Network) -> float:
    """Ours: the bound that prunes the search."""
    order = plan.order
    return table_bound_s(simulation.costs, order.placement, order.microbatches, plan.decisions["schedule"])


FORMULAS: Mapping[str, Formula] = {"uniform": uniform, "amp": amp, "pipette": pipette, "closed form": closed_form}


def _compute(plan: Plan, simulation: PlanSimulation) -> tuple[float, float, int, int]:
    """(forward, backward of the slowest lane in seconds a microbatch, lanes, microbatches)."""
    costs, placement = simulation.costs, np.asarray(plan.order.placement)
    forward, backward = (costs.actions[kind].time_s.sum(axis=(1, 2)) + costs.overhead_s for kind in "FB")
    lanes = int(placement.max()) + 1
    by_lane = [(float(forward[placement == lane].sum()), float(backward[placement == lane].sum()))
               for lane in range(lanes)]  # fmt: skip
    slowest = max(by_lane, key=sum)
    return *slowest, lanes, plan.order.microbatches


def _message_bytes(simulation: PlanSimulation) -> float:
    """Of one microbatch between two stages, on one device."""
    sizes = [size for edge in simulation.work.edges for each in edge.forward for _, _, size in each]
    return max(sizes, default=0.0)


def _gradients(simulation: PlanSimulation, index: int) -> tuple[int, float]:
    """(replicas, bytes of gradients) of a stage."""
    stage = simulation.work.stages[index]
    width = GRADIENT_BYTES[simulation.work.precision]
    return stage.group.find_axis("replica").size, max(stage.parameters.trainable) * width


def _ring(replicas: int, size: float, bandwidth: float) -> float:
    return 2 * (replicas - 1) / replicas * size / bandwidth


def _way(simulation: PlanSimulation, network: Network) -> float:
    """The slowest pipeline's messages, there and back: 2 M / bandwidth for each pair of neighbouring stages."""
    devices = [stage.group.devices for stage in simulation.work.stages]
    message = _message_bytes(simulation)
    return max(
        sum(2 * message / _symmetric(network, a, b) for a, b in itertools.pairwise(way) if a != b)
        for way in zip(*devices, strict=True)
    )


def _hierarchical(simulation: PlanSimulation, network: Network) -> float:
    """The first stage's ring between hosts, then inside them."""
    devices = simulation.work.stages[0].group.devices
    _, gradients = _gradients(simulation, 0)
    hosts: dict[int, list[int]] = {}
    for device in devices:
        hosts.setdefault(network.host[device], []).append(device)
    firsts, inside = [members[0] for members in hosts.values()], max(hosts.values(), key=len)
    return sum(_ring(len(group), gradients, _slowest(network, group)) for group in (firsts, inside) if len(group) > 1)


def _slowest(network: Network, devices: tuple[int, ...] | list[int]) -> float:
    """The slowest link of a ring."""
    pairs = zip(devices, (*devices[1:], devices[0]), strict=True)
    return min((_symmetric(network, a, b) for a, b in pairs if a != b), default=float("inf"))


def _symmetric(network: Network, a: int, b: int) -> float:
    return (network.find_link(a, b).bandwidth_bytes_per_s + network.find_link(b, a).bandwidth_bytes_per_s) / 2


def _mean_bandwidth(network: Network) -> float:
    matrix = np.array(network.cluster.rails[0].bandwidth_bytes_per_s)
    return float(matrix[~np.eye(len(matrix), dtype=bool)].mean())
