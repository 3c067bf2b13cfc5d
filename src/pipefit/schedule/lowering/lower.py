"""Lowering: a computed schedule becomes the full program of every lane, with all communication.

Transfers are inserted by *simulated time*. A SEND follows its producer at once. Its RECV is inserted on the consumer's
lane at that lane's position when the transfer starts: before the action that runs then, or, if the lane is idle, before
the next one. A receive is thus posted when the sender gets there, no buffer is held longer than necessary, and no
receive precedes one that is needed earlier. (PyTorch's own lowering posts receives in the order in which a round-robin
over the lanes emits the senders: pytorch#172668.)

If the costs have `receives_ahead` (gloo), a RECV is posted earlier still: before the use of the previous message.

Proof that the result cannot hang, even if a SEND blocks until its RECV is posted: order all actions by (simulated time,
dependency). In that order every RECV precedes its SEND, every SEND precedes the consumer, and every lane is sorted; so
the first action that has not run can always run. The same order makes both ends of a directed pair of lanes agree on
the sequence of messages, for all tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pipefit.cost.types import CostTable, Ints
from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Action, Schedule, make_actions
from pipefit.schedule.lowering.messages import post_ahead
from pipefit.schedule.problem import Edge, chain_edges, uniform_costs
from pipefit.schedule.taskgraph.compile import TaskGraph, task_graph
from pipefit.schedule.taskgraph.table import SEND_F
from pipefit.schedule.taskgraph.times import TaskTimes, run_graph


def lower_schedule(
    schedule: Schedule,
    edges: Sequence[Edge] | None = None,
    costs: CostTable | None = None,
    *,
    reductions: Iterable[int] | None = None,
    tied: Mapping[str, Sequence[int]] | None = None,
    zero: Iterable[int] = (),
    optimizer: bool = True,
) -> Schedule:
    """Return the lowered schedule.

    `edges` is the DAG of stages (default: the chain). `costs` are the times that order the transfers (default: one
    second for F, I and W). `reductions` are the stages whose gradients are reduced after their last backward (default:
    all). `tied` maps a bucket name to the stages that share its parameters; each gets a REDUCE of that name at the end
    of its lane, in one order everywhere. `zero` are the stages whose parameters are gathered after the step (ZeRO-1).
    Without `optimizer` there is no NORM and no STEP. Raises ScheduleError for a schedule that is lowered already, or
    whose dependencies no order satisfies.
    """
    if schedule.is_lowered:
        raise ScheduleError(
            "The schedule is lowered already.", where=schedule.name, allowed="compute actions only: F, I, W, B"
        )
    dag = tuple(chain_edges(schedule.num_stages) if edges is None else edges)
    if costs is None:
        costs = uniform_costs(schedule.placement, dag)
    lanes = _with_transfers(schedule, task_graph(schedule, dag), costs)
    reduced = set(range(schedule.num_stages) if reductions is None else reductions)
    gathered = set(zero)
    full = []
    for lane, actions in enumerate(lanes):
        ahead = post_ahead(actions, schedule.placement, schedule.turns) if costs.receives_ahead else actions
        body = _with_reductions(ahead, reduced)
        body += [
            Action("REDUCE", stage, what=bucket)
            for bucket, stages in sorted((tied or {}).items())
            for stage in sorted(stages)
            if schedule.placement[stage] == lane
        ]
        if optimizer:
            body += [Action("NORM"), Action("STEP")]
        held = (stage for stage, stage_lane in enumerate(schedule.placement) if stage_lane == lane)
        body += [Action("GATHER", stage) for stage in held if stage in gathered]
        full.append(tuple(body))
    return Schedule(
        name=schedule.name,
        placement=schedule.placement,
        microbatches=schedule.microbatches,
        slices=schedule.slices,
        lanes=tuple(full),
        turns=schedule.turns,
    )


def _with_transfers(schedule: Schedule, graph: TaskGraph, costs: CostTable) -> list[list[Action]]:
    """Return each lane's actions with SEND and RECV merged in.

    Sort keys are (row, phase, time rank): phase 0 is before the row's action, 1 the action, 2 after it. In phases 0 and
    2 transfers are sorted by rank, so that of two lanes that finish at the same moment one sends first.
    """
    transfers = np.flatnonzero(graph.consumer >= 0)
    if not len(transfers):
        return [list(lane) for lane in schedule.lanes]
    rank, slot, slot_phase = _receive_slots(graph, transfers, run_graph(graph, costs))
    rows, count = len(graph.table.kind), len(transfers)
    actions: list[Action] = [action for lane in schedule.lanes for action in lane]
    sends, receives = _transfer_actions(graph, transfers)
    row = np.concatenate((np.arange(rows), graph.row[transfers], slot))
    phase = np.concatenate((np.repeat([1, 2], [rows, count]), slot_phase))
    tie = np.concatenate((np.zeros(rows, dtype=np.int64), 2 * rank + 1, 2 * rank))
    merged = [*actions, *sends, *receives]
    lanes: list[list[Action]] = [[] for _ in schedule.lanes]
    order = np.lexsort((tie, phase, row))
    for index, lane in zip(order.tolist(), graph.table.lane[row[order]].tolist(), strict=True):
        lanes[lane].append(merged[index])
    return lanes


def _receive_slots(graph: TaskGraph, transfers: Ints, times: TaskTimes) -> tuple[Ints, Ints, Ints]:
    """Return, for every transfer, its rank in time, and the (row, phase) on the consumer's lane at which it is posted.

    A transfer is issued when its producer stops. All compute tasks are ranked by (start, number); a transfer comes
    before the tasks that start at that moment, but after its own producer.
    """
    table, stop_s = graph.table, times.stop_s
    producer, consumer = graph.task[graph.row[transfers]], graph.consumer[transfers]
    issue = stop_s[producer]
    compute = np.flatnonzero(graph.consumer < 0)
    by_time = compute[np.lexsort((compute, times.start_s[compute]))]
    time_rank = np.zeros(graph.size, dtype=np.int64)
    time_rank[by_time] = np.arange(len(compute))
    key = np.maximum(np.searchsorted(times.start_s[by_time], issue, side="left"), time_rank[producer] + 1)
    rank = np.empty(len(transfers), dtype=np.int64)
    rank[np.lexsort((transfers, time_rank[producer], key))] = np.arange(len(transfers))

    # Rows of a lane ascend in time rank, so one search in (lane, rank) finds the position of the consumer's lane.
    lane = graph.lane[consumer]
    following = np.searchsorted(
        table.lane * (graph.size + 1) + time_rank[graph.task], lane * (graph.size + 1) + key, side="left"
    )
    assert bool((following <= graph.row[consumer]).all())
    latest = np.maximum(following - 1, table.offset[lane])
    idle = (following > table.offset[lane]) & (stop_s[graph.task[latest]] <= issue)
    return rank, latest, np.where(idle, 2, 0)


def _transfer_actions(graph: TaskGraph, transfers: Ints) -> tuple[list[Action], list[Action]]:
    """Return the SENDs and the RECVs of all transfers."""
    edge, forward = graph.edge[transfers], graph.kind[transfers] == SEND_F
    ends = np.array([entry[:2] for entry in graph.table.edges], dtype=np.int64)[edge]
    source = np.where(forward, ends[:, 0], ends[:, 1]).tolist()
    target = np.where(forward, ends[:, 1], ends[:, 0]).tolist()
    unit = graph.microbatch[transfers].tolist(), graph.slice[transfers].tolist()
    names = [graph.table.edges[entry][2] for entry in edge.tolist()]
    send = ["SEND_F" if entry else "SEND_B" for entry in forward.tolist()]
    receive = ["RECV_F" if entry else "RECV_B" for entry in forward.tolist()]
    sends = zip(send, source, *unit, target, names, strict=True)
    receives = zip(receive, target, *unit, source, names, strict=True)
    return make_actions(sends), make_actions(receives)


def _with_reductions(actions: Sequence[Action], reduced: set[int]) -> list[Action]:
    """Insert a REDUCE after the last backward of every stage in `reduced`, behind the SENDs of that backward."""
    left = reduced & {action.stage for action in actions if action.kind in ("B", "W")}
    insertions: list[tuple[int, int]] = []
    for index in range(len(actions) - 1, -1, -1):
        if not left:
            break
        kind, stage = actions[index][:2]
        if stage in left and kind in ("B", "W"):
            left.remove(stage)
            after = index + 1
            while after < len(actions) and actions[after].kind.startswith("SEND"):
                after += 1
            insertions.append((after, stage))
    result: list[Action] = []
    start = 0
    for after, stage in reversed(insertions):
        result += actions[start:after]
        result.append(Action("REDUCE", stage))
        start = after
    return result + list(actions[start:])
