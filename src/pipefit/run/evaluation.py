"""Evaluation on held-out rows: the forward part of a lane, over whole sequences, nothing kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.plan.types import Edge
from pipefit.run.feed import Feed
from pipefit.run.wiring import Cell, Operation, Wiring
from pipefit.run.worker import Worker, last_stage
from pipefit.schedule.actions import Action


class Evaluation:
    """The forward part of a lane, over whole sequences: the plan's own order without its backward actions.

    Leaving actions out of an order that works leaves an order that works, so nothing new can deadlock.
    """

    def __init__(self, worker: Worker, shape_of: Callable[[Edge, int], Sequence[int]]) -> None:
        self.worker = worker
        plan = worker.plan
        self.wiring = Wiring(
            plan,
            worker.lane,
            worker.device,
            worker.comms,
            worker.ranks,
            worker.torch_device,
            worker.dtype,
            lambda edge, _: shape_of(edge, -1),
        )
        self.actions = [a for a in worker.actions if a.kind in ("F", "SEND_F", "RECV_F") and a.slice == 0]
        self.operations = []
        for action in self.actions:
            if action.kind == "F":
                self.operations.append(self._forward(action))
            elif action.kind == "SEND_F":
                self.operations.append(self.wiring.send(action))
            else:
                self.operations.append(self.wiring.receive(action))
        self.feeds: Sequence[Feed] = ()
        self.loss = torch.zeros((), dtype=torch.float64, device=worker.torch_device)

    def run(self, feeds: Sequence[Feed]) -> Tensor:
        self.feeds = feeds
        self.loss.zero_()
        for operation in self.operations:
            operation()
        self.wiring.flush()
        if self.worker.world is not None:
            dist.all_reduce(self.loss, group=self.worker.world)
        return self.loss.clone()

    def _forward(self, action: Action) -> Operation:
        worker, microbatch = self.worker, action.microbatch
        call = worker.programs[action.stage].evaluate

        def cells(incoming: bool) -> list[tuple[str, Cell]]:
            return [
                (e.tensor, self.wiring.cell((e.source, e.target, e.tensor, "F"), microbatch, 0))
                for e in worker.plan.edges
                if (e.target if incoming else e.source) == action.stage
            ]

        takes, gives = cells(True), cells(False)
        adds_loss = action.stage == last_stage(worker.plan) and worker.first_shard

        def forward() -> None:
            outputs = call({name: cell.take() for name, cell in takes}, self.feeds[microbatch])
            for name, cell in gives:
                cell.tensor = outputs[name]
            if adds_loss:
                self.loss += outputs["loss"]

        return forward
