"""How much activation memory each schedule takes on eight devices: measured in real runs, beside the simulator.

Eight gloo processes train a model of 16 equal Llama layers (and an embedding, a head and a loss, which are small) under
every schedule family, 16 microbatches a step: two layers a stage where a family has one stage per device, one layer a
stage where it has two. In one step of each the CPU allocator's own record (PyTorch's profiler) gives what is alive at
the worst moment of every device: activations, gradients on their way, receive and send buffers, logits, workspace.
Parameters, gradients and optimizer state were there before and do not count. The simulated figure is the peak of the
planner's own prediction less its static bytes. Times do not matter here: the order of a lane decides what it holds.

    python -m benchmarks.memory.families [--quick] [--json PATH] [--plot PATH]
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from benchmarks.memory.families_plot import draw
from benchmarks.processes.fixed_machine import FIXED_MACHINE
from benchmarks.processes.ranks import in_ranks, join_group

LIMIT = 0.01
LAYERS = 16
CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
QUICK = ("1f1b", "v-half", "v-min")

TABLE = TextTable(
    ("family", "<18"), ("fullest device", ">16"), ("of 1F1B", ">9"), ("emptiest", ">12"), ("worst error", ">13")
)


def main() -> int:
    parser = benchmark_parser(__doc__, quick="four devices, three families, short sequences")
    parser.add_argument("--plot", help="write the picture here, as SVG")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure the peaks of all families, and draw them if that is asked for."""
    os.environ["OMP_NUM_THREADS"] = "1"
    result = measure(4, 8, 64, QUICK) if arguments.quick else measure(8, 16, 512, families())
    result["limit"] = LIMIT
    print_table(result)
    if arguments.plot:
        Path(arguments.plot).write_text(draw(result), encoding="utf-8")
    return Outcome(result, passed=all(case["largest_error"] <= LIMIT for case in result["families"].values()))


def families() -> tuple[str, ...]:
    """All families, one stage per device first."""
    from pipefit.schedule import FAMILIES

    return tuple(sorted(FAMILIES, key=lambda name: (len(FAMILIES[name].placement(2)), name)))


def measure(devices: int, microbatches: int, sequence: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Peaks of every family, measured and simulated, in bytes per device; and as shares of 1F1B's largest."""
    from pipefit.cluster import local_cluster
    from pipefit.plan.assemble.predict import simulate_plan

    model, plans = make_plans(devices, microbatches, sequence, names)
    measured = run(devices, plans, model)
    cases = {}
    for name, plan in plans.items():
        simulation = simulate_plan(plan, model, local_cluster(devices, FIXED_MACHINE))
        simulated = (simulation.timeline.peak_bytes - simulation.costs.static_bytes).tolist()
        errors = [abs(a / b - 1) for a, b in zip(simulated, measured[name], strict=True)]
        cases[name] = {
            "stages": len(plan.stages),
            "measured_bytes": measured[name],
            "simulated_bytes": simulated,
            "static_bytes": simulation.costs.static_bytes.tolist(),
            "largest_error": max(errors),
        }
    whole = max(cases["1f1b"]["measured_bytes"])
    for case in cases.values():
        case["share_of_1f1b"] = max(case["measured_bytes"]) / whole
    return {
        "devices": devices,
        "microbatches": microbatches,
        "sequence": sequence,
        "rows": 1,
        "model": CONFIG,
        "families": cases,
    }


def make_plans(devices: int, microbatches: int, sequence: int, names: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """(the model, the plan of every family): equal layers, cut by hand."""
    from pipefit.cluster import local_cluster
    from pipefit.model.capture.layers import capture_family
    from pipefit.model.registry import describe_config
    from pipefit.plan.evaluate.planner_context import build_plan
    from pipefit.plan.request.decisions import ParallelConfig
    from pipefit.plan.types import Job
    from pipefit.schedule import FAMILIES

    described = describe_config(CONFIG, "sixteen-layers", "benchmark")
    model = capture_family(described.family, described.config)
    job = Job(batch=microbatches, sequence=sequence, precision="float32")
    plans = {}
    for name in names:
        placement = FAMILIES[name].placement(devices)
        each = LAYERS // len(placement)
        decisions = ParallelConfig(
            cuts=tuple(1 + each * stage for stage in range(1, len(placement))),
            placement=() if len(placement) == devices else placement,
            schedule=name,
            microbatches=microbatches,
        )
        plans[name] = build_plan(model, local_cluster(devices, FIXED_MACHINE), job, decisions)
    return model, plans


def run(devices: int, plans: dict[str, Any], model: Any) -> dict[str, list[float]]:
    """The measured peak of every device under every plan, in one world of processes."""
    found: dict[str, list[float]] = in_ranks(rank_main, devices, plans, model)
    return found


def rank_main(rank: int, devices: int, port: int, plans: dict[str, Any], model: Any, queue: Any) -> None:
    """One rank: two steps of every plan, the second one audited."""
    import torch
    import torch.distributed as dist

    from pipefit.run.transfers.comms import CommGroups

    join_group(rank, devices, port)
    comms, found = CommGroups(), {}
    for name, plan in plans.items():
        own = torch.tensor([peak_bytes(plan, model, comms)], dtype=torch.float64)
        everyone = [torch.zeros_like(own) for _ in range(devices)]
        dist.all_gather(everyone, own)
        found[name] = [float(peak) for peak in everyone]
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def peak_bytes(plan: Any, model: Any, comms: Any) -> float:
    """The most that this rank has alive in a step beside what was there before it."""
    import torch

    from pipefit.data.stepplan import StepPlan, batch_shape
    from pipefit.run.inputs.feeds import make_inputs
    from pipefit.run.stage.memory_audit import AllocationAudit
    from pipefit.run.update.optimizer import OptimizerConfig
    from pipefit.run.worker.build import build_worker

    worker = build_worker(plan, model, comms, torch.device("cpu"), OptimizerConfig(lr=1e-3))
    labels = plan.job.batch * plan.job.sequence
    step_plan = StepPlan(step=0, rows=np.arange(plan.job.batch), divisor=labels, shape=batch_shape(plan))
    feeds = make_inputs(plan, worker.device, Text(plan), step_plan, torch.device("cpu"))
    worker.run_step(feeds, 0, labels)
    with AllocationAudit() as audit:
        worker.run_step(feeds, 1, labels)
    return float(audit.peak_bytes)


class Text:
    """Rows of random tokens."""

    def __init__(self, plan: Any) -> None:
        shape = (plan.job.batch, plan.job.sequence + 1)
        self.rows = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], shape)

    def row(self, index: int) -> np.ndarray:
        return self.rows[index]


def print_table(result: dict[str, Any]) -> None:
    print(f"peak activation memory, {result['devices']} devices, {result['microbatches']} microbatches")
    TABLE.print_head()
    for name, case in result["families"].items():
        high, low = (f"{value / 1e6:.1f} MB" for value in (max(case["measured_bytes"]), min(case["measured_bytes"])))
        TABLE.print_row(name, high, f"{case['share_of_1f1b']:.3f}", low, f"{case['largest_error']:.3%}")


if __name__ == "__main__":
    sys.exit(main())
