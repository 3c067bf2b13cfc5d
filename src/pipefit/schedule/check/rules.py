"""Validity rules of a schedule, computed or lowered. Errors have a drawing of the first violation.

Rules for every stage:

- Every F, and every B or I and W, occurs exactly once per (unit, slice) of the stage's turn, on its lane.
- F comes before B or I, and I before W.
- The slices of a microbatch go forward in ascending and backward in descending order (keys and values flow forward,
  their gradients back).
- Frozen stages may have no backward; then they receive no gradient.

Between stages, some order must satisfy all dependencies. In a lowered schedule, every tensor that crosses lanes is sent
once, after its producer, and received once, before its consumer. Reductions come after the stage's last backward, NORM
after the reductions, STEP after NORM. Deadlocks of the transfers are checked by `pipefit.schedule.check.deadlock`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import COMPUTE, TRANSFER, Action, RoundRobin, Schedule
from pipefit.schedule.check.draw import Cell, bad_cell_error
from pipefit.schedule.lowering.frozen import with_backward
from pipefit.schedule.problem import Edge, chain_edges

Unit = tuple[int, int, int]
"""(stage, microbatch, slice)."""


def check_schedule(schedule: Schedule, edges: Sequence[Edge] | None = None, frozen: Collection[int] = ()) -> None:
    """Raise ScheduleError, with a drawing, unless the schedule is valid.

    `edges` is the DAG of stages. Default: the chain; for a lowered schedule the edges that its transfers name, and the
    chain's edge into every stage without an incoming transfer. `frozen` are stages that may have no backward.
    """
    _check_shape(schedule)
    dag = tuple(edges) if edges is not None else edges_of(schedule)
    trained = with_backward(schedule) | (frozenset(range(schedule.num_stages)) - frozenset(frozen))
    done = _check_compute(schedule, trained)
    if schedule.is_lowered:
        _TransferRules(schedule, dag, done, trained).check_transfers()
        _check_once(schedule)
    check_order(schedule, dag)


def edges_of(schedule: Schedule) -> tuple[Edge, ...]:
    """Return the DAG that a schedule implies: see `check_schedule`."""
    if not schedule.is_lowered:
        return chain_edges(schedule.num_stages)
    named = {
        (action.stage, action.peer, action.what): None
        for _, _, action in schedule
        if action.kind in ("SEND_F", "RECV_B")
    }
    named |= {
        (action.peer, action.stage, action.what): None
        for _, _, action in schedule
        if action.kind in ("SEND_B", "RECV_F")
    }
    fed = {target for _, target, _ in named}
    return tuple(sorted({**named, **{edge: None for edge in chain_edges(schedule.num_stages) if edge[1] not in fed}}))


def check_order(schedule: Schedule, edges: Sequence[Edge]) -> None:
    """Raise ScheduleError unless some order of the compute actions satisfies the lanes and the data dependencies."""
    feeds: dict[int, list[int]] = {}
    gradients: dict[int, list[int]] = {}
    for source, target, _ in edges:
        feeds.setdefault(target, []).append(source)
        gradients.setdefault(source, []).append(target)
    lanes = [[(step, a) for step, a in enumerate(lane) if a.kind in COMPUTE] for lane in schedule.lanes]
    position = [0] * len(lanes)
    forward: set[Unit] = set()
    backward: set[Unit] = set()
    waiting: dict[tuple[str, Unit], list[int]] = {}
    ready = list(range(len(lanes)))
    while ready:
        lane = ready.pop()
        while position[lane] < len(lanes[lane]):
            action = lanes[lane][position[lane]][1]
            lack = _missing_unit(schedule, action, feeds, gradients, forward, backward)
            if lack is not None:
                waiting.setdefault(lack, []).append(lane)
                break
            if action.kind != "W":
                unit = (action.stage, action.microbatch, action.slice)
                (forward if action.kind == "F" else backward).add(unit)
                ready += waiting.pop(("F" if action.kind == "F" else "B", unit), [])
            position[lane] += 1
    stuck = {lane: needed for needed, lanes_ in waiting.items() for lane in lanes_}
    if stuck:
        raise _stuck_error(schedule, {lane: lanes[lane][position[lane]][0] for lane in stuck}, stuck)


def _missing_unit(
    schedule: Schedule,
    action: Action,
    feeds: dict[int, list[int]],
    gradients: dict[int, list[int]],
    forward: set[Unit],
    backward: set[Unit],
) -> tuple[str, Unit] | None:
    """Return the unit that the action waits for, or None."""
    if action.kind == "W":
        return None
    direction, neighbours, done = ("F", feeds, forward) if action.kind == "F" else ("B", gradients, backward)
    microbatches = range(action.microbatch, action.microbatch + schedule.stage_turn(action.stage).multiple)
    for neighbour in neighbours.get(action.stage, ()):
        turn = schedule.stage_turn(neighbour)
        for first in {
            turn.unit_start(microbatch): None for microbatch in microbatches if turn.takes_microbatch(microbatch)
        }:
            if (neighbour, first, action.slice) not in done:
                return direction, (neighbour, first, action.slice)
    return None


def _stuck_error(schedule: Schedule, steps: dict[int, int], needs: dict[int, tuple[str, Unit]]) -> ScheduleError:
    notes = {}
    for lane, (kind, (stage, microbatch, slice_)) in needs.items():
        wanted = Action("F" if kind == "F" else "B", stage, microbatch, slice_)
        notes[lane] = f"waits for {wanted} of lane {schedule.placement[stage]}"
    first = min(steps)
    return bad_cell_error(
        ScheduleError,
        "The lanes wait for each other: no order of the actions satisfies the data dependencies.",
        schedule.lanes,
        (first, steps[first]),
        notes=notes,
        steps=steps,
        next_step="move the action that is waited for to before the one that its own lane stands at",
    )


def _check_shape(schedule: Schedule) -> None:
    lanes = len(schedule.lanes)
    if sorted(set(schedule.placement)) != list(range(lanes)):
        raise ScheduleError(
            "The placement does not fit the lanes.",
            where=schedule.name,
            seen=f"{lanes} lanes, placement {schedule.placement}",
            allowed="every lane holds at least one stage, lanes numbered from 0",
        )


def _check_compute(schedule: Schedule, trained: Collection[int]) -> dict[tuple[str, Unit], Cell]:
    """Return the cell of every compute action. Raises for the first action that breaks a rule, then for missing
    ones."""
    done: dict[tuple[str, Unit], Cell] = {}
    for lane, step, action in schedule:
        what = _wrong_place(schedule, lane, action) or _wrong_order(schedule, action, done)
        if what is not None:
            raise bad_cell_error(ScheduleError, what, schedule.lanes, (lane, step))
        if action.kind in COMPUTE:
            done[action.kind, (action.stage, action.microbatch, action.slice)] = (lane, step)
    for stage, lane in enumerate(schedule.placement):
        for microbatch in schedule.stage_units(stage):
            for slice_ in range(schedule.slices):
                unit = (stage, microbatch, slice_)
                missing = _missing_action(unit, done, stage in trained)
                if missing:
                    raise bad_cell_error(
                        ScheduleError,
                        f"Lane {lane} ends without {missing}.",
                        schedule.lanes,
                        (lane, len(schedule.lanes[lane])),
                        allowed="every F, and every B or I and W, once per (stage, microbatch, slice)",
                    )
    return done


def _wrong_place(schedule: Schedule, lane: int, action: Action) -> str | None:
    if action.kind in ("NORM", "STEP"):
        return None
    if not 0 <= action.stage < schedule.num_stages:
        return f"There is no stage {action.stage}: the schedule has {schedule.num_stages}."
    if schedule.placement[action.stage] != lane:
        return f"Stage {action.stage} belongs to lane {schedule.placement[action.stage]}, not to lane {lane}."
    if action.kind in COMPUTE + TRANSFER:
        if not 0 <= action.microbatch < schedule.microbatches:
            return f"There is no microbatch {action.microbatch}: the schedule has {schedule.microbatches}."
        if not 0 <= action.slice < schedule.slices:
            return f"There is no slice {action.slice}: a microbatch has {schedule.slices}."
        turn = schedule.stage_turn(action.stage)
        if not turn.takes_microbatch(action.microbatch):
            return f"Microbatch {action.microbatch} is not one of stage {action.stage}: {_turn_text(turn)}."
        if action.kind in COMPUTE and turn.unit_start(action.microbatch) != action.microbatch:
            return f"Microbatch {action.microbatch} does not begin a unit that stage {action.stage} takes together."
    if action.kind in TRANSFER:
        if not 0 <= action.peer < schedule.num_stages:
            return f"There is no stage {action.peer} to exchange with: the schedule has {schedule.num_stages}."
        if schedule.placement[action.peer] == lane:
            return f"Stages {action.stage} and {action.peer} are on the same lane: nothing is to be transferred."
        peer_turn = schedule.stage_turn(action.peer)
        if not peer_turn.takes_microbatch(action.microbatch):
            return f"Microbatch {action.microbatch} is not one of stage {action.peer}: {_turn_text(peer_turn)}."
    return None


def _turn_text(turn: RoundRobin) -> str:
    together = f", {turn.multiple} together" if turn.multiple > 1 else ""
    return f"it takes turn {turn.turn} of {turn.turns}{together}"


def _wrong_order(schedule: Schedule, action: Action, done: dict[tuple[str, Unit], Cell]) -> str | None:
    if action.kind not in COMPUTE:
        return None
    stage, m, k = action.stage, action.microbatch, action.slice
    unit = (stage, m, k)
    if (action.kind, unit) in done:
        return f"{action} stands here for the second time."
    if action.kind == "F":
        if k > 0 and ("F", (stage, m, k - 1)) not in done:
            return f"{action} stands before the forward of the slice before it: forwards go by ascending slice."
        return None
    if ("F", unit) not in done:
        return f"{action} stands before its forward {Action('F', *unit)}."
    if action.kind == "W":
        if ("B", unit) in done:
            return f"{action} stands beside {Action('B', *unit)}, which computes the weight gradient already."
        return None if ("I", unit) in done else f"{action} stands before its input gradient {Action('I', *unit)}."
    rival_kind = "I" if action.kind == "B" else "B"
    if (rival_kind, unit) in done:
        return f"{action} computes a gradient that {stage}{rival_kind}{m} has computed already."
    following = (stage, m, k + 1)
    if k + 1 < schedule.slices and ("B", following) not in done and ("I", following) not in done:
        return f"{action} stands before the backward of the slice behind it: backwards go by descending slice."
    return None


def _missing_action(unit: Unit, done: dict[tuple[str, Unit], Cell], trained: bool) -> str:
    if ("F", unit) not in done:
        return str(Action("F", *unit))
    if ("B", unit) in done or not trained:
        return ""
    if ("I", unit) not in done:
        return f"{Action('B', *unit)} (or {Action('I', *unit)} and {Action('W', *unit)})"
    return "" if ("W", unit) in done else str(Action("W", *unit))


class _TransferRules:
    """The rules for SEND and RECV."""

    def __init__(
        self,
        schedule: Schedule,
        edges: Sequence[Edge],
        done: dict[tuple[str, Unit], Cell],
        trained: Collection[int],
    ) -> None:
        self.schedule, self.edges, self.done, self.trained = schedule, edges, done, trained
        self.known = set(edges)
        self.cells: dict[Action, Cell] = {}

    def check_transfers(self) -> None:
        """Raise for the first invalid transfer, then for the first missing one."""
        for lane, step, action in self.schedule:
            if action.kind in TRANSFER:
                what = self._find_fault(action, (lane, step))
                if what is not None:
                    raise bad_cell_error(ScheduleError, what, self.schedule.lanes, (lane, step))
                self.cells[action] = (lane, step)
        for edge in self.edges:
            if self.schedule.placement[edge[0]] != self.schedule.placement[edge[1]]:
                self._check_complete(edge)

    def _find_fault(self, action: Action, cell: Cell) -> str | None:
        if action in self.cells:
            return f"{action} stands here for the second time."
        ahead = action.kind in ("SEND_F", "RECV_B")
        pair = (action.stage, action.peer) if ahead else (action.peer, action.stage)
        if (*pair, action.what) not in self.known:
            return f"There is no edge from stage {pair[0]} to stage {pair[1]} for {action}."
        if action.kind.endswith("B") and pair[0] not in self.trained:
            return f"{action} moves a gradient to stage {pair[0]}, which is frozen and has no backward."
        unit = (action.stage, self.schedule.stage_turn(action.stage).unit_start(action.microbatch), action.slice)
        compute = self.done.get(("F", unit)) if action.kind.endswith("F") else self._backward_action(unit)
        assert compute is not None
        if action.kind.startswith("SEND") and compute > cell:
            return f"{action} stands before {self.schedule.lanes[compute[0]][compute[1]]}, which makes its tensor."
        if action.kind.startswith("RECV") and compute < cell:
            return f"{action} stands behind {self.schedule.lanes[compute[0]][compute[1]]}, which uses its tensor."
        return None

    def _backward_action(self, unit: Unit) -> Cell | None:
        return self.done.get(("B", unit)) or self.done.get(("I", unit))

    def _check_complete(self, edge: Edge) -> None:
        source, target, tensor = edge
        schedule = self.schedule
        source_turn, target_turn = schedule.stage_turn(source), schedule.stage_turn(target)
        for m in filter(
            target_turn.takes_microbatch, filter(source_turn.takes_microbatch, range(schedule.microbatches))
        ):
            for k in range(schedule.slices):
                back = source in self.trained
                here, there = (source, source_turn.unit_start(m), k), (target, target_turn.unit_start(m), k)
                for action, user in (
                    (Action("SEND_F", source, m, k, target, tensor), self.done["F", here]),
                    (Action("RECV_F", target, m, k, source, tensor), self.done["F", there]),
                    (Action("SEND_B", target, m, k, source, tensor), self._backward_action(there) if back else None),
                    (Action("RECV_B", source, m, k, target, tensor), self._backward_action(here) if back else None),
                ):
                    if user is None:  # no gradient comes to a frozen stage
                        continue
                    if action not in self.cells:
                        relation = "behind" if action.kind.startswith("SEND") else "before"
                        what = f"{action} is missing; it must stand {relation} this action."
                        raise bad_cell_error(ScheduleError, what, schedule.lanes, user)


def _check_once(schedule: Schedule) -> None:
    """The rules for REDUCE, NORM and STEP."""
    for lane, actions in enumerate(schedule.lanes):
        last = {action.stage: step for step, action in enumerate(actions) if action.kind in COMPUTE}
        seen: set[Action] = set()
        for step, action in enumerate(actions):
            if action.kind not in ("REDUCE", "NORM", "STEP", "GATHER"):
                continue
            what = None
            if action in seen:
                what = f"{action} stands here for the second time."
            elif action.kind == "REDUCE" and step < last[action.stage]:
                what = f"{action} stands before {actions[last[action.stage]]}, which adds to the gradients."
            elif action.kind in ("NORM", "STEP") and step < max(last.values()):
                what = f"{action} stands before {actions[max(last.values())]}: the gradients are not complete."
            elif action.kind == "REDUCE" and (Action("NORM") in seen or Action("STEP") in seen):
                what = f"{action} stands behind NORM or STEP, which need the reduced gradients."
            elif action.kind == "NORM" and Action("STEP") in seen:
                what = "NORM stands behind STEP, which needs the norm."
            if what is not None:
                raise bad_cell_error(ScheduleError, what, schedule.lanes, (lane, step))
            seen.add(action)
