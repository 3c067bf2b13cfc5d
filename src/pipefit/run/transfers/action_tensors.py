"""Input and output cells of a compute action.

Usually there is one tensor for every edge. A stage that takes turns exchanges only the microbatches that both ends
take. A stage that takes several microbatches together has a cell for each; its own tensor is their concatenation.
Between stages of one lane with different meshes, an output is exchanged as soon as it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pipefit.plan.types import Plan
from pipefit.run.transfers.cells import TensorCell
from pipefit.run.transfers.wiring import TransferWiring
from pipefit.schedule.actions import Action

Direction = Literal["F", "B"]


class _ActionCell(NamedTuple):
    """One cell of an action."""

    name: str
    "Name of the tensor."
    at: int
    "Index of the microbatch within the unit."
    key: tuple[int, int, str, str]
    cell: TensorCell


class ActionTensors:
    """The cells of one rank's compute actions: way F inputs and outputs, way B the gradients of outputs and inputs."""

    def __init__(self, plan: Plan, wiring: TransferWiring, trained: Collection[int]) -> None:
        """`trained`: the stages that have a backward."""
        self._plan, self._wiring, self._trained = plan, wiring, trained
        self._schedule = plan.to_schedule()

    def input_cells(self, action: Action, way: Direction) -> list[TensorCell]:
        """Return the input cells of the action."""
        return [end.cell for end in self._action_cells(action, way, taking=True)]

    def make_take(self, action: Action, way: Direction) -> Callable[[], dict[str, Tensor]]:
        """Return a function that empties the input cells; gradients of a tensor used by several stages are summed."""
        ends = [*self._action_cells(action, way, taking=True)]
        count = self._schedule.stage_turn(action.stage).multiple
        if count == 1 and len({end.name for end in ends}) == len(ends):
            pairs = [(end.name, end.cell) for end in ends]
            return lambda: {name: cell.take_tensor() for name, cell in pairs}

        def take_tensors() -> dict[str, Tensor]:
            by_name: dict[str, list[Tensor | None]] = {}
            for name, index, _, cell in ends:
                parts = by_name.setdefault(name, [None] * count)
                before, value = parts[index], cell.take_tensor()
                parts[index] = value if before is None else before + value
            return {name: _join_parts(parts) for name, parts in by_name.items()}

        return take_tensors

    def make_give(self, action: Action, way: Direction) -> Callable[[Mapping[str, Tensor]], None]:
        """Return a function that fills the output cells, and exchanges tensors that the lane's devices need in another
        mesh."""
        ends = [*self._action_cells(action, way, taking=False)]
        count, first = self._schedule.stage_turn(action.stage).multiple, action.microbatch
        exchanges = [
            self._wiring.exchange_operation(end.key, first + end.at, action.slice)
            for end in ends
            if self._wiring.is_regridded(end.key)
        ]

        def give_tensors(outputs: Mapping[str, Tensor]) -> None:
            if count == 1:
                for name, _, _, cell in ends:
                    cell.tensor = outputs[name]
            elif ends:
                lengths = [self._wiring.own_tokens(action.stage, first + index) for index in range(count)]
                parts = {name: outputs[name].split(lengths, dim=1) for name in {end.name for end in ends}}
                for name, index, _, cell in ends:
                    cell.tensor = parts[name][index]
            for exchange in exchanges:
                exchange()

        return give_tensors

    def _action_cells(self, action: Action, way: Direction, taking: bool) -> Iterator[_ActionCell]:
        incoming = taking == (way == "F")
        turn = self._schedule.stage_turn(action.stage)
        for edge in self._plan.edges:
            local_stage, peer_stage = (edge.target, edge.source) if incoming else (edge.source, edge.target)
            if local_stage != action.stage or (way == "B" and edge.source not in self._trained):
                continue
            key = (edge.source, edge.target, edge.tensor, way)
            for index in range(turn.multiple):
                if self._schedule.stage_turn(peer_stage).takes_microbatch(action.microbatch + index):
                    cell = self._wiring.tensor_cell(key, action.microbatch + index, action.slice)
                    yield _ActionCell(edge.tensor, index, key, cell)


def _join_parts(parts: list[Tensor | None]) -> Tensor:
    there = [part for part in parts if part is not None]
    assert len(there) == len(parts), "a microbatch of a unit that nobody feeds"
    return there[0] if len(there) == 1 else torch.cat(there, dim=1)
