"""Our runtime against torch.distributed.pipelining: the same schedule, paced devices, links that take time.

Four or eight processes, each behind the shaped link of a lab host (`processes/shaped.py`), emulate as many devices: an
action does its small real arithmetic and then waits until the emulated device would be done (`processes/paced.py`), so
two cores are enough. Stages are uneven: the last chunk takes 1.5x, or all are lognormal (sigma 0.3). Both sides run the
same compute actions in the same order over gloo, a step of each in turn, first one and then the other ahead; their
gradients must agree. PyTorch runs each schedule from our CSV (`_PipelineScheduleRuntime`), GPipe and 1F1B with its
own classes besides.

A ratio is PyTorch's step time over ours, so above 1 we are faster; each step time is the slowest rank's. Beside the
measured ratio stand those that the two orders alone make expect (`stock_order.replay`): by gloo's rules, and by NCCL's
as PyTorch uses it, where a receive that is posted too soon holds up what is posted behind it. Where links cannot be
shaped (no root), messages cross the loopback interface, transfers cost next to nothing, and the result says so.

    python -m benchmarks.runtime.throughput [--quick] [--json PATH]
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from benchmarks.processes.paced import Pace, be_punctual, uneven_times
from benchmarks.processes.ratios import paired_ratio
from benchmarks.processes.shaped import Host, cannot_shape, loopback_hosts, shaped_hosts
from benchmarks.runtime.sides import MESSAGE_BYTES, Ours, Stock, computed, make_plan, our_lowering
from benchmarks.runtime.stock_order import own_actions, replay, stock_lanes

CHUNK_FORWARD_S = 0.008
SHARES = (0.15, 0.5, 1.0)
"""A transfer's time over the forward of one chunk. There are two chunks, and two microbatches, a device."""
UNEVEN = ("last", "lognormal-0", "lognormal-1")


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison."""

    schedule: str
    uneven: str
    own_class: str = ""
    "PyTorch's class that runs it; empty: its CSV runtime."


OWN_CLASSES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
GREEDY = ("interleaved-1f1b", "v-min", "v-half", "zb-v", "dualpipe-v")
"""Several stages a device: PyTorch runs them by its lowering, which places receives greedily."""

TABLE = TextTable(
    ("schedule", "<18"), ("run by", "<14"), ("devices", "<8"), ("stages", "<12"), ("transfer", ">9"), ("ours ms", ">9"),
    ("torch ms", ">9"), ("idle", ">13"), ("ratio", ">8"), ("95 %", ">13"), ("gloo", ">8"), ("NCCL", ">7"),
)  # fmt: skip


def main() -> int:
    parser = benchmark_parser(__doc__, quick="two schedules, three short pairs each")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of steps per comparison")
    parser.add_argument("--rank", type=int, help=SUPPRESS)
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure all schedules, or be one of the ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.rank is not None:
        rank_main(arguments.rank, json.loads(sys.stdin.read()))
        return Outcome()
    reason = cannot_shape()
    print_head(reason)
    results = []
    shares = (0.0,) if reason else SHARES[:1] if arguments.quick else SHARES
    rounds = [(4, share, cases(arguments.quick)) for share in shares]
    if not arguments.quick and not reason:
        rounds.append((8, 0.5, [Case(name, uneven) for uneven in UNEVEN[:2] for name in ("1f1b", *GREEDY)]))
    for devices, share, todo in rounds:
        for result in measure(devices, share, todo, 3 if arguments.quick else arguments.pairs):
            results.append(result)
            print_row(result)
    slower = [case for case in results if case["ratio_95"][1] < 1.0 and not arguments.quick]
    return Outcome(
        {
            "links": f"not shaped: {reason}" if reason else "network namespaces of pipefit.lab",
            "chunk_forward_ms": 1e3 * CHUNK_FORWARD_S,
            "message_bytes": MESSAGE_BYTES,
            "cases": results,
        },
        passed=all(case["gradients_agree"] for case in results) and not slower,
    )


def cases(quick: bool) -> list[Case]:
    """All comparisons; the quick ones: one of PyTorch's classes, and one CSV."""
    if quick:
        return [Case("1f1b", "last", "Schedule1F1B"), Case("zb-v", "lognormal-0")]
    found = []
    for uneven in UNEVEN:
        found += [Case(name, uneven, own_class) for name, own_class in OWN_CLASSES.items()]
        found += [Case(name, uneven) for name in (*OWN_CLASSES, *GREEDY)]
    return found


def measure(devices: int, share: float, todo: list[Case], pairs: int) -> Iterator[dict[str, Any]]:
    """All cases at one transfer time (0: links as they are), in one set of processes."""
    transfer_s = share * CHUNK_FORWARD_S
    links = shaped_hosts(devices, MESSAGE_BYTES / transfer_s) if share else loopback_hosts(devices)
    with links as hosts, _processes(hosts, transfer_s, todo, pairs) as lines:
        for case, line in zip(todo, lines, strict=True):
            yield summary(case, devices, share, json.loads(line))


@contextmanager
def _processes(hosts: list[Host], transfer_s: float, todo: list[Case], pairs: int) -> Iterator[Iterator[str]]:
    """The lines that the last rank prints, one a case; no process outlives the block."""
    port = 29500 if hosts[0].prefix else _free_port()
    ranks: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            for rank, host in enumerate(hosts):
                command = [*host.prefix, sys.executable, "-m", "benchmarks.runtime.throughput", "--rank", str(rank)]
                setting = {
                    "devices": len(hosts), "master": hosts[0].address, "port": port, "interface": host.interface,
                    "transfer_s": transfer_s, "pairs": pairs, "cases": [asdict(case) for case in todo],
                }  # fmt: skip
                ranks.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
                )
                ranks[-1].stdin.write(json.dumps(setting))  # type: ignore[union-attr]
                ranks[-1].stdin.close()  # type: ignore[union-attr]
            yield iter(ranks[0].stdout)  # type: ignore[arg-type]
            for process in ranks:
                process.wait(60)
        except ValueError:
            errors.seek(0)
            raise RuntimeError(f"a rank ended early:\n{errors.read()[-4000:]}") from None
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_main(rank: int, setting: dict[str, Any]) -> None:
    """One rank: every case in turn; rank 0 prints what came of it, a line of JSON each."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from pipefit.run.transfers.comms import CommGroups

    torch.set_num_threads(1)
    punctual = be_punctual()
    os.environ["GLOO_SOCKET_IFNAME"] = setting["interface"]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{setting['master']}:{setting['port']}",
        rank=rank,
        world_size=setting["devices"],
        timeout=timedelta(seconds=120),
    )
    comms = CommGroups()
    transfer_s = measured_transfer_s(rank)
    for case in setting["cases"]:
        found = compare(rank, Case(**case), setting["transfer_s"], setting["pairs"], comms)
        if rank == 0:
            print(json.dumps({**found, "transfer_measured_s": transfer_s, "real_time": punctual}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measured_transfer_s(rank: int) -> float:
    """Seconds of one message from rank 0 to 1 (and a short answer): the median of 20."""
    import torch
    import torch.distributed as dist

    data, answer, times = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8), torch.zeros(1), []
    for _ in range(20):
        dist.barrier()
        begin = time.perf_counter()
        if rank == 0:
            dist.send(data, 1)
            dist.recv(answer, 1)
        elif rank == 1:
            dist.recv(data, 0)
            dist.send(answer, 0)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def compare(rank: int, case: Case, transfer_s: float, pairs: int, comms: Any) -> dict[str, Any]:
    """Both sides of a case: step times of the slowest rank by pair, and whether they did the same work."""
    import torch.distributed as dist

    chunks = 2 * dist.get_world_size()
    schedule = computed(case.schedule, dist.get_world_size(), chunks)
    times = uneven_times(case.uneven, chunks, schedule.num_stages, CHUNK_FORWARD_S)
    paces = (Pace(times), Pace(times))
    ours = Ours(make_plan(schedule, chunks, times, transfer_s), chunks, comms, paces[0])
    stock = Stock(schedule, chunks, rank, ours.parameters(), paces[1], case.own_class)
    if not case.own_class:
        executed = stock.runtime.pipeline_order_with_comms
        assert [own_actions(executed[lane]) for lane in sorted(executed)] == stock_lanes(schedule)
    steps = (ours.step, stock.step)
    seconds: tuple[list[float], list[float]] = ([], [])
    losses = [timed(step)[1] for _ in range(2) for step in steps][2:]
    agree = all_true(math.isclose(*losses, rel_tol=1e-9) and _equal(ours.gradients(), stock.gradients()))
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds[side].append(timed(steps[side])[0])
    dist.barrier()
    late = [total(pace.late) / total(pace.actions) for pace in paces]
    return {"seconds": seconds, "gradients_agree": agree, "late": late}


def timed(step: Any) -> tuple[float, float]:
    """(seconds of the slowest rank, the loss) of a step that all ranks begin together."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    loss = step()
    taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken), total(loss)


def total(value: float) -> float:
    """The sum over the ranks."""
    import torch
    import torch.distributed as dist

    summed = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(summed)
    return float(summed)


def all_true(value: bool) -> bool:
    """Whether it is true on every rank."""
    return total(float(not value)) == 0


def _equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether all gradients agree to 1e-10 of the largest entry of each."""
    return ours.keys() == theirs.keys() and all(
        bool((ours[name] - gradient).abs().max() <= 1e-10 * gradient.abs().max()) and bool(gradient.abs().max() > 0)
        for name, gradient in theirs.items()
    )


def summary(case: Case, devices: int, share: float, found: dict[str, Any]) -> dict[str, Any]:
    """The figures of a case."""
    ours, theirs = found["seconds"]
    ratio, ratio_95 = paired_ratio(ours, theirs)
    expected = expect(case, devices, share)
    medians = {"ours": statistics.median(ours), "torch": statistics.median(theirs)}
    return {
        **asdict(case),
        "devices": devices,
        "transfer_share": share,
        "transfer_measured_share": found["transfer_measured_s"] / CHUNK_FORWARD_S,
        "pairs": len(ours),
        "real_time": found["real_time"],
        "step_ms": {side: 1e3 * value for side, value in medians.items()},
        "idle_share": {side: 1 - expected["work_s"] / value for side, value in medians.items()},
        "late_share": dict(zip(("ours", "torch"), found["late"], strict=True)),
        "ratio": ratio,
        "ratio_95": ratio_95,
        "expected_step_ms": expected["step_ms"],
        "expected_ratio": {rule: expected[rule] for rule in ("gloo", "nccl")},
        "gradients_agree": found["gradients_agree"],
    }


def expect(case: Case, devices: int, share: float) -> dict[str, float]:
    """Mean work of a device in seconds; our step, and the ratios that the two orders alone make expect by gloo's and
    by NCCL's rules. PyTorch's own classes have no lowered order: theirs is taken to be that of the CSV."""
    schedule = computed(case.schedule, devices, 2 * devices)
    times = uneven_times(case.uneven, 2 * devices, schedule.num_stages, CHUNK_FORWARD_S)
    transfer_s = share * CHUNK_FORWARD_S
    ours, stock = our_lowering(schedule, times, transfer_s).lanes, stock_lanes(schedule)
    step_s = replay(ours, schedule.placement, times, transfer_s, "directed").makespan_s
    work = sum(times.of(action.kind, action.stage) for lane in schedule.lanes for action in lane)
    return {
        "work_s": work / devices,
        "step_ms": 1e3 * step_s,
        "gloo": replay(stock, schedule.placement, times, transfer_s, "directed").makespan_s / step_s,
        "nccl": replay(stock, schedule.placement, times, transfer_s, "pair").makespan_s / step_s,
    }


def print_head(reason: str) -> None:
    if reason:
        print(f"links are not shaped ({reason}): transfers cost next to nothing here")
    print("PyTorch's step time over ours: above 1 we are faster; expected from the two orders alone beside it")
    TABLE.print_head()


def print_row(case: dict[str, Any]) -> None:
    step, idle, expected = case["step_ms"], case["idle_share"], case["expected_ratio"]
    low, high = case["ratio_95"]
    TABLE.print_row(
        case["schedule"], case["own_class"] or "CSV", case["devices"], case["uneven"],
        f"{case['transfer_share']:.2f}", f"{step['ours']:.1f}", f"{step['torch']:.1f}",
        f"{idle['ours']:.1%} {idle['torch']:.1%}", f"{case['ratio']:.3f}", f"{low:.3f}-{high:.3f}",
        f"{expected['gloo']:.3f}", f"{expected['nccl']:.3f}",
        note="" if case["gradients_agree"] else "  GRADIENTS DIFFER",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
