"""Pipette's worker mapping (arXiv 2405.18093), written anew from a description of its code: what ours is compared with.

State: a permutation of servers, read as (pipelines, stages). Cost: the slowest pipeline's sum of 2 M_pp / bandwidth
over neighbouring stages, plus 2 (D - 1) / D M_dp / the slowest link of the ring of the first stage's servers; other
stages' rings, latency and shared ports are not in it, and bandwidth is one symmetric matrix. Moves, one of five with
equal chances: a segment backwards, a server moved, two servers swapped, a segment moved, a segment moved backwards.
Start: a random permutation. Temperature 1, times 0.999 a move; a worse state is taken with probability exp(-x / T),
where x is the difference divided by its own power of ten. It stops by the clock.

`estimate` in the place of that cost gives the same annealing on this project's estimate: then only the search differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log10

import numba
import numpy as np
from numpy.typing import NDArray

from benchmarks.placement.instances import Instance
from pipefit.plan.placement.search import PlacementSearch

Ints = NDArray[np.int64]
CHUNK = 2_000


@dataclass(frozen=True, slots=True)
class Mapping:
    """What an annealing found."""

    devices: Ints
    "[stage, replica], flat."
    moves: int
    seconds: float


@numba.njit(cache=True)
def mapping_cost(servers, pipelines, stages, symmetric, pipeline_bytes, gradient_bytes):  # type: ignore[no-untyped-def]
    """Pipette's cost in seconds."""
    slowest = 0.0
    for pipeline in range(pipelines):
        total = 0.0
        for stage in range(stages - 1):
            at = pipeline * stages + stage
            total += 2.0 * pipeline_bytes / symmetric[servers[at], servers[at + 1]]
        slowest = max(slowest, total)
    least = np.inf
    if pipelines > 1:
        for pipeline in range(pipelines):
            after = (pipeline + 1) % pipelines
            least = min(least, symmetric[servers[pipeline * stages], servers[after * stages]])
    return slowest + 2.0 * (pipelines - 1) / pipelines * gradient_bytes / least


@numba.njit(cache=True)
def changed(servers, other):  # type: ignore[no-untyped-def]
    """One of the five moves, from `servers` into `other`."""
    count = len(servers)
    kind = np.random.randint(5)
    one, two = np.random.randint(count), np.random.randint(count)
    low, high = min(one, two), max(one, two)
    other[:] = servers
    if kind == 0:
        for i in range(low, high + 1):
            other[i] = servers[low + high - i]
    elif kind == 2:
        other[one], other[two] = servers[two], servers[one]
    else:
        length = 1 if kind == 1 else high - low + 1
        to = np.random.randint(count - length + 1)
        left = 0
        for i in range(count):
            if low <= i < low + length:
                continue
            if left == to:
                left += length
            other[left] = servers[i]
            left += 1
        for i in range(length):
            other[to + i] = servers[low + (length - 1 - i if kind == 4 else i)]


@numba.njit(cache=True)
def accept(difference, temperature):  # type: ignore[no-untyped-def]
    """Pipette's rule: the difference counts by its digits, not by its size."""
    if difference <= 0:
        return True
    x = difference / 10.0 ** np.ceil(log10(difference))
    return temperature > 1e-300 and np.random.random() < exp(-x / temperature)


@numba.njit(cache=True)
def anneal_chunk(moves, control, servers, other, best, pipelines, stages, symmetric, pipeline_bytes, gradient_bytes):  # type: ignore[no-untyped-def]
    """`control`: temperature, cost now, best cost."""
    for _ in range(moves):
        changed(servers, other)
        cost = mapping_cost(other, pipelines, stages, symmetric, pipeline_bytes, gradient_bytes)
        if accept(cost - control[1], control[0]):
            control[1] = cost
            servers[:] = other
            if cost < control[2]:
                control[2] = cost
                best[:] = other
        control[0] *= 0.999


@numba.njit(cache=True)
def seed_numba(seed):  # type: ignore[no-untyped-def]
    np.random.seed(seed)


def pipette(instance: Instance, seconds: float, seed: int, clock: Callable[[], float] = time.process_time) -> Mapping:
    """Pipette's annealing on Pipette's cost."""
    stages, pipelines = instance.stages, instance.replicas
    symmetric = (instance.bandwidth + instance.bandwidth.T) / 2
    work = instance.simulated(instance.decisions()).simulation.work
    pipeline_bytes = float(work.edges[0].forward[0][0][2])
    gradient_bytes = 4.0 * max(stage.parameters.trainable[0] for stage in work.stages)
    arguments = (pipelines, stages, symmetric, pipeline_bytes, gradient_bytes)
    servers = np.random.default_rng(seed).permutation(instance.hosts).astype(np.int64)
    other, best = servers.copy(), servers.copy()
    seed_numba(seed)
    anneal_chunk(0, np.zeros(3), servers, other, best, *arguments)
    began, moves = clock(), 0
    now = float(mapping_cost(servers, *arguments))
    control = np.array([1.0, now, now])
    while clock() - began < seconds:
        anneal_chunk(CHUNK, control, servers, other, best, *arguments)
        moves += CHUNK
    return Mapping(by_stage(best, pipelines, stages), moves, clock() - began)


def pipette_on_estimate(
    instance: Instance,
    searcher: PlacementSearch,
    seconds: float,
    seed: int,
    clock: Callable[[], float] = time.process_time,
) -> Mapping:
    """Pipette's annealing on our estimate, every state worked out from nothing; the paths that the estimate knows are
    those of the searcher."""
    stages, pipelines = instance.stages, instance.replicas
    loop = estimate_loop()
    servers = np.random.default_rng(seed).permutation(instance.hosts).astype(np.int64)
    other, best = servers.copy(), servers.copy()
    seed_numba(seed)
    control = np.array([1.0, np.inf, np.inf])
    arguments = (servers, other, best, pipelines, stages, searcher.tables)
    loop(0, control, *arguments)
    began, moves = clock(), 0
    while clock() - began < seconds:
        loop(CHUNK // 10, control, *arguments)
        moves += CHUNK // 10
    return Mapping(by_stage(best, pipelines, stages), moves, clock() - began)


_LOOPS: list[Callable[..., None]] = []


def estimate_loop() -> Callable[..., None]:
    """The loop of `pipette_on_estimate`, compiled once."""
    if not _LOOPS:
        from pipefit.plan.placement.kernels.compile import kernel_functions

        recompute = kernel_functions(True)["recompute"]

        @numba.njit
        def loop(moves, control, servers, other, best, pipelines, stages, tables):  # type: ignore[no-untyped-def]
            for _ in range(moves):
                changed(servers, other)
                for pipeline in range(pipelines):
                    for stage in range(stages):
                        tables.state.device[stage * pipelines + pipeline] = other[pipeline * stages + stage]
                cost = recompute(tables) * 1e-12
                if accept(cost - control[1], control[0]):
                    control[1] = cost
                    servers[:] = other
                    if cost < control[2]:
                        control[2] = cost
                        best[:] = other
                control[0] *= 0.999

        _LOOPS.append(loop)
    return _LOOPS[0]


def by_stage(servers: Ints, pipelines: int, stages: int) -> Ints:
    """(pipelines, stages) as the device of every (stage, replica)."""
    return servers.reshape(pipelines, stages).T.reshape(-1).copy()
