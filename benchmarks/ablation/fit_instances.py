"""The problems on which constructions of `fit` are left out: those of the other benchmarks, of plans and of tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.processes.paced import uneven_times
from benchmarks.schedules import cases as schedule_cases
from pipefit.cost.types import CostTable
from pipefit.schedule import FAMILIES, ScheduleProblem, linear_placement, uniform_costs, vee_placement
from pipefit.schedule.fit import search

ROOT = Path(__file__).resolve().parents[2]
MOVES = 20_000
"""Moves of a search: as many as the planner spends on one fit."""

PLANS = (
    "toy fit", "toy fit split in two", "toy free", "llama local free", "llama local", "mixtral on mixed kinds",
    "gpt2 on 4xV100", "built fit",
)  # fmt: skip
"""Requests of tests/support/hash_requests.py whose schedule is not a family's by constraint."""


@dataclass(frozen=True, slots=True)
class FitCase:
    """One call of `fit_schedule`."""

    name: str
    problem: ScheduleProblem
    options: Mapping[str, Any] = field(default_factory=dict)


def textbook_cases() -> Iterator[FitCase]:
    """Yield the named problems of benchmarks/schedules/cases.py."""
    cases = schedule_cases.slow_head()
    for recompute, deltas in (("none", (1.0, -0.171, -0.829)), ("selective", (1.0, 0.476, -1.476))):
        cases += schedule_cases.slow_head(deltas, f", runtime memory, recompute {recompute}")
    cases += [*schedule_cases.many_microbatches(), *schedule_cases.many_devices((16, 24))]
    for case in cases:
        yield FitCase(case.name, case.problem(), {"moves": MOVES, "objective": "span"})


def random_cases() -> Iterator[FitCase]:
    """Yield the random problems of benchmarks/schedules/cases.py, of at most 12 devices."""
    for seed in schedule_cases.SEEDS:
        case = schedule_cases.random_instance(seed)
        if case.devices <= 12:
            yield FitCase(case.name, case.problem(), {"moves": MOVES, "objective": "span"})


def throughput_cases() -> Iterator[FitCase]:
    """Yield the paced devices of benchmarks/runtime/throughput.py, with and without a memory limit."""
    placements = {
        "linear": linear_placement,
        "looped": FAMILIES["interleaved-1f1b"].placement,
        "v": vee_placement,
    }
    for kind, devices in (("last", 4), ("lognormal-0", 4), ("lognormal-1", 4), ("lognormal-0", 8)):
        for name, place in placements.items():
            lanes = tuple(place(devices))
            costs = uneven_times(kind, 2 * devices, len(lanes), 1.0).costs(lanes, 0.5)
            for limit in (None, (0.75 * len(lanes),) * devices):
                problem = ScheduleProblem(placement=lanes, microbatches=2 * devices, costs=costs, limit_bytes=limit)
                yield FitCase(f"{name} d={devices} {kind}, limit {limit and limit[0]}", problem, {"moves": MOVES})


def plan_cases() -> Iterator[FitCase]:
    """Yield every call of `fit_schedule` in the planning of the requests in `PLANS`."""
    from tests.support.hash_requests import REQUESTS, plan_of

    original = search.fit_schedule
    for name in PLANS:
        calls: list[FitCase] = []

        def record(problem: ScheduleProblem, calls: list[FitCase] = calls, name: str = name, **options: Any) -> Any:
            calls.append(FitCase(f"plan: {name}, fit {len(calls)}", problem, options))
            return original(problem, **options)

        with mock.patch.object(search, "fit_schedule", record):
            plan_of(REQUESTS[name])
        yield from calls


def dag_cases() -> Iterator[FitCase]:
    """Yield the random problems of tests/schedule (DAGs, slices, ports, transient memory), and receive buffers."""
    from tests.schedule.fit.kernels.test_sweep import random_problem

    for seed in range(24):
        yield FitCase(f"random DAG {seed}", random_problem(random.Random(seed)), {"moves": 3000})
    for seed in range(6):
        devices = 2 + seed % 3
        costs = uneven_costs(devices, seed)
        buffers = {f"{way}_bytes": np.full((1, 1), 0.1) for way in ("forward", "backward")}
        costs = replace(costs, edges=tuple(replace(edge, **buffers) for edge in costs.edges))
        yield FitCase(f"receive buffers {seed}", vee_problem(costs, 1.4, 2 * devices), {"moves": 3000})


def merging_cases() -> Iterator[FitCase]:
    """Yield problems in which B takes 0.7 to 1 times as long as I and W, by stage, and splitting takes memory."""
    for seed in range(8):
        devices, draw = 3 + seed % 3, np.random.default_rng(seed)
        costs = uneven_costs(devices, seed)
        actions = dict(costs.actions)
        both = actions["I"].time_s + actions["W"].time_s
        actions["B"] = replace(actions["B"], time_s=both * draw.uniform(0.7, 1.0, (2 * devices, 1, 1)))
        for kind, amount in {"I": 0.5, "W": -1.5}.items():
            actions[kind] = replace(actions[kind], held_bytes=np.full((1, 1, 1), amount))
        problem = vee_problem(replace(costs, actions=actions), float(draw.uniform(1.0, 2.0)), 8)
        yield FitCase(f"merging {seed}", problem, {"moves": 6000})


def uneven_costs(devices: int, seed: int) -> CostTable:
    """Return the costs of a V whose stages are lognormal (sigma 0.3), the last one half as long again."""
    factors = np.random.default_rng(seed).lognormal(0.0, 0.3, 2 * devices)
    factors[-1] *= 1.5
    forward, weight = (tuple((time * factors).tolist()) for time in (28.0, 20.0))
    return uniform_costs(
        vee_placement(devices), forward_s=forward, input_s=forward, weight_s=weight, transfer_s=4.0, port_s=0.2
    )


def vee_problem(costs: CostTable, limit: float, microbatches: int) -> ScheduleProblem:
    """Return the problem on the V of these costs, with `limit` chunk units for each device of the pipeline."""
    devices = len(costs.edges) // 2 + 1
    lanes = vee_placement(devices)
    return ScheduleProblem(
        placement=lanes, microbatches=microbatches, costs=costs, limit_bytes=(limit * devices,) * devices
    )


GROUPS: Mapping[str, Callable[[], Iterator[FitCase]]] = {
    "textbook": textbook_cases,
    "throughput": throughput_cases,
    "random": random_cases,
    "merging": merging_cases,
    "dags": dag_cases,
    "plans": plan_cases,
}
