"""Emulated devices with emulated links: our worker, slowed to the times of a cost table, messages included.

A compute action does its real arithmetic and then sleeps until the emulated device would be done. It begins when its
lane is free and its inputs would have arrived: what an action sends is stamped with that time in shared memory, from
when its port is free (one a lane, messages in order), by the cost table's transfer times. The messages themselves
cross the loopback interface and are far smaller. All times are the table's, times `scale`.
"""

from __future__ import annotations

import time
from collections.abc import MutableSequence
from typing import Any

import numpy as np

from pipefit.cost.types import CostTable
from pipefit.schedule.actions import Action


def stamps(costs: CostTable, microbatches: int) -> int:
    """How many stamps the messages of a step need."""
    return 2 * len(costs.edges) * microbatches


class LinkedPace:
    """The emulated device of one rank under one plan; whole sequences only. `late` counts actions whose arithmetic
    alone took longer than they may."""

    def __init__(
        self,
        costs: CostTable,
        placement: tuple[int, ...],
        microbatches: int,
        board: MutableSequence[float],
        scale: float,
    ) -> None:
        self.costs, self.placement, self.microbatches, self.board, self.scale = (
            costs, placement, microbatches, board, scale,
        )  # fmt: skip
        self.crossing = [
            (index, edge) for index, edge in enumerate(costs.edges) if placement[edge.source] != placement[edge.target]
        ]
        self.port_free = 0.0
        self.actions = self.late = 0

    def attach(self, worker: Any) -> None:
        """Pace a worker of ours."""

        def pace(action: Action, seconds: float) -> None:
            began = time.perf_counter() - seconds
            if action.kind in ("F", "I", "W", "B"):
                self._compute(action, began)
            elif action.kind == "STEP":
                self._sleep_until(began + self.scale * float(self.costs.step_s[worker.lane]))

        worker.pace = pace

    def _compute(self, action: Action, began: float) -> None:
        cost = self.costs.actions[action.kind].cost_of(action.stage, action.microbatch, action.slice)
        start = began
        forward = action.kind == "F"
        if action.kind != "W":
            for index, edge in self.crossing:
                if (edge.target if forward else edge.source) == action.stage:
                    start = max(start, self.board[self._place(index, forward, action.microbatch)])
        stop = start + self.scale * (cost.time_s + self.costs.overhead_s)
        self._sleep_until(stop)
        if action.kind != "W":
            self._send(action, forward, max(stop, time.perf_counter()))

    def _send(self, action: Action, forward: bool, now: float) -> None:
        for index, edge in self.crossing:
            if (edge.source if forward else edge.target) != action.stage:
                continue
            port, whole = (edge.forward_port_s, edge.forward_s) if forward else (edge.backward_port_s, edge.backward_s)
            begin = max(now, self.port_free)
            self.port_free = begin + self.scale * _entry(port, action.microbatch)
            arrival = begin + self.scale * _entry(whole, action.microbatch)
            self.board[self._place(index, forward, action.microbatch)] = arrival

    def _place(self, edge: int, forward: bool, microbatch: int) -> int:
        return (2 * edge + forward) * self.microbatches + microbatch

    def _sleep_until(self, moment: float) -> None:
        left = moment - time.perf_counter()
        self.actions += 1
        if left > 0:
            time.sleep(left)
        else:
            self.late += 1


def _entry(table: Any, microbatch: int) -> float:
    return float(np.asarray(table)[min(microbatch, len(table) - 1), 0])
