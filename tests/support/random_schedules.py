"""Random valid schedules and random costs, for property tests of lowering, checking and simulation."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import strategies as st

from pipefit.cost.types import ActionTable, CostTable, EdgeCost
from pipefit.schedule import Action, Edge, Schedule, chain_edges


def random_schedule(
    rng: random.Random, placement: tuple[int, ...], microbatches: int, slices: int, edges: tuple[Edge, ...]
) -> Schedule:
    """A computed schedule built by taking any action that is ready, again and again; each stage splits or fuses."""
    stages = len(placement)
    split = [rng.random() < 0.5 for _ in range(stages)]
    lanes: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    todo = {
        Action(kind, stage, m, k)
        for stage in range(stages)
        for kind in (("F", "I", "W") if split[stage] else ("F", "B"))
        for m in range(microbatches)
        for k in range(slices)
    }
    done: set[Action] = set()

    def backward(stage: int, m: int, k: int) -> Action:
        return Action("I" if split[stage] else "B", stage, m, k)

    def needs(action: Action) -> list[Action]:
        _, stage, m, k, _, _ = action
        if action.kind == "F":
            before = [Action("F", source, m, k) for source, target, _ in edges if target == stage]
            return before + ([Action("F", stage, m, k - 1)] if k else [])
        if action.kind == "W":
            return [Action("I", stage, m, k)]
        before = [backward(target, m, k) for source, target, _ in edges if source == stage]
        before += [backward(stage, m, k + 1)] if k + 1 < slices else []
        return [*before, Action("F", stage, m, k)]

    greedy = rng.random()  # how much backwards are preferred: schedules between GPipe and 1F1B
    while todo:
        ready = sorted(action for action in todo if all(need in done for need in needs(action)))
        back = [action for action in ready if action.kind != "F"]
        action = rng.choice(back if back and rng.random() < greedy else ready)
        todo.remove(action)
        done.add(action)
        lanes[placement[action.stage]].append(action)
    return Schedule(
        name="random",
        placement=placement,
        microbatches=microbatches,
        slices=slices,
        lanes=tuple(map(tuple, lanes)),
    )


def random_costs(rng: random.Random, schedule: Schedule, edges: tuple[Edge, ...], whole: bool) -> CostTable:
    """Costs that differ by stage, and sometimes by microbatch and slice. `whole` numbers make many ties."""

    def value(high: float) -> float:
        return float(rng.randint(0, int(high))) if whole else rng.random() * high

    def array(*shape: int, high: float) -> np.ndarray:
        kept = tuple(size if rng.random() < 0.5 else 1 for size in shape)
        return np.array([value(high) for _ in range(int(np.prod(kept)))]).reshape(kept)

    shape = (schedule.num_stages, schedule.microbatches, schedule.slices)

    def table(held: float) -> ActionTable:
        return ActionTable(
            time_s=array(*shape, high=4), held_bytes=held * array(*shape, high=6), peak_bytes=array(*shape, high=3)
        )

    costs = []
    for source, target, tensor in edges:
        ports = [array(*shape[1:], high=2) for _ in range(2)]
        costs.append(
            EdgeCost(
                source=source,
                target=target,
                tensor=tensor,
                forward_s=ports[0] + value(3),
                backward_s=ports[1] + value(3),
                forward_port_s=ports[0],
                backward_port_s=ports[1],
                forward_bytes=array(*shape[1:], high=5),
                backward_bytes=array(*shape[1:], high=5),
                forward_sent_bytes=array(*shape[1:], high=4),
                backward_sent_bytes=array(*shape[1:], high=4),
            )
        )
    lanes = len(schedule.lanes)
    return CostTable(
        actions={"F": table(1.0), "I": table(0.5), "W": table(-1.0), "B": table(-1.0)},
        edges=tuple(costs),
        reduce_s=np.array([value(3) for _ in range(schedule.num_stages)]),
        gather_s=np.array([value(3) for _ in range(schedule.num_stages)]),
        step_s=np.array([value(2) for _ in range(lanes)]),
        static_bytes=np.array([value(9) for _ in range(lanes)]),
        overhead_s=value(1),
    )


def random_shape(rng: random.Random) -> tuple[tuple[int, ...], tuple[Edge, ...]]:
    """(placement, edges): a chain, a V, a loop or any placement; sometimes with skips and named tensors."""
    lanes = rng.randint(1, 4)
    chunks = rng.randint(1, 2)
    kind = rng.choice(("loop", "vee", "any"))
    one = list(range(lanes))
    if kind == "loop":
        placement = one * chunks
    elif kind == "vee":
        placement = one + one[::-1]
    else:
        placement = one + [rng.randrange(lanes) for _ in range(rng.randint(0, 3))]
        rng.shuffle(placement)
    edges = list(chain_edges(len(placement)))
    if len(placement) > 2 and rng.random() < 0.4:
        source = rng.randrange(len(placement) - 2)
        edges.append((source, rng.randrange(source + 2, len(placement)), "skip"))
    if len(edges) > 1 and rng.random() < 0.2:
        edges.append((*edges[0][:2], "second"))
    if len(placement) > 2 and rng.random() < 0.2:
        edges.pop(0)  # two sources, as a model of two modules has
        if not any(edge[0] == 0 for edge in edges):
            edges.append((0, len(placement) - 1, ""))
    return tuple(placement), tuple(edges)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, tuple[Edge, ...], CostTable]:
    """(computed schedule, edges, costs)."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    placement, edges = random_shape(rng)
    schedule = random_schedule(rng, placement, rng.randint(1, 4), rng.randint(1, 3), edges)
    return schedule, edges, random_costs(rng, schedule, edges, whole=rng.random() < 0.6)
