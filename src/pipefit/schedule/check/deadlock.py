"""Deadlock check of a lowered schedule: it is executed under the strictest rules that a transport may have.

- A SEND blocks its lane until the matching RECV has been reached on the other lane (rendezvous). Receives do not block:
  they are posted, and waited for by the compute action that uses the data.
- Every directed pair of lanes is one first-in first-out channel for all messages, forward and backward: the n-th SEND
  meets the n-th RECV, so both ends must name the same tensors in the same order.
- A collective between lanes (NORM; a REDUCE of parameters that several stages share) blocks each of its lanes until all
  have reached it. REDUCE and GATHER of one stage stay within the devices of one lane and block no other lane.

A schedule that passes also runs on more permissive transports. Gloo buffers small messages, so a schedule may run on
gloo and hang on NCCL; `rendezvous=False` applies the rules of buffered sends.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.errors import DeadlockError
from pipefit.schedule.actions import TRANSFER, Action, Schedule
from pipefit.schedule.check.draw import Cell, bad_cell_error, draw_cells

MessageKey = tuple[str, int, int, str, int, int]
"""(F or B, sending stage, receiving stage, tensor, microbatch, slice)."""


def find_deadlock(schedule: Schedule, *, rendezvous: bool = True) -> DeadlockError | None:
    """Return an error that describes a deadlock or a mismatched message, or None if all lanes run to their end.

    Expects a lowered schedule that `check_schedule` accepts; only communication is checked here.
    """
    error = _find_mismatch(schedule)
    if error is not None:
        return error
    execution = _LaneExecution(schedule, rendezvous)
    execution.run()
    if execution.is_finished:
        return None
    buffered = False
    if rendezvous:
        eager = _LaneExecution(schedule, False)
        eager.run()
        buffered = eager.is_finished
    return execution.deadlock_error(buffered)


def check_deadlock(schedule: Schedule, *, rendezvous: bool = True) -> None:
    """Raise the error that `find_deadlock` returns, if any."""
    error = find_deadlock(schedule, rendezvous=rendezvous)
    if error is not None:
        raise error


def message_name(action: Action) -> MessageKey:
    """Return the message of a SEND or RECV, named the same at both ends."""
    ends = (action.stage, action.peer) if action.kind.startswith("SEND") else (action.peer, action.stage)
    return (action.kind[-1], *ends, action.what, action.microbatch, action.slice)


def channel_cells(schedule: Schedule) -> dict[tuple[int, int], tuple[list[Cell], list[Cell]]]:
    """Return, for every directed pair of lanes, the cells of its SENDs and of its RECVs, each in lane order."""
    channels: dict[tuple[int, int], tuple[list[Cell], list[Cell]]] = {}
    for lane, step, action in schedule:
        if action.kind in TRANSFER:
            peer_lane = schedule.placement[action.peer]
            if action.kind.startswith("SEND"):
                channels.setdefault((lane, peer_lane), ([], []))[0].append((lane, step))
            else:
                channels.setdefault((peer_lane, lane), ([], []))[1].append((lane, step))
    return channels


def _find_mismatch(schedule: Schedule) -> DeadlockError | None:
    """Return the error for the first channel whose two ends disagree, or None."""
    lanes = schedule.lanes
    for (source, target), (sends, receives) in sorted(channel_cells(schedule).items()):
        for index in range(max(len(sends), len(receives))):
            if index < len(sends) and index < len(receives):
                send, receive = sends[index], receives[index]
                if message_name(lanes[send[0]][send[1]]) == message_name(lanes[receive[0]][receive[1]]):
                    continue
            return _mismatch_error(schedule, source, target, sends, receives, index)
    return None


def _mismatch_error(
    schedule: Schedule, source: int, target: int, sends: Sequence[Cell], receives: Sequence[Cell], index: int
) -> DeadlockError:
    lanes = schedule.lanes
    send = sends[index] if index < len(sends) else (source, len(lanes[source]))
    receive = receives[index] if index < len(receives) else (target, len(lanes[target]))

    def action_names(cells: Sequence[Cell]) -> str:
        texts = [str(lanes[lane][step]) for lane, step in cells]
        shown = [f">{text}<" if i == index else text for i, text in enumerate(texts)]
        shown += [">nothing<"] if len(texts) == index else []
        low = max(0, index - 3)
        return ("... " if low else "") + " ".join(shown[low : index + 4]) + (" ..." if index + 4 < len(shown) else "")

    text = draw_cells(lanes, send, steps={source: send[1], target: receive[1]})
    return DeadlockError(
        f"The two ends of the channel from lane {source} to lane {target} disagree at message {index}.\n"
        f"  lane {source} sends:    {action_names(sends)}\n"
        f"  lane {target} receives: {action_names(receives)}\n{text}",
        where=f"lane {source}, step {send[1]} and lane {target}, step {receive[1]}",
        allowed="one first-in first-out order per directed pair of lanes, the same at both ends, for all tensors",
        next_step="lower the computed schedule with pipefit.schedule.lowering.lower, which keeps this order",
    )


class _LaneExecution:
    """Execution of the lanes as far as they can run. Wake-ups are by event, so that time is linear in the actions."""

    def __init__(self, schedule: Schedule, rendezvous: bool) -> None:
        self.schedule, self.rendezvous = schedule, rendezvous
        self.lanes = schedule.lanes
        self.place = [0] * len(self.lanes)
        self.sent: set[MessageKey] = set()
        self.posted: set[MessageKey] = set()
        self.arrived: dict[str, set[int]] = {}
        self.waiting: dict[tuple[str, object], list[int]] = {}
        self.inputs: dict[tuple[str, int, int, int], list[MessageKey]] = {}
        self.members: dict[str, set[int]] = {}
        self.last: dict[tuple[int, str], int] = {}
        for lane, step, action in schedule:
            if action.kind.startswith("RECV"):
                first = schedule.stage_turn(action.stage).unit_start(action.microbatch)
                key = (action.kind[-1], action.stage, first, action.slice)
                self.inputs.setdefault(key, []).append(message_name(action))
            name = _collective_name(action)
            if name is not None:
                self.members.setdefault(name, set()).add(lane)
                self.last[lane, name] = step

    @property
    def is_finished(self) -> bool:
        return all(position == len(lane) for position, lane in zip(self.place, self.lanes, strict=True))

    def run(self) -> None:
        ready = list(range(len(self.lanes)))
        while ready:
            lane = ready.pop()
            while self.place[lane] < len(self.lanes[lane]):
                needed = self._blocking_event(lane, self.lanes[lane][self.place[lane]])
                if needed is not None:
                    self.waiting.setdefault(needed, []).append(lane)
                    break
                ready += self._record_done(lane, self.lanes[lane][self.place[lane]])
                self.place[lane] += 1

    def _blocking_event(self, lane: int, action: Action) -> tuple[str, object] | None:
        """Return the event that the lane must wait for before it can pass the action. Records the lane's arrival."""
        if action.kind.startswith("SEND"):
            wanted = message_name(action)
            return ("posted", wanted) if self.rendezvous and wanted not in self.posted else None
        if action.kind in ("F", "B", "I"):
            direction = "F" if action.kind == "F" else "B"
            for wanted in self.inputs.get((direction, action.stage, action.microbatch, action.slice), ()):
                if wanted not in self.posted:
                    return ("posted", wanted)
                if wanted not in self.sent:
                    return ("sent", wanted)
            return None
        name = _collective_name(action)
        if name is None or self.place[lane] != self.last[lane, name]:
            return None
        there = self.arrived.setdefault(name, set())
        there.add(lane)
        return ("all", name) if there != self.members[name] else None

    def _record_done(self, lane: int, action: Action) -> list[int]:
        """Record the effect of an action, and return the lanes that it wakes."""
        event: tuple[str, object] | None = None
        if action.kind.startswith("SEND"):
            self.sent.add(message_name(action))
            event = ("sent", message_name(action))
        elif action.kind.startswith("RECV"):
            self.posted.add(message_name(action))
            event = ("posted", message_name(action))
        elif _collective_name(action) is not None:
            event = ("all", _collective_name(action))
        return self.waiting.pop(event, []) if event is not None else []

    def deadlock_error(self, buffered: bool) -> DeadlockError:
        """Return the error that names the awaited events, with a cycle of lanes if there is one."""
        stuck = {lane: event for event, lanes in self.waiting.items() for lane in lanes}
        notes = {lane: self._describe_event(event) for lane, event in stuck.items()}
        circle = self._find_circle(stuck)
        how = "a SEND blocks until its RECV is posted" if self.rendezvous else "sends are buffered"
        what = f"The lanes hang: each waits for another ({how})."
        if circle:
            what += "\n  circle: " + " -> ".join(f"lane {lane}" for lane in circle)
        if buffered:
            what += "\n  With buffered sends (gloo with small messages) it would run; with rendezvous (NCCL) it hangs."
        first = circle[0] if circle else min(stuck)
        return bad_cell_error(
            DeadlockError,
            what,
            self.lanes,
            (first, self.place[first]),
            notes=notes,
            steps={lane: self.place[lane] for lane in stuck},
            next_step="post the RECV earlier on the awaited lane, or lower with pipefit.schedule.lower_schedule",
        )

    def _owning_lane(self, event: tuple[str, object]) -> int:
        """Return a lane that the event waits for."""
        kind, what = event
        if kind == "all":
            assert isinstance(what, str)
            return min(self.members[what] - self.arrived[what])
        assert isinstance(what, tuple)
        return self.schedule.placement[what[1] if kind == "sent" else what[2]]

    def _describe_event(self, event: tuple[str, object]) -> str:
        kind, what = event
        owner = self._owning_lane(event)
        if kind == "all":
            return f"waits for lane {owner} to reach {what}"
        assert isinstance(what, tuple)
        direction, sender, receiver, tensor, microbatch, slice_ = what
        if kind == "posted":
            action = Action("RECV_F" if direction == "F" else "RECV_B", receiver, microbatch, slice_, sender, tensor)
        else:
            action = Action("SEND_F" if direction == "F" else "SEND_B", sender, microbatch, slice_, receiver, tensor)
        return f"waits for {action} of lane {owner}"

    def _find_circle(self, stuck: dict[int, tuple[str, object]]) -> list[int]:
        """Return lanes that wait for each other, the first repeated at the end; [] if a lane waits for a finished
        one."""
        lane, path = min(stuck), list[int]()
        while lane in stuck and lane not in path:
            path.append(lane)
            lane = self._owning_lane(stuck[lane])
        return [*path[path.index(lane) :], lane] if lane in path else []


def _collective_name(action: Action) -> str | None:
    """Return the name of the action's collective between lanes, or None."""
    if action.kind == "NORM":
        return "NORM"
    return f"REDUCE:{action.what}" if action.kind == "REDUCE" and action.what else None
