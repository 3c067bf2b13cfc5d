"""An oracle for shared ports: devices as processes that walk their actions, and rates by bisection. No task graph."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from pipefit.cost.types import CostTable, PortContention, PortFlow
from pipefit.schedule.actions import Action, Schedule
from pipefit.schedule.check.deadlock import message_name

NEVER = float("inf")


class FluidSimulator:
    """One iteration of a lowered schedule whose pipelines share ports. `stops[pipeline, lane][step]` when it is run."""

    def __init__(self, schedule: Schedule, costs: CostTable) -> None:
        assert costs.contention is not None
        self.schedule, self.costs, self.shared = schedule, costs, costs.contention
        self.count = len(self.shared.pipelines)
        self.place = {(k, lane): 0 for k in range(self.count) for lane in range(len(schedule.lanes))}
        self.free = dict.fromkeys(self.place, 0.0)
        "NEVER while an action with collectives of its own runs."
        self.stops: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self.posted: dict[Any, float] = {}
        self.sent: dict[Any, float] = {}
        self.arrived: dict[Any, float] = {}
        self.joined: dict[Any, dict[int, float]] = defaultdict(dict)
        self.beside = dict.fromkeys(range(len(schedule.lanes)), 0.0)
        "Of each lane, when its last reduction is over; NEVER while it runs."
        self.together = {
            lane: [step for step, action in enumerate(actions) if action.kind in ("REDUCE", "GATHER")]
            for lane, actions in enumerate(schedule.lanes)
        }
        "Of each lane, its reductions and gathers that have not begun: they run beside the devices, in order."
        self.moving: dict[Any, dict[str, Any]] = {}
        self.lines: dict[int, list[Any]] = defaultdict(list)
        self.waiting: list[tuple[float, Any, Any, PortFlow, float, float]] = []
        self.order = {
            message_name(action): (lane, step)
            for lane, actions in enumerate(schedule.lanes)
            for step, action in enumerate(actions)
            if action.kind.startswith("SEND")
        }
        "Where every SEND stands: of transfers that are ready at one moment, the first of these goes first."
        self.now = 0.0

    def run(self) -> float:
        """The makespan."""
        while True:
            while self._walk() or self._join():
                pass
            self._rates()
            ends = [(self.now + one["left"] / one["rate"], str(key), key) for key, one in self.moving.items()]
            begins = [(max(self.now, entry[0]), str(entry[1]), entry) for entry in self.waiting]
            if not ends and not begins:
                break
            moment = min([*(end[0] for end in ends), *(begin[0] for begin in begins)])
            for one in self.moving.values():
                one["left"] -= (moment - self.now) * one["rate"]
            self.now = moment
            for end, _, key in ends:
                if end <= moment:
                    self._end(key)
            for begin, _, entry in sorted(begins, key=lambda each: (each[0], each[2][2])):
                if begin <= moment:
                    self.waiting.remove(entry)
                    self._begin(*entry)
        assert all(self.place[k, lane] == len(self.schedule.lanes[lane]) for k, lane in self.place)
        return max(max(each.values(), default=0.0) for each in self.stops.values())

    def _walk(self) -> bool:
        """Let every device go on as far as it can; whether any did."""
        moved = False
        for k, lane in list(self.place):
            step = self.place[k, lane]
            if step == len(self.schedule.lanes[lane]) or self.free[k, lane] == NEVER:
                continue
            action = self.schedule.lanes[lane][step]
            begin = self._ready(k, lane, step, action)
            if begin == NEVER:
                continue
            moved = True
            self.place[k, lane] += 1
            flow = self.shared.flows.get((action.kind, action.stage, action.slice, k))
            if action.kind in ("F", "I", "W", "B") and flow is not None:
                self.free[k, lane] = NEVER
                at = ("runs", k, lane, step)
                self.waiting.append((begin, at, (lane, step, k), flow, self._seconds(k, lane, action), 0.0))
                continue
            stop = begin + self._seconds(k, lane, action)
            self.stops[k, lane][step] = stop
            if not action.kind.startswith(("SEND", "RECV")) and action.kind not in ("REDUCE", "GATHER"):
                self.free[k, lane] = stop
        return moved

    def _ready(self, k: int, lane: int, step: int, action: Action) -> float:
        free = self.free[k, lane]
        if action.kind.startswith("RECV"):
            self.posted[k, message_name(action)] = free
            self._try(k, action)
            return free
        if action.kind.startswith("SEND"):
            self.sent[k, message_name(action)] = free
            self._try(k, action)
            return free
        if action.kind in ("REDUCE", "GATHER"):
            self.joined[lane, step][k] = free
            return free
        if action.kind in ("F", "I", "B"):
            needs = [
                (k, message_name(other))
                for other in self.schedule.lanes[lane]
                if other.kind == ("RECV_F" if action.kind == "F" else "RECV_B")
                and (other.stage, other.microbatch, other.slice) == (action.stage, action.microbatch, action.slice)
            ]
            if any(need not in self.arrived for need in needs):
                return NEVER
            return max([free, *(self.arrived[need] for need in needs)])
        if action.kind == "NORM":
            self.joined["norm"][(k, lane)] = free  # type: ignore[index]
            if len(self.joined["norm"]) < len(self.place) or NEVER in self.before.values():
                return NEVER
            return max([*self.joined["norm"].values(), *self.before.values()])
        return max(free, self.before[lane]) if action.kind == "STEP" else free

    @property
    def before(self) -> dict[int, float]:
        """Of each lane, when its reductions are over, NEVER while one is left."""
        kinds = {
            lane: {self.schedule.lanes[lane][step].kind for step in steps} for lane, steps in self.together.items()
        }
        return {lane: NEVER if "REDUCE" in kinds[lane] else at for lane, at in self.beside.items()}

    def _join(self) -> bool:
        """Begin the next reduction or gather of a lane for which all its devices are there; whether any began."""
        for lane, steps in self.together.items():
            if steps and self.beside[lane] != NEVER and len(self.joined[lane, steps[0]]) == self.count:
                step = steps.pop(0)
                at = max(self.beside[lane], *self.joined[lane, step].values())
                self._together(lane, step, self.schedule.lanes[lane][step], at)
                return True
        return False

    def _seconds(self, k: int, lane: int, action: Action) -> float:
        table = self.shared.pipelines[k]
        if action.kind in table.actions:
            cost = table.actions[action.kind].cost_of(action.stage, action.microbatch, action.slice)
            return cost.time_s + table.overhead_s
        return float(self.costs.step_s[lane]) if action.kind == "STEP" else 0.0

    def _try(self, k: int, action: Action) -> None:
        """Once a message is sent and its receive is posted, it goes."""
        key = (k, message_name(action))
        if key not in self.sent or key not in self.posted:
            return
        forward = action.kind.endswith("F")
        ends = (action.stage, action.peer) if action.kind in ("SEND_F", "RECV_B") else (action.peer, action.stage)
        table = self.shared.pipelines[k]
        index = next(i for i, e in enumerate(table.edges) if (e.source, e.target, e.tensor) == (*ends, action.what))
        edge = table.edges[index]
        arrays = (edge.forward_port_s, edge.forward_s) if forward else (edge.backward_port_s, edge.backward_s)
        shape = (self.schedule.microbatches, self.schedule.slices)
        port_s, whole_s = (float(np.broadcast_to(a, shape)[action.microbatch, action.slice]) for a in arrays)
        flow = self.shared.flows.get(("SEND_F" if forward else "SEND_B", index, action.slice, k), PortFlow((), (), 1.0))
        at = max(self.sent[key], self.posted[key])
        self.waiting.append((at, key, (*self.order[message_name(action)], k), flow, port_s, whole_s - port_s))

    def _together(self, lane: int, step: int, action: Action, begin: float) -> None:
        seconds = self.costs.reduce_s if action.kind == "REDUCE" else self.costs.gather_s
        flow = self.shared.flows.get((action.kind, action.stage, 0, 0), PortFlow((), (), 1.0))
        if action.what:
            self.beside[lane] = begin
            return
        self.beside[lane] = NEVER
        self.waiting.append((begin, ("lane", lane, step), (lane, step, 0), flow, float(seconds[action.stage]), 0.0))

    def _begin(self, at: float, key: Any, order: Any, flow: PortFlow, seconds: float, latency_s: float) -> None:
        line = self.lines[flow.queue] if flow.queue >= 0 else []
        line.append((key, flow, seconds, latency_s))
        if len(line) == 1:
            self._go(*line[0])

    def _go(self, key: Any, flow: PortFlow, seconds: float, latency_s: float) -> None:
        self.moving[key] = {"flow": flow, "left": seconds, "rate": 1.0, "latency_s": latency_s}

    def _end(self, key: Any) -> None:
        one = self.moving.pop(key)
        if key[0] == "lane":
            self.beside[key[1]] = self.now
            for k in range(self.count):
                self.stops[k, key[1]][key[2]] = self.now
        elif key[0] == "runs":
            _, k, lane, step = key
            self.stops[k, lane][step] = self.free[k, lane] = self.now
        else:
            self.arrived[key] = self.now + one["latency_s"]
            self.stops["arrivals", 0][len(self.arrived)] = self.arrived[key]  # type: ignore[index]
        line = self.lines[one["flow"].queue] if one["flow"].queue >= 0 else []
        if line:
            line.pop(0)
            if line:
                self._go(*line[0])

    def _rates(self) -> None:
        """Max-min fair bytes a second: the level that all can rise to is found by bisection; who cannot rise beyond it
        is settled, and the others go on."""
        open_ones = dict(self.moving)
        settled: dict[Any, float] = {}

        def feasible(level: float) -> bool:
            asked: dict[int, float] = defaultdict(float)
            for key, one in self.moving.items():
                flow = one["flow"]
                rate = settled.get(key, min(1.0, level / flow.bytes_per_s))
                for port, use in zip(flow.ports, flow.use, strict=True):
                    asked[port] += use * rate
            return all(value <= 1.0 + 1e-12 for value in asked.values())

        while open_ones:
            high = max(one["flow"].bytes_per_s for one in open_ones.values())
            low = 0.0
            if feasible(high):
                low = high
            else:
                for _ in range(100):
                    middle = (low + high) / 2
                    low, high = (middle, high) if feasible(middle) else (low, middle)
            for key, one in list(open_ones.items()):
                rate = min(1.0, low / one["flow"].bytes_per_s)
                settled[key] = rate
                others = {other: value for other, value in settled.items() if other != key}
                full = rate >= 1.0 or not self._may_rise(key, low, others, open_ones)
                if full:
                    del open_ones[key]
                del settled[key]
                if full:
                    settled[key] = rate
        for key, rate in settled.items():
            self.moving[key]["rate"] = rate

    def _may_rise(self, key: Any, level: float, settled: dict[Any, float], open_ones: dict[Any, Any]) -> bool:
        asked: dict[int, float] = defaultdict(float)
        for other, one in self.moving.items():
            flow = one["flow"]
            rate = settled.get(other, min(1.0, level / flow.bytes_per_s))
            for port, use in zip(flow.ports, flow.use, strict=True):
                asked[port] += use * rate
        return all(asked[port] < 1.0 - 1e-9 for port in self.moving[key]["flow"].ports)


def contended(
    costs: CostTable, flows: dict[Any, PortFlow], tables: tuple[CostTable, ...], ports: int
) -> PortContention:
    """The contention of these flows."""
    queues = 1 + max((flow.queue for flow in flows.values()), default=-1)
    return PortContention(tables, flows, ports, queues)
