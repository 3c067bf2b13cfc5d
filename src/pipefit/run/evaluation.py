"""Evaluation on held-out rows: the forward part of a lane, over whole sequences, nothing kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.plan.types import Edge
from pipefit.run.cells import Cell, Operation
from pipefit.run.feed import Feed
from pipefit.run.packed import Counts
from pipefit.run.wiring import Wiring
from pipefit.run.worker import Worker
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
        self.feeds: Mapping[int, Sequence[Feed]] = {}
        self.losses = torch.zeros(len(worker.loss_modules), dtype=torch.float64, device=worker.torch_device)

    def run(self, feeds: Mapping[int, Sequence[Feed]], counts: Counts) -> Tensor:
        """The summed losses over all ranks, one for each of the worker's `loss_modules`."""
        self.feeds = feeds
        self.losses.zero_()
        self.wiring.begin_step(counts)
        for operation in self.operations:
            operation()
        self.wiring.flush()
        if self.worker.world is not None:
            dist.all_reduce(self.losses, group=self.worker.world)
        return self.losses.clone()

    def _forward(self, action: Action) -> Operation:
        worker, stage, microbatch = self.worker, action.stage, action.microbatch
        call = worker.programs[stage].evaluate

        def cells(incoming: bool) -> list[tuple[str, Cell]]:
            return [
                (e.tensor, self.wiring.cell((e.source, e.target, e.tensor, "F"), microbatch, 0))
                for e in worker.plan.edges
                if (e.target if incoming else e.source) == action.stage
            ]

        takes, gives = cells(True), cells(False)
        adds_loss = worker.programs[stage].has_loss and worker.first_shard
        place = worker.loss_place(stage) if adds_loss else 0

        def forward() -> None:
            outputs = call({name: cell.take() for name, cell in takes}, self.feeds[stage][microbatch])
            for name, cell in gives:
                cell.tensor = outputs[name]
            if adds_loss:
                self.losses[place] += outputs["loss"]

        return forward
