"""Where PyTorch's pipelining places its messages, and what that costs: its own lowered order, replayed in time.

`stock_lanes` is the order that `_PipelineScheduleRuntime` executes for a schedule's CSV, made by its own passes.
`replay` executes lowered lanes, PyTorch's or ours, event by event: a lane runs its actions one after the other and
waits only for what an action consumes; SEND and RECV are posted and the lane goes on. A transfer moves when both ends
have posted it and it is the first in its streams. Streams are

- `directed`: one per directed pair of lanes. So do gloo (first in, first out per sender; a pending receive holds up
  nobody's sends) and NCCL with a communicator per directed pair (ours).
- `pair`: one per pair of lanes, for both directions together. So does NCCL as PyTorch uses it: one communicator and
  one stream per pair of ranks, so a receive that is posted too soon holds up the sends behind it (pytorch#172668).

Written apart from `pipefit.simulate`; on directed streams without transfer times both must agree.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.processes.paced import Times
from pipefit.schedule.actions import COMPUTE, TRANSFER, Action, Schedule, parse_action
from pipefit.schedule.text.csv_io import to_csv

Streams = Literal["directed", "pair"]
Message = tuple[str, int, int, int]
"""("F" or "B", the sender's stage, the receiver's, microbatch)."""


def stock_lanes(schedule: Schedule, defer_receives: bool = False) -> list[list[Action]]:
    """PyTorch's own lowering of a computed schedule, without UNSHARD, RESHARD and REDUCE_GRAD (no time is spent there).

    These are the passes of `_PipelineScheduleRuntime._prepare_schedule_with_comms` (torch 2.13), one after the other;
    `defer_receives` is its `defer_pp_recv`.
    """
    from torch.distributed.pipelining import schedules

    def lane_of(stage: int) -> int:
        return schedule.placement[stage]

    order = {}
    for lane, row in enumerate(to_csv(schedule).splitlines()):
        actions = schedules._add_unshard_reshard([schedules._Action.from_str(cell) for cell in row.split(",")])
        order[lane] = schedules._add_reduce_grad(list(actions), schedule.microbatches)
    lowered = schedules._add_send_recv(order, lane_of, schedule.num_stages)
    if defer_receives:
        lowered = schedules._defer_recv_ops(lowered, lane_of)
    return [own_actions(lowered[lane]) for lane in sorted(lowered)]


def own_actions(actions: Sequence[object]) -> list[Action]:
    """PyTorch's actions as ours: compute and transfers only."""
    words = map(str, actions)
    return [parse_action(word) for word in words if not word.endswith(("UNSHARD", "RESHARD", "REDUCE_GRAD"))]


def posted_beforehand(lanes: Sequence[Sequence[Action]], placement: Sequence[int]) -> list[list[Action]]:
    """The lanes with every RECV at their beginning, in the order of the SENDs: no placement of receives is faster."""
    receives: list[list[Action]] = [[] for _ in lanes]
    for lane in lanes:
        for action in lane:
            if action.kind.startswith("SEND"):
                kind = parse_action(f"{action.peer}RECV_{action.kind[-1]}{action.microbatch}")
                receives[placement[action.peer]].append(kind._replace(peer=action.stage))
    return [
        [*first, *(action for action in lane if not action.kind.startswith("RECV"))]
        for first, lane in zip(receives, lanes, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a replay."""

    makespan_s: float
    "When the last compute action ends."
    problem: str = ""
    "Why it could not be replayed to its end: lanes that hang, or ends of a stream that disagree."


def replay(
    lanes: Sequence[Sequence[Action]], placement: Sequence[int], times: Times, transfer_s: float, streams: Streams
) -> Replay:
    """Execute lowered lanes: every transfer takes `transfer_s` of its streams."""
    return _Replay(lanes, placement, times, transfer_s, streams).run()


class _Replay:
    def __init__(
        self,
        lanes: Sequence[Sequence[Action]],
        placement: Sequence[int],
        times: Times,
        transfer_s: float,
        kind: Streams,
    ) -> None:
        self.lanes = [[a for a in lane if a.kind in COMPUTE + TRANSFER] for lane in lanes]
        self.placement, self.times, self.transfer_s, self.kind = placement, times, transfer_s, kind
        self.position, self.clock = [0] * len(lanes), [0.0] * len(lanes)
        self.streams: dict[tuple[int, int, str], deque[tuple[Message, str, float]]] = defaultdict(deque)
        self.free: dict[tuple[int, int, str], float] = defaultdict(float)
        self.arrival: dict[Message, float] = {}

    def run(self) -> Replay:
        moving = True
        while moving:
            moving = any(self._run_lane(lane) for lane in range(len(self.lanes)))
            moving = self._deliver() or moving
        stuck = [lane for lane, place in enumerate(self.position) if place < len(self.lanes[lane])]
        if not stuck:
            return Replay(max(self.clock))
        waits = ", ".join(f"lane {lane} at {self.lanes[lane][self.position[lane]]}" for lane in stuck)
        return Replay(float("inf"), self._disagreement() or f"hangs: {waits}")

    def _run_lane(self, lane: int) -> bool:
        """Go on until an input is missing; whether anything was done."""
        begin = self.position[lane]
        for action in self.lanes[lane][begin:]:
            if action.kind in TRANSFER:
                self._post(lane, action)
            else:
                message = self._input(lane, action)
                if message is not None and message not in self.arrival:
                    break
                ready = self.clock[lane] if message is None else max(self.clock[lane], self.arrival[message])
                self.clock[lane] = ready + self.times.of(action.kind, action.stage)
            self.position[lane] += 1
        return self.position[lane] > begin

    def _post(self, lane: int, action: Action) -> None:
        end, way = action.kind.split("_")
        ends = (action.stage, action.peer) if end == "SEND" else (action.peer, action.stage)
        stream = self._stream(lane, self.placement[action.peer], end)
        self.streams[stream].append(((way, *ends, action.microbatch), end, self.clock[lane]))

    def _stream(self, lane: int, peer: int, end: str) -> tuple[int, int, str]:
        """The stream of a lane that leads to or from a peer."""
        return (lane, peer, end if self.kind == "directed" else "")

    def _input(self, lane: int, action: Action) -> Message | None:
        """The message that a compute action of a chain consumes."""
        source = {"F": action.stage - 1, "W": -1}.get(action.kind, action.stage + 1)
        if not 0 <= source < len(self.placement) or self.placement[source] == lane:
            return None
        return ("F" if action.kind == "F" else "B", source, action.stage, action.microbatch)

    def _deliver(self) -> bool:
        """Move whatever stands first at both of its ends; whether anything moved."""
        moved = False
        for stream in list(self.streams):
            lane, peer, _ = stream
            other = self._stream(peer, lane, "RECV")
            while self.streams[stream] and self.streams[other]:
                (message, end, sent), (first, _, posted) = self.streams[stream][0], self.streams[other][0]
                if end != "SEND" or first != message:
                    break
                start = max(sent, posted, self.free[stream], self.free[other])
                self.arrival[message] = self.free[stream] = self.free[other] = start + self.transfer_s
                self.streams[stream].popleft()
                self.streams[other].popleft()
                moved = True
        return moved

    def _disagreement(self) -> str:
        """Two ends of a directed stream that expect different messages: untagged transports deliver the wrong one."""
        for (lane, peer, end), queue in self.streams.items():
            other = self.streams.get((peer, lane, "RECV"))
            if self.kind == "directed" and end == "SEND" and queue and other and queue[0][0] != other[0][0]:
                return f"order: lane {lane} sends {queue[0][0]} where lane {peer} receives {other[0][0]}"
        return ""
