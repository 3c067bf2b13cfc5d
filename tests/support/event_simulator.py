"""An independent simulator for tests: processes and a heap of events, nothing shared with pipefit.simulate.

Each lane is a process that walks through its actions; each lane's port and communication lane are queues served in
order. Nothing is compiled into arrays and no topological order is used: time moves from event to event.
"""

from __future__ import annotations

import heapq
from collections import deque

from pipefit.cost.types import CostTable, EdgeCost
from pipefit.schedule import Action, Edge, Schedule


class EventSimulator:
    """Run it with `run()`; then `start` and `stop` hold (lane, step) -> seconds, `transfers` message -> (start, port
    free, arrival), and `posted` message -> seconds."""

    def __init__(self, schedule: Schedule, costs: CostTable, edges: tuple[Edge, ...]) -> None:
        self.schedule, self.costs, self.edges = schedule, costs, edges
        self.edge_costs = {(e.source, e.target, e.tensor): e for e in costs.edges}
        self.lowered = schedule.is_lowered
        self.events: list[tuple[float, int, object, tuple]] = []
        self.count = 0
        self.now = 0.0
        lanes = len(schedule.lanes)
        self.place, self.running = [0] * lanes, [False] * lanes
        self.ports = [deque() for _ in range(lanes)]
        self.port_busy = [False] * lanes
        self.beside = [deque() for _ in range(lanes)]
        self.beside_busy = [False] * lanes
        self.at_norm: set[int] = set()
        self.start: dict[tuple[int, int], float] = {}
        self.stop: dict[tuple[int, int], float] = {}
        self.transfers: dict[tuple, tuple[float, float, float]] = {}
        self.posted: dict[tuple, float] = {}
        self.arrived: set[tuple] = set()

    def run(self) -> float:
        """The makespan."""
        self._wake_all()
        while self.events:
            self.now, _, function, arguments = heapq.heappop(self.events)
            function(*arguments)
            while self.events and self.events[0][0] == self.now:
                _, _, function, arguments = heapq.heappop(self.events)
                function(*arguments)
            self._wake_all()
        assert all(place == len(lane) for place, lane in zip(self.place, self.schedule.lanes, strict=True))
        return self.now

    def _at(self, time: float, function, *arguments) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, function, arguments))

    def _wake_all(self) -> None:
        moved = True
        while moved:
            moved = False
            for lane in range(len(self.schedule.lanes)):
                moved |= self._step(lane) | self._serve_port(lane) | self._serve_beside(lane)

    def _step(self, lane: int) -> bool:
        actions = self.schedule.lanes[lane]
        if self.running[lane] or self.place[lane] == len(actions):
            return False
        step = self.place[lane]
        action = actions[step]
        if action.kind.startswith("SEND"):
            self.ports[lane].append((self._message(action), self._edge(action)))
        elif action.kind.startswith("RECV"):
            self.posted[self._message(action)] = self.now
        elif action.kind in ("REDUCE", "GATHER"):
            self.beside[lane].append((step, action))
        elif not self._may_start(lane, action):
            return False
        else:
            self._begin(lane, step, action)
            return True
        self.place[lane] += 1
        return True

    def _may_start(self, lane: int, action: Action) -> bool:
        if action.kind == "NORM":
            if self.beside[lane] or self.beside_busy[lane]:
                return False
            self.at_norm.add(lane)
            return all(other in self.at_norm for other in range(len(self.schedule.lanes)))
        if action.kind == "STEP":
            return not self.beside[lane] and not self.beside_busy[lane]
        if action.kind == "F":
            wanted = [("F", s, t, what) for s, t, what in self.edges if t == action.stage]
        elif action.kind in ("B", "I"):
            wanted = [("B", t, s, what) for s, t, what in self.edges if s == action.stage]
        else:
            wanted = []
        placement = self.schedule.placement
        return all(
            (*one, action.microbatch, action.slice) in self.arrived
            for one in wanted
            if placement[one[1]] != placement[one[2]]
        )

    def _begin(self, lane: int, step: int, action: Action) -> None:
        self.start[lane, step] = self.now
        self.running[lane] = True
        self._at(self.now + self._time(lane, action), self._end, lane, step, action)

    def _end(self, lane: int, step: int, action: Action) -> None:
        self.stop[lane, step] = self.now
        self.running[lane] = False
        self.place[lane] += 1
        if self.lowered or action.kind not in ("F", "B", "I"):
            return
        for source, target, what in self.edges:
            ends = (source, target) if action.kind == "F" else (target, source)
            if ends[0] == action.stage and self.schedule.placement[source] != self.schedule.placement[target]:
                message = ("F" if action.kind == "F" else "B", *ends, what, action.microbatch, action.slice)
                self.ports[lane].append((message, self.edge_costs[source, target, what]))

    def _serve_port(self, lane: int) -> bool:
        if self.port_busy[lane] or not self.ports[lane]:
            return False
        message, edge = self.ports[lane][0]
        if self.lowered and message not in self.posted:
            return False
        self.ports[lane].popleft()
        port, whole = _edge_times(edge, message)
        self.transfers[message] = (self.now, self.now + port, self.now + whole)
        self.port_busy[lane] = True
        self._at(self.now + port, self._port_free, lane)
        self._at(self.now + whole, self.arrived.add, message)
        return True

    def _port_free(self, lane: int) -> None:
        self.port_busy[lane] = False

    def _serve_beside(self, lane: int) -> bool:
        if self.beside_busy[lane] or not self.beside[lane]:
            return False
        step, action = self.beside[lane].popleft()
        times = self.costs.reduce_s if action.kind == "REDUCE" else self.costs.gather_s
        self.start[lane, step] = self.now
        self.beside_busy[lane] = True
        self._at(self.now + (0.0 if action.what else float(times[action.stage])), self._beside_free, lane, step)
        return True

    def _beside_free(self, lane: int, step: int) -> None:
        self.stop[lane, step] = self.now
        self.beside_busy[lane] = False

    def _time(self, lane: int, action: Action) -> float:
        if action.kind == "STEP":
            return float(self.costs.step_s[lane])
        if action.kind not in self.costs.actions:
            return 0.0
        cost = self.costs.actions[action.kind].cost_of(action.stage, action.microbatch, action.slice)
        return cost.time_s + self.costs.overhead_s

    def _edge(self, send: Action) -> EdgeCost:
        ends = (send.stage, send.peer) if send.kind == "SEND_F" else (send.peer, send.stage)
        return self.edge_costs[(*ends, send.what)]

    @staticmethod
    def _message(action: Action) -> tuple:
        ends = (action.stage, action.peer) if action.kind.startswith("SEND") else (action.peer, action.stage)
        return (action.kind[-1], *ends, action.what, action.microbatch, action.slice)


def _edge_times(edge: EdgeCost, message: tuple) -> tuple[float, float]:
    direction, _, _, _, microbatch, slice_ = message
    port, whole = (edge.forward_port_s, edge.forward_s) if direction == "F" else (edge.backward_port_s, edge.backward_s)

    def entry(array) -> float:
        return float(array[min(microbatch, array.shape[0] - 1), min(slice_, array.shape[1] - 1)])

    return entry(port), entry(whole)
