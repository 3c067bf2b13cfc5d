"""Actions and schedules: the order of every lane's actions.

Compute actions are written in the grammar of PyTorch's pipelining runtime: `0F0`, `2I3`, `1W4`, `0B2`; a slice is a
suffix, `0F0/2`. Communication is spelled out: `2SEND_F3` (stage 2 sends its output of microbatch 3 to the next stage),
`3RECV_F3`, `3SEND_B3`, `2RECV_B3`. If a stage has several neighbours, a suffix names the peer: `2SEND_F3>5`,
`5RECV_F3<2`; a tensor other than the hidden state is named: `2SEND_F3>5:context`. Once per iteration: `1REDUCE`,
`NORM`, `STEP`, `1GATHER`, `1FREE`; the field `what` follows a colon (`1REDUCE:tied`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Literal, NamedTuple

from pipefit.errors import ScheduleError

Kind = Literal["F", "I", "W", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "GATHER", "FREE", "REDUCE", "NORM", "STEP"]

COMPUTE: tuple[Kind, ...] = ("F", "I", "W", "B")
TRANSFER: tuple[Kind, ...] = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
ONCE: tuple[Kind, ...] = ("GATHER", "FREE", "REDUCE", "NORM", "STEP")

_PATTERN = re.compile(
    r"(?P<stage>\d+)?(?P<kind>SEND_F|RECV_F|SEND_B|RECV_B|GATHER|FREE|REDUCE|NORM|STEP|F|I|W|B)"
    r"(?P<microbatch>\d+)?(?:/(?P<slice>\d+))?(?:[<>](?P<peer>\d+))?(?::(?P<what>[\w.]+))?"
)


class Action(NamedTuple):
    """One action of a lane."""

    kind: Kind
    stage: int = -1
    "-1 for NORM and STEP, which belong to the lane."
    microbatch: int = -1
    slice: int = 0
    peer: int = -1
    "The other stage of a transfer; -1 for everything else."
    what: str = ""
    "The tensor of a transfer ('' is the hidden state), or the bucket of a REDUCE."

    def __str__(self) -> str:
        if self.kind in ("NORM", "STEP"):
            return self.kind
        text = f"{self.stage}{self.kind}"
        if self.microbatch >= 0:
            text += str(self.microbatch)
        if self.slice:
            text += f"/{self.slice}"
        if self.kind in TRANSFER and self.peer != default_peer(self.kind, self.stage):
            text += f"{'>' if self.kind.startswith('SEND') else '<'}{self.peer}"
        return f"{text}:{self.what}" if self.what else text


def default_peer(kind: Kind, stage: int) -> int:
    """Return the implied neighbour of a transfer: the next or the previous stage of a chain."""
    return stage + 1 if kind in ("SEND_F", "RECV_B") else stage - 1


def make_actions(fields: Iterable[tuple[object, ...]]) -> list[Action]:
    """Build actions from tuples of all their fields, in a third of the time of `Action(...)`."""
    return list(map(partial(tuple.__new__, Action), fields))


def parse_action(text: str) -> Action:
    """Return the action of a text that `str(action)` wrote. Raises ScheduleError that quotes the text."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            "This is not an action.",
            seen=repr(text),
            allowed="0F0, 2I3, 1W4, 0B2, 0F0/1, 2SEND_F3, 1REDUCE, NORM, STEP",
        )
    kind: Kind = match["kind"]  # type: ignore[assignment]
    lane_wide = kind in ("NORM", "STEP")
    if lane_wide == (match["stage"] is not None) or (kind in COMPUTE + TRANSFER) == (match["microbatch"] is None):
        raise ScheduleError("This action lacks its stage or microbatch, or has one too many.", seen=repr(text))
    stage = int(match["stage"] or -1)
    if kind in TRANSFER:
        peer = int(match["peer"]) if match["peer"] else default_peer(kind, stage)
    else:
        peer = -1
    return Action(kind, stage, int(match["microbatch"] or -1), int(match["slice"] or 0), peer, match["what"] or "")


class RoundRobin(NamedTuple):
    """The share of microbatches that a stage takes: units of `multiple` microbatches, every `turns`-th of them."""

    turn: int = 0
    "The stage takes unit u if u % turns == turn."
    turns: int = 1
    multiple: int = 1

    def takes_microbatch(self, microbatch: int) -> bool:
        """Return whether the microbatch is in a unit of the stage."""
        return microbatch // self.multiple % self.turns == self.turn

    def unit_start(self, microbatch: int) -> int:
        """Return the first microbatch of the microbatch's unit, which numbers the unit's actions."""
        return microbatch - microbatch % self.multiple

    def unit_starts(self, microbatches: int) -> range:
        """Return the first microbatch of each of the stage's units."""
        return range(self.turn * self.multiple, microbatches, self.turns * self.multiple)


EVERY = RoundRobin()
"""All microbatches, one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The ordered actions of every lane, with the shape they are for.

    `lanes[i]` is the list of lane i. `placement[s]` is the lane that holds stage s. A schedule is **computed** if it
    has compute actions only, and **lowered** if it has transfers and once-per-iteration actions too. Compute actions of
    a stage bear the first microbatch of a unit of its turn; transfers bear every single microbatch that both stages
    take.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    slices: int
    "Slices per microbatch; 1 if sequences are not sliced."
    lanes: tuple[tuple[Action, ...], ...]
    turns: tuple[RoundRobin, ...] = ()
    "The microbatches that every stage takes; (): all stages take all, one at a time."

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def stage_turn(self, stage: int) -> RoundRobin:
        """Return the share of microbatches that a stage takes."""
        return self.turns[stage] if self.turns else EVERY

    def stage_units(self, stage: int) -> range:
        """Return the microbatches that number the compute actions of a stage."""
        return self.stage_turn(stage).unit_starts(self.microbatches)

    @property
    def is_lowered(self) -> bool:
        compute = frozenset(COMPUTE)
        return any(not compute.issuperset(map(itemgetter(0), lane)) for lane in self.lanes)

    @property
    def splits_backward(self) -> bool:
        return any(action.kind == "W" for lane in self.lanes for action in lane)

    def __iter__(self) -> Iterator[tuple[int, int, Action]]:
        """Yield (lane, position, action) over all lanes."""
        for lane, actions in enumerate(self.lanes):
            for position, action in enumerate(actions):
                yield lane, position, action


def format_lanes(lanes: Sequence[Sequence[Action]]) -> tuple[str, ...]:
    """Return one line of text per lane, actions separated by blanks: the form stored in plans."""
    return tuple(" ".join(map(str, lane)) for lane in lanes)


def parse_lanes(lines: Sequence[str]) -> tuple[tuple[Action, ...], ...]:
    """Parse the lines that `format_lanes` wrote."""
    return tuple(tuple(map(parse_action, line.split())) for line in lines)
