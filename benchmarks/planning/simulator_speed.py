"""How fast the simulator is: 64 stages x 1,024 microbatches of 1F1B, 131,072 compute actions, on one core.

What is timed, one row each: making and lowering the schedule; compiling it into arrays (once per schedule); filling
in the times of a cost table; the sweep, which turns these arrays into the start and end of every action and
transfer; **both together**, which is what a search pays for one more cost table (the figure that is bounded by
5 ms); the memory curves of all lanes; and a timeline in which transfers share ports. Everything runs on the lowered
schedule, so the sweep covers the transfers as well. That numba compiles the Python functions is not timed; it happens
once per installation. Pure Python must give the same bits.

    python -m benchmarks.planning.simulator_speed [--quick] [--json PATH]
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.harness import Outcome, benchmark_parser, run_benchmark
from pipefit.cost.types import ActionTable, CostTable, EdgeCost, FlowKey, PortContention, PortFlow
from pipefit.schedule import ScheduleProblem, chain_edges, find_family, linear_placement, lower_schedule
from pipefit.schedule.taskgraph.compile import compile_graph
from pipefit.schedule.taskgraph.contended import run_contended
from pipefit.schedule.taskgraph.times import run_graph, run_sweep, task_durations
from pipefit.simulate import Timeline

LIMIT_S = 0.005


def main() -> int:
    parser = benchmark_parser(__doc__, quick="16 stages x 128 microbatches, fewer repetitions")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Time the simulator; a full run must also be fast enough."""
    stages, microbatches, repeats = (16, 128, 20) if arguments.quick else (64, 1024, 200)
    result = measure(stages, microbatches, repeats)
    print_table(result)
    good = result["bit_equal_to_python"] and result["equal_to_closed_form"]
    fast = result["seconds"]["times_and_sweep"]["median"] < LIMIT_S
    return Outcome(result, passed=good and (fast or arguments.quick))


def measure(stages: int, microbatches: int, repeats: int) -> dict[str, Any]:
    """All timings in seconds, and the checks."""
    placement = linear_placement(stages)
    costs = uneven_costs(stages, microbatches)
    few = max(3, repeats // 40)
    seconds: dict[str, dict[str, float]] = {}

    def timed(name: str, times: int, function: Callable[[], Any]) -> Any:
        taken = []
        for _ in range(times):
            begin = time.perf_counter()
            value = function()
            taken.append(time.perf_counter() - begin)
        seconds[name] = {"median": statistics.median(taken), "least": min(taken), "most": max(taken), "runs": times}
        return value

    computed = timed(
        "schedule", few, lambda: find_family("1f1b")(ScheduleProblem(placement=placement, microbatches=microbatches))
    )
    lowered = timed("lower", few, lambda: lower_schedule(computed, costs=costs))
    compile_graph(lowered, compiled=True)  # numba compiles, or loads what it has compiled before
    graph = timed("compile", few, lambda: compile_graph(lowered, compiled=True))
    run_graph(graph, costs, True)
    arrays = timed("times", repeats, lambda: task_durations(graph, costs))
    fast = timed("sweep", repeats, lambda: run_sweep(graph, *arrays, True))
    timed("times_and_sweep", repeats, lambda: run_graph(graph, costs, True))
    slow = timed("sweep_python", few, lambda: run_sweep(graph, *arrays, False))
    timed("memory", few, lambda: Timeline(graph, costs, fast).peak_bytes)
    open_graph, sharing = compile_graph(lowered, compiled=True, own_ports=False), with_shared_ports(costs, stages)
    run_contended(open_graph, sharing, True)
    shared = timed("shared_ports", few, lambda: run_contended(open_graph, sharing, True))
    plain = run_contended(open_graph, sharing, False)
    return {
        "stages": stages,
        "microbatches": microbatches,
        "compute_actions": sum(len(lane) for lane in computed.lanes),
        "tasks": graph.size,
        "waits": len(graph.after),
        "seconds": seconds,
        "bit_equal_to_python": all(
            getattr(one, field).tobytes() == getattr(other, field).tobytes()
            for one, other in ((fast, slow), (shared, plain))
            for field in ("start_s", "moment_s")
        ),
        "equal_to_closed_form": equal_to_closed_form(stages, microbatches),
    }


def uneven_costs(stages: int, microbatches: int) -> CostTable:
    """Stage times spread by 30 %, microbatches by 5 %, the last stage 1.5 times as slow, transfers of 4 % of F."""
    rng = random.Random(1)
    by_stage = np.exp([rng.gauss(0.0, 0.3) for _ in range(stages)]).reshape(-1, 1, 1)
    by_stage[-1] *= 1.5
    by_microbatch = np.exp([rng.gauss(0.0, 0.05) for _ in range(microbatches)]).reshape(1, -1, 1)

    def table(time_s: float, held_bytes: float) -> ActionTable:
        return ActionTable(
            time_s=time_s * by_stage * by_microbatch,
            held_bytes=np.full((stages, 1, 1), held_bytes),
            peak_bytes=np.full((1, 1, 1), 1e6),
        )

    return CostTable(
        actions={"F": table(1e-3, 1e8), "B": table(2e-3, -1e8)},
        edges=tuple(edge_cost(source, target) for source, target, _ in chain_edges(stages)),
        reduce_s=np.full(stages, 5e-3),
        gather_s=np.zeros(stages),
        step_s=np.full(stages, 2e-3),
        static_bytes=np.full(stages, 1e9),
        overhead_s=5e-6,
    )


def edge_cost(source: int, target: int) -> EdgeCost:
    """The same on every hop."""
    whole, port, size = np.full((1, 1), 4e-5), np.full((1, 1), 3e-5), np.full((1, 1), 1e6)
    return EdgeCost(
        source=source,
        target=target,
        forward_s=whole,
        backward_s=whole,
        forward_port_s=port,
        backward_port_s=port,
        forward_bytes=size,
        backward_bytes=size,
    )


def with_shared_ports(costs: CostTable, stages: int) -> CostTable:
    """Every lane on a host of its own: what it sends shares one port, what it receives another, reductions both."""
    flows: dict[FlowKey, PortFlow] = {}
    for hop in range(stages - 1):
        flows["SEND_F", hop, 0, 0] = PortFlow((2 * hop, 2 * hop + 3), (1.0, 1.0), 3e10, 2 * hop)
        flows["SEND_B", hop, 0, 0] = PortFlow((2 * hop + 2, 2 * hop + 1), (1.0, 1.0), 3e10, 2 * hop + 1)
    for lane in range(stages):
        flows["REDUCE", lane, 0, 0] = PortFlow((2 * lane, 2 * lane + 1), (1.0, 1.0), 1e10)
    return replace(costs, contention=PortContention((costs,), flows, 2 * stages, 2 * stages))


def equal_to_closed_form(stages: int, microbatches: int) -> bool:
    """With equal stages and free transfers the time is (m + d - 1)(f + b)."""
    from pipefit.schedule import uniform_costs
    from pipefit.simulate import simulate_schedule

    schedule = find_family("1f1b")(ScheduleProblem(placement=linear_placement(stages), microbatches=microbatches))
    return simulate_schedule(schedule, uniform_costs(linear_placement(stages))).makespan_s == 3.0 * (
        microbatches + stages - 1
    )


def print_table(result: dict[str, Any]) -> None:
    """What was measured, one row each."""
    print(
        f"1F1B, {result['stages']} stages x {result['microbatches']} microbatches on one core: "
        f"{result['compute_actions']:,} compute actions, {result['tasks']:,} tasks with transfers, "
        f"{result['waits']:,} waits"
    )
    words = {
        "schedule": "make the schedule",
        "lower": "lower it",
        "compile": "compile it into arrays",
        "times": "fill in the times of a cost table",
        "sweep": "the sweep over the arrays",
        "times_and_sweep": "both: a timeline under new costs",
        "sweep_python": "the sweep in pure Python",
        "memory": "memory curves and peaks",
        "shared_ports": "a timeline with shared ports",
    }
    for name, text in words.items():
        row = result["seconds"][name]
        spread = f"least {row['least'] * 1e3:8.2f}, most {row['most'] * 1e3:8.2f}, {row['runs']} runs"
        print(f"  {text:<36}{row['median'] * 1e3:9.2f} ms   ({spread})")
    print(f"  same bits as pure Python: {result['bit_equal_to_python']}")
    print(f"  equal to the closed form on equal stages: {result['equal_to_closed_form']}")


if __name__ == "__main__":
    sys.exit(main())
