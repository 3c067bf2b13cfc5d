"""Where PyTorch's own lowering places receives, and what that costs: `benchmarks/runtime/stock_order.py` against the
simulator, against lanes worked out by hand, and PyTorch's order against ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.processes.paced import Times
from benchmarks.runtime.stock_order import posted_beforehand, replay, stock_lanes
from pipefit.schedule import FAMILIES, ScheduleProblem
from pipefit.schedule.actions import Action, Schedule, parse_lanes
from pipefit.schedule.lowering.lower import lower_schedule
from pipefit.simulate import simulate_schedule

ROOT = Path(__file__).parents[3]
DEVICES, MICROBATCHES = 4, 8


def problem(name: str, seed: int) -> tuple[Schedule, Times]:
    """A family's schedule, and uneven times for its stages."""
    family = FAMILIES[name]
    placement = family.placement(DEVICES)
    forward, backward, weight = np.random.default_rng(seed).lognormal(0.0, 0.3, (3, len(placement)))
    times = Times(tuple(forward), tuple(backward), tuple(weight))
    return family(ScheduleProblem(placement=placement, microbatches=MICROBATCHES)), times


def ours(schedule: Schedule, times: Times, transfer_s: float) -> Schedule:
    return lower_schedule(schedule, costs=times.costs(schedule.placement, transfer_s), reductions=(), optimizer=False)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_replay_agrees_with_the_simulator(name: str) -> None:
    """Free transfers: the same time. Others: no less than without ports, no more than with one port for all peers."""
    from dataclasses import replace

    schedule, times = problem(name, seed=1)
    for transfer_s in (0.0, 0.2, 0.7):
        lowered = ours(schedule, times, transfer_s)
        costs = times.costs(schedule.placement, transfer_s)
        free = tuple(
            replace(edge, forward_port_s=0 * edge.forward_port_s, backward_port_s=0 * edge.backward_port_s)
            for edge in costs.edges
        )
        least = simulate_schedule(lowered, replace(costs, edges=free)).compute_end_s
        most = simulate_schedule(lowered, costs).compute_end_s
        found = replay(lowered.lanes, schedule.placement, times, transfer_s, "directed").makespan_s
        assert least * (1 - 1e-12) <= found <= most * (1 + 1e-12)
        if transfer_s == 0:
            assert found == pytest.approx(most, rel=1e-12)


UNIT = Times((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))


def lanes(*lines: str) -> tuple[tuple[Action, ...], ...]:
    return parse_lanes(lines)


def test_a_pending_receive_holds_up_what_is_posted_behind_it() -> None:
    """By hand, transfers of half a second. Microbatch 1 leaves lane 0 at 2.0 and is wanted at 4.5; lane 0 has posted
    the receive of a gradient before, which comes from 4.5 to 5.0. Apart: 1F1 runs from 5.0, 1B1 to 8.0, 0B1 from 8.5
    to 10.5. On one stream microbatch 1 moves after the gradient, from 5.0: all later by 0.5."""
    order = lanes(
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    assert replay(order, (0, 1), UNIT, 0.5, "directed").makespan_s == 10.5
    assert replay(order, (0, 1), UNIT, 0.5, "pair").makespan_s == 11.0


def test_one_stream_for_both_directions_can_hang_where_two_do_not() -> None:
    order = lanes(
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    )
    assert replay(order, (0, 1), UNIT, 0.5, "directed").makespan_s == 10.0
    found = replay(order, (0, 1), UNIT, 0.5, "pair")
    assert found.makespan_s == float("inf")
    assert found.problem == "hangs: lane 0 at 0B0, lane 1 at 1F1"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_our_lowering_is_never_slower_than_pytorchs(name: str) -> None:
    pytest.importorskip("torch.distributed.pipelining.schedules")
    for seed in range(4):
        schedule, times = problem(name, seed)
        theirs = stock_lanes(schedule)
        for transfer_s in (0.15, 0.5):
            own = ours(schedule, times, transfer_s).lanes
            compute = [[action for action in lane if "_" not in action.kind] for lane in theirs]
            assert compute == [list(lane) for lane in schedule.lanes]
            apart, together = (replay(own, schedule.placement, times, transfer_s, s) for s in ("directed", "pair"))
            gloo, nccl = (replay(theirs, schedule.placement, times, transfer_s, s) for s in ("directed", "pair"))
            assert not (apart.problem or gloo.problem or nccl.problem)
            assert apart.makespan_s <= gloo.makespan_s * (1 + 1e-12) <= nccl.makespan_s * (1 + 2e-12)
            assert apart.makespan_s <= together.makespan_s
            beforehand = posted_beforehand(own, schedule.placement)
            least = replay(beforehand, schedule.placement, times, transfer_s, "directed").makespan_s
            assert least * (1 - 1e-12) <= apart.makespan_s <= 1.002 * least


def test_pytorchs_greedy_receives_cost_time_where_stages_are_uneven() -> None:
    """Transfers as long as a forward, NCCL's rule: the loss that users report (pytorch#172668)."""
    pytest.importorskip("torch.distributed.pipelining.schedules")
    ratios = {}
    for name in ("interleaved-1f1b", "v-half", "zb-v"):
        logs = []
        for seed in range(4):
            schedule, times = problem(name, seed)
            own, theirs = ours(schedule, times, 1.0).lanes, stock_lanes(schedule)
            both = (
                replay(theirs, schedule.placement, times, 1.0, "pair"),
                replay(own, schedule.placement, times, 1.0, "directed"),
            )
            logs.append(np.log(both[0].makespan_s / both[1].makespan_s))
        ratios[name] = float(np.exp(np.mean(logs)))
    assert min(ratios.values()) > 1.03, ratios


@pytest.mark.parametrize("name", ["v-half", "zb-v", "dualpipe-v"])
def test_deferred_receives_are_found_to_take_the_wrong_message(name: str) -> None:
    """`defer_pp_recv` reorders the receives of a V without the sends: untagged transports then mix up tensors."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, "_defer_recv_ops"):
        pytest.skip("this torch does not defer receives")
    schedule, times = problem(name, seed=0)
    deferred = stock_lanes(schedule, defer_receives=True)
    assert "order: lane" in replay(deferred, schedule.placement, times, 0.1, "directed").problem
    plain, plain_times = problem("1f1b", seed=0)
    kept = stock_lanes(plain, defer_receives=True)
    assert replay(kept, plain.placement, plain_times, 0.1, "directed").problem == ""


def test_quick_survey(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.pipelining.schedules")
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.runtime.receive_orders", "--quick", "--json", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 21 and all(row["gloo"]["mean"] <= row["nccl"]["mean"] + 1e-12 for row in rows)


def test_the_committed_results_are_no_slower_anywhere() -> None:
    for case in json.loads((ROOT / "benchmarks" / "results" / "schedule_throughput.json").read_text())["cases"]:
        assert case["gradients_agree"] and case["ratio_95"][1] >= 1.0


@pytest.mark.slow
@pytest.mark.gloo
def test_quick_benchmark(tmp_path: Path) -> None:
    """Both sides do the same work and are timed; with root over shaped links, else over the loopback interface."""
    pytest.importorskip("torch.distributed.pipelining.schedules")
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.runtime.throughput", "--quick", "--json", out],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert [case["schedule"] for case in result["cases"]] == ["1f1b", "zb-v"]
    for case in result["cases"]:
        assert case["gradients_agree"] and case["pairs"] == 3
        assert case["ratio"] > 0.8 and min(case["step_ms"].values()) >= 0.99 * case["expected_step_ms"]
        assert all(0 < share < 1 for share in case["idle_share"].values())
    assert ("not shaped" in result["links"]) == ("links are not shaped" in done.stdout)
    assert str(tmp_path) not in out.read_text()
