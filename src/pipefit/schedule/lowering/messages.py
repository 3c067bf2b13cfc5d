"""How many messages are under way on a channel, read off a lowered lane. Pure.

A channel is one edge in one direction between two lanes. A receive is open from its RECV to the compute action that
takes the message. The sender may have as many messages under way as the receiver ever has open receives on that
channel, and lets go of a tensor when that many later ones have been sent: so what a lane holds follows from the order
of its actions alone, whatever the real times are, and the simulator counts what the runtime does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipefit.schedule.actions import Action, RoundRobin

Channel = tuple[str, int, int, str]
"""(RECV_F or RECV_B, receiving stage, sending stage, tensor)."""


def channel_of(action: Action) -> Channel:
    """The channel of a SEND or RECV."""
    if action.kind.startswith("RECV"):
        return action.kind, action.stage, action.peer, action.what
    return "RECV" + action.kind[4:], action.peer, action.stage, action.what


def message_consumers(lane: Sequence[Action], turns: Sequence[RoundRobin] = ()) -> dict[int, int]:
    """RECV index -> index of the action that takes the message: F, or the I or B. `turns`: of all stages, as in
    `Schedule.turns`."""
    place = {(a.kind in ("I", "B"), a.stage, a.microbatch, a.slice): i for i, a in enumerate(lane) if a.kind in "FIB"}
    return {
        index: place[action.kind == "RECV_B", action.stage, _unit_start(action, turns), action.slice]
        for index, action in enumerate(lane)
        if action.kind.startswith("RECV")
    }


def _unit_start(action: Action, turns: Sequence[RoundRobin]) -> int:
    return turns[action.stage].unit_start(action.microbatch) if turns else action.microbatch


def receive_windows(lane: Sequence[Action], turns: Sequence[RoundRobin] = ()) -> dict[Channel, int]:
    """The greatest number of receives that are open at once, of every channel into a lane."""
    events = [
        (place, change, channel_of(lane[post]))
        for post, use in message_consumers(lane, turns).items()
        for place, change in ((post, 1), (use, -1))
    ]
    now, most = Counter[Channel](), Counter[Channel]()
    for _, change, key in sorted(events):
        now[key] += change
        most[key] = max(most[key], now[key])
    return dict(most)


def post_ahead(lane: Sequence[Action], placement: Sequence[int], turns: Sequence[RoundRobin] = ()) -> list[Action]:
    """The lane with every receive posted before the message ahead of it, from the same lane, is used, at the latest.

    gloo's sender then finds its peer ready and writes at once, which saves it a round of notifications; it costs one
    more buffer for every lane that sends here. The order of the receives from a lane stays, so what could not hang
    still cannot. (Not for NCCL, whose waiting receives take up the device.)
    """
    users = message_consumers(lane, turns)
    before: dict[int, int] = {}
    moved: dict[int, list[int]] = {}
    for index, user in users.items():
        sender = placement[lane[index].peer]
        if sender in before and before[sender] < index:
            moved.setdefault(before[sender], []).append(index)
        before[sender] = user
    gone = {index for each in moved.values() for index in each}
    result: list[Action] = []
    for index, action in enumerate(lane):
        result += [lane[early] for early in moved.get(index, ())]
        if index not in gone:
            result.append(action)
    return result
