"""The number of messages in flight on a channel, derived from a lowered lane.

A channel is one edge in one direction between two lanes. A receive is open from its RECV to the compute action that
uses the message. Let w be the maximum number of open receives of a channel. The sender may have w messages in flight
and releases a tensor when w later ones have been sent. Memory thus depends only on the order of a lane's actions,
whatever the measured times are, and the simulator counts the same bytes as the runtime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipefit.schedule.actions import Action, RoundRobin

MessageChannel = tuple[str, int, int, str]
"""(RECV_F or RECV_B, receiving stage, sending stage, tensor)."""


def channel_of(action: Action) -> MessageChannel:
    """Return the channel of a SEND or RECV."""
    if action.kind.startswith("RECV"):
        return action.kind, action.stage, action.peer, action.what
    return "RECV" + action.kind[4:], action.peer, action.stage, action.what


def message_consumers(lane: Sequence[Action], turns: Sequence[RoundRobin] = ()) -> dict[int, int]:
    """Return RECV index -> index of the F, I or B that uses the message. `turns` are those of `Schedule.turns`."""
    consumer = {
        (a.kind in ("I", "B"), a.stage, a.microbatch, a.slice): i for i, a in enumerate(lane) if a.kind in "FIB"
    }
    return {
        index: consumer[action.kind == "RECV_B", action.stage, _unit_start(action, turns), action.slice]
        for index, action in enumerate(lane)
        if action.kind.startswith("RECV")
    }


def _unit_start(action: Action, turns: Sequence[RoundRobin]) -> int:
    return turns[action.stage].unit_start(action.microbatch) if turns else action.microbatch


def receive_windows(lane: Sequence[Action], turns: Sequence[RoundRobin] = ()) -> dict[MessageChannel, int]:
    """Return, for every channel into a lane, the maximum number of receives open at once."""
    events = [
        (position, change, channel_of(lane[post]))
        for post, use in message_consumers(lane, turns).items()
        for position, change in ((post, 1), (use, -1))
    ]
    now, peak = Counter[MessageChannel](), Counter[MessageChannel]()
    for _, change, key in sorted(events):
        now[key] += change
        peak[key] = max(peak[key], now[key])
    return dict(peak)


def post_ahead(lane: Sequence[Action], placement: Sequence[int], turns: Sequence[RoundRobin] = ()) -> list[Action]:
    """Return the lane with every receive posted at the latest before the use of the previous message from the same
    lane.

    gloo's sender then finds its peer ready and writes at once, which saves a round of notifications. It costs one
    additional buffer for every lane that sends here. The order of the receives from a lane is unchanged, so no new
    deadlock is possible. (Not for NCCL, whose waiting receives occupy the device.)
    """
    users = message_consumers(lane, turns)
    before: dict[int, int] = {}
    moved: dict[int, list[int]] = {}
    for index, user in users.items():
        sender = placement[lane[index].peer]
        if sender in before and before[sender] < index:
            moved.setdefault(before[sender], []).append(index)
        before[sender] = user
    gone = {index for receives in moved.values() for index in receives}
    result: list[Action] = []
    for index, action in enumerate(lane):
        result += [lane[early] for early in moved.get(index, ())]
        if index not in gone:
            result.append(action)
    return result
