"""Our runtime beside PyTorch's own parallelism: the same Llama, weights and batch, in the same processes.

| part | pipefit's plan | PyTorch |
| --- | --- | --- |
| fsdp | `sharded_state=parameters` (ZeRO-3) | `torch.distributed.fsdp.fully_shard` |
| tensor | `sharding=megatron` | `torch.distributed.tensor.parallel.parallelize_module` |
| sequence | `sharding=megatron-sp` | the same, with `SequenceParallel` |
| context | `context` | keys and values gathered by hand (`peer_context.py`), gradients summed by DDP |
| adamw | its update alone | `torch.optim.AdamW(fused=True)` alone |

Each part runs over gloo in 2 and in 4 processes of one thread. A step is forward, backward, clipping and AdamW in
float32, on one microbatch. First both sides take three steps: their losses must agree to 1e-5, and the changes of all
parameters to 1e-2 of their norm, else nothing is timed. Then pairs of steps follow, in turn one and the other side
ahead; a pair's ratio is our time over PyTorch's, each the slowest rank's. The bound is the upper end of the 95 %
confidence interval of the mean ratio (Student's t on the logarithms).

Memory is counted apart from time, each rank alone in PyTorch's `fake` process group: the CPU allocator's record from
the first parameter on, and of that the peak within the third step. gloo's own copies do not count, on either side.

    python -m benchmarks.runtime.engine_peers [--quick] [--only PART] [--pairs N] [--json PATH]
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.harness import Outcome, TextTable, benchmark_parser, earlier_result, keep_others, run_benchmark
from benchmarks.processes.ranks import in_ranks, join_group
from benchmarks.processes.ratios import paired_ratio
from benchmarks.runtime.peer_case import FULL, KINDS, QUICK, Case, PipefitSide, first_values, plan_case

AIM = 1.05
"""Of the bound of the time ratio, and of the ratio of peak bytes."""
CHECKED_STEPS = 3
LOSS_TOLERANCE, CHANGE_TOLERANCE = 1e-5, 1e-2
MIB = 2**20

TABLE = TextTable(
    ("part", "<10"), ("processes", ">9"), ("pairs", ">7"), ("ours ms", ">10"), ("torch ms", ">10"), ("ratio", ">8"),
    ("95% bound", ">11"), ("ours MiB", ">10"), ("torch MiB", ">11"), ("ratio", ">8"),
)  # fmt: skip


def main() -> int:
    parser = benchmark_parser(__doc__, quick="a tiny model, two processes, three pairs each", only=KINDS)
    parser.add_argument("--pairs", type=int, default=30, help="pairs of steps per part and number of processes")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure the parts, all of them in one set of processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler logs its start and end
    kinds = (arguments.only,) if arguments.only else KINDS
    shape, pairs = (QUICK, 3) if arguments.quick else (FULL, arguments.pairs)
    parts: dict[str, list[dict[str, Any]]] = {}
    TABLE.print_head()
    for processes in (2,) if arguments.quick else (2, 4):
        planned = [(case, *plan_case(case)) for case in (Case(kind, processes, shape) for kind in kinds)]
        for row in in_ranks(rank_main, processes, planned, pairs):
            parts.setdefault(row["part"], []).append(row)
            print_row(row)
    rows = [row for group in parts.values() for row in group]
    reached = arguments.quick or all(
        row["equal"] and max(row["ratio_95"][1], row["bytes_ratio"]) <= AIM for row in rows
    )
    kept_parts = keep_others(parts, earlier_result(arguments.json).get("parts", {}), KINDS)
    result = {"aim": AIM, "shape": asdict(shape), "parts": kept_parts}
    return Outcome(result, passed=reached and all(row["equal"] for row in rows))


def rank_main(
    rank: int, processes: int, port: int, planned: list[tuple[Case, Any, Any]], pairs: int, queue: Any
) -> None:
    """One rank: counts the memory of both sides alone, then times all cases; rank 0 reports a row for each."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pipefit.run.transfers.comms import CommGroups

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    peaks = [peak_pair(case, model, plan, CommGroups()) for case, model, plan in planned]
    dist.destroy_process_group()
    join_group(rank, processes, port)
    comms, rows = CommGroups(), []
    for (case, model, plan), peak in zip(planned, peaks, strict=True):
        everyone: list[Any] = [None] * processes
        dist.all_gather_object(everyone, peak)
        figures = time_pairs(case, model, plan, comms, pairs)
        rows.append(summarize_case(case, plan, figures, everyone))
        if rank == 0:
            print(f"{case.kind} in {processes} processes: done", file=sys.stderr, flush=True)
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def peak_pair(case: Case, model: Any, plan: Any, comms: Any) -> tuple[int, int]:
    """Return the peak bytes of (our, PyTorch's) third step on this rank."""
    from benchmarks.runtime.peer_torch import TorchSide

    values = first_values(case.shape)
    return (
        peak_bytes(lambda: PipefitSide(case, model, plan, comms, values)),
        peak_bytes(lambda: TorchSide(case, values)),
    )


def peak_bytes(make_side: Callable[[], Any]) -> int:
    """Return the most bytes alive in the third step of a side, of those allocated from its first parameter on."""
    from pipefit.run.stage.memory_audit import AllocationAudit

    gc.collect()
    with AllocationAudit() as audit:
        side = make_side()
        for _ in range(2):
            side.step()
        AllocationAudit.mark_phase("step", side.step)()
    return audit.usage[0].peak_bytes


def time_pairs(case: Case, model: Any, plan: Any, comms: Any, pairs: int) -> dict[str, Any]:
    """Build both sides, compare their results, and time pairs of steps if they are equal."""
    from benchmarks.runtime.peer_context import torch_problem
    from benchmarks.runtime.peer_torch import TorchSide

    problem = {"torch_problem": torch_problem()} if case.kind == "context" else {}
    values = first_values(case.shape)
    ours, theirs = PipefitSide(case, model, plan, comms, values), TorchSide(case, values)
    figures = compare_results(ours, theirs, values) | problem
    seconds: tuple[list[float], list[float]] = ([], [])
    processor_s = [0.0, 0.0]
    for pair in range(pairs if figures["equal"] else 0):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            taken_s, used_s = time_step((ours, theirs)[side].step)
            seconds[side].append(taken_s)
            processor_s[side] += used_s / pairs
    return figures | {"seconds": seconds, "processor_s": processor_s}


def compare_results(ours: Any, theirs: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Take the first steps on both sides; return losses, the largest difference of a change, and the verdict."""
    import torch

    losses = [(float(ours.step()), theirs.mean_loss(theirs.step())) for _ in range(CHECKED_STEPS)]
    own, other = ours.full_parameters(), theirs.full_parameters()
    largest = torch.zeros(1, dtype=torch.float64)
    if own:
        assert own.keys() == other.keys() == values.keys(), own.keys() ^ other.keys()
        largest[0] = max(
            float((own[name] - other[name]).norm() / (other[name] - value).norm()) for name, value in values.items()
        )
    torch.distributed.broadcast(largest, 0)
    difference = float(largest)
    agree = all(abs(a - b) <= LOSS_TOLERANCE * abs(b) for a, b in losses)
    return {"losses": losses, "change_difference": difference, "equal": agree and difference <= CHANGE_TOLERANCE}


def time_step(step: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of the slowest rank of a step that all ranks begin together, and its processor seconds on all
    ranks."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    step()
    taken = torch.tensor([time.perf_counter() - began, time.process_time() - used], dtype=torch.float64)
    everyone = [torch.empty_like(taken) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, taken)
    return max(float(rank[0]) for rank in everyone), sum(float(rank[1]) for rank in everyone)


def summarize_case(case: Case, plan: Any, figures: dict[str, Any], peaks: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the row of a case: its results, the ratio of the times, and the largest ratio of the ranks' peaks."""
    row = {"part": case.kind, "processes": case.processes, "plan": plan.content_hash, **figures}
    ours, theirs = row.pop("seconds")
    if ours:
        row["ratio"], row["ratio_95"] = paired_ratio(theirs, ours)
        row |= {"pairs": len(ours), "ours_s": statistics.median(ours), "torch_s": statistics.median(theirs)}
    row["ours_processor_s"], row["torch_processor_s"] = row.pop("processor_s")
    row["ours_bytes"], row["torch_bytes"] = ([peak[side] for peak in peaks] for side in (0, 1))
    return row | {"bytes_ratio": max(own / other for own, other in peaks)}


def print_row(row: dict[str, Any]) -> None:
    head = row["part"], row["processes"]
    if not row["equal"]:
        print(*head, f"unequal: losses {row['losses']}, changes differ by {row['change_difference']:.2g}", flush=True)
        return
    seconds = (f"{1e3 * row[f'{side}_s']:.1f}" for side in ("ours", "torch"))
    peaks = (f"{max(row[f'{side}_bytes']) / MIB:.2f}" for side in ("ours", "torch"))
    ratios = f"{row['ratio']:.3f}", f"{row['ratio_95'][1]:.3f}"
    TABLE.print_row(*head, row["pairs"], *seconds, *ratios, *peaks, f"{row['bytes_ratio']:.3f}")


if __name__ == "__main__":
    sys.exit(main())
