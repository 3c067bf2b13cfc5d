"""Devices that take the time they are told to: every compute action does its arithmetic, then sleeps until it is over.

The same times hold for both runtimes, by kind of action and stage, whatever a runtime does in it (PyTorch's first
stage, for instance, does nothing in I and the whole backward in W). An action begins when its inputs have arrived.
What a runtime does between actions (posting messages, its own bookkeeping) is not paced: it is what is measured.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipefit.cost.types import CostTable
from pipefit.schedule.actions import Action
from pipefit.schedule.problem import uniform_costs


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of an action on the emulated devices, by stage; B takes those of I and W."""

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]

    def of(self, kind: str, stage: int) -> float:
        """Of one compute action."""
        if kind == "B":
            return self.input_s[stage] + self.weight_s[stage]
        return {"F": self.forward_s, "I": self.input_s, "W": self.weight_s}[kind][stage]

    def costs(self, placement: tuple[int, ...], transfer_s: float) -> CostTable:
        """The table that schedules are lowered by, every transfer keeping its port busy for `transfer_s`."""
        return uniform_costs(
            placement,
            forward_s=self.forward_s,
            input_s=self.input_s,
            weight_s=self.weight_s,
            transfer_s=transfer_s,
            port_s=transfer_s,
        )


def uneven_times(kind: str, chunks: int, stages: int, chunk_forward_s: float) -> Times:
    """Times of `stages` stages of a model of `chunks` chunks, F : I : W = 28 : 28 : 20 (the 14.6B model's in the
    zero-bubble paper, arXiv 2401.10241). `last`: the last chunk takes 1.5x; `lognormal-SEED`: sigma 0.3."""
    name, _, seed = kind.partition("-")
    scale = np.ones(chunks)
    if name == "lognormal":
        scale = np.exp(np.random.default_rng(int(seed)).normal(0.0, 0.3, chunks))
    else:
        scale[-1] = 1.5
    whole = scale.reshape(stages, -1).sum(1) * chunk_forward_s
    forward, weight = tuple(map(float, whole)), tuple(map(float, whole * 20 / 28))
    return Times(forward, forward, weight)


class Pace:
    """The emulated device of one rank. `late` counts actions whose arithmetic alone took longer than they may."""

    def __init__(self, times: Times) -> None:
        self.times, self.actions, self.late = times, 0, 0

    def finish(self, begin: float, kind: str, stage: int) -> None:
        """Sleep until the action that began then (`time.perf_counter`) is over."""
        left = begin + self.times.of(kind, stage) - time.perf_counter()
        self.actions += 1
        if left > 0:
            time.sleep(left)
        else:
            self.late += 1

    def ours(self, worker: Any) -> None:
        """Pace a worker of ours."""

        def pace(action: Action, seconds: float) -> None:
            if action.kind in ("F", "I", "W", "B"):
                self.finish(time.perf_counter() - seconds, action.kind, action.stage)

        worker.pace = pace

    def stock(self, schedule: Any, stages: list[Any]) -> None:
        """Pace the stages of a schedule of PyTorch's. The loss belongs to the last stage's F, as it does in ours."""
        for stage in stages:
            self._stock_stage(schedule, stage)

    def _stock_stage(self, schedule: Any, stage: Any) -> None:
        number, last = stage.stage_index, stage.is_last
        forward, backward, weight = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk
        began = 0.0

        def paced_forward(*arguments: Any, **keywords: Any) -> Any:
            nonlocal began
            began = time.perf_counter()
            result = forward(*arguments, **keywords)
            if not last:
                self.finish(began, "F", number)
            return result

        def paced_backward(*arguments: Any, full_backward: bool = True, **keywords: Any) -> None:
            begin = time.perf_counter()
            backward(*arguments, full_backward=full_backward, **keywords)
            self.finish(begin, "B" if full_backward else "I", number)

        def paced_weight(*arguments: Any, **keywords: Any) -> None:
            begin = time.perf_counter()
            weight(*arguments, **keywords)
            self.finish(begin, "W", number)

        stage.forward_one_chunk, stage.backward_one_chunk = paced_forward, paced_backward
        stage.backward_weight_one_chunk = paced_weight
        if last:
            self._stock_loss(schedule, number, lambda: began)

    def _stock_loss(self, schedule: Any, last: int, began: Callable[[], float]) -> None:
        make_loss = schedule._maybe_compute_loss

        def paced_loss(stage: Any, *arguments: Any) -> None:
            make_loss(stage, *arguments)
            if stage.stage_index == last:
                self.finish(began(), "F", last)

        schedule._maybe_compute_loss = paced_loss


def be_punctual() -> bool:
    """Let sleeps of this process end when they are due, also beside other work; whether it got a real-time priority.

    Timers are not rounded up (Linux adds 50 us), and, where the user may, the process and the threads that it starts
    later go before others.
    """
    pr_set_timerslack = 29
    ctypes.CDLL(None).prctl(pr_set_timerslack, ctypes.c_ulong(1000))
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True
