"""Evaluation on held-out rows: the forward part of a lane. Only keys and values that later slices read are kept."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.run.transfers.action_tensors import ActionTensors
from pipefit.run.transfers.cells import Operation
from pipefit.run.transfers.packed import Counts
from pipefit.run.transfers.wiring import TransferWiring
from pipefit.run.worker.worker import Feeds, Worker
from pipefit.schedule.actions import Action


class LaneEvaluation:
    """The forward part of a lane: the plan's own order, including slices, without its backward actions.

    Removing actions from a valid order leaves a valid order, so no new deadlock can occur. The live tensors are a
    subset of those in training, so evaluation cannot run out of memory if training does not.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        plan = worker.plan
        self.wiring = TransferWiring(
            plan,
            worker.lane,
            worker.device,
            worker.comms,
            worker.ranks,
            worker.torch_device,
            worker.dtype,
            worker.shape_of,
        )
        self.ends = ActionTensors(plan, self.wiring, worker.trained)
        self.actions = [a for a in worker.actions if a.kind in ("F", "SEND_F", "RECV_F")]
        self.operations = []
        for action in self.actions:
            if action.kind == "F":
                self.operations.append(self._forward_operation(action))
            elif action.kind == "SEND_F":
                self.operations.append(self.wiring.send_operation(action))
            else:
                self.operations.append(self.wiring.receive_operation(action))
        self.feeds: Mapping[int, Feeds] = {}
        self.losses = torch.zeros(len(worker.loss_modules), dtype=torch.float64, device=worker.torch_device)

    def run_batch(self, feeds: Feeds | Mapping[int, Feeds], counts: Counts | None = None) -> Tensor:
        """Return the summed losses of one batch over all ranks, one for each of the worker's `loss_modules`. Arguments
        are those of `Worker.run_step`."""
        self.feeds = self.worker.inputs_by_stage(feeds)
        self.losses.zero_()
        self.wiring.begin_step(counts or {})
        for operation in self.operations:
            operation()
        self.wiring.wait_for_sends()
        if self.worker.world is not None:
            dist.all_reduce(self.losses, group=self.worker.world)
        return self.losses.clone()

    def _forward_operation(self, action: Action) -> Operation:
        worker, stage, microbatch, slice_ = self.worker, action.stage, action.microbatch, action.slice
        call = worker.programs[stage].evaluate_slice
        takes, gives = self.ends.make_take(action, "F"), self.ends.make_give(action, "F")
        adds_loss, fed = worker.adds_loss(stage), worker.feed_index(action)
        loss_index = worker.loss_place(stage) if adds_loss else 0

        def run_forward() -> None:
            outputs = call(microbatch, slice_, takes(), self.feeds[stage][fed][slice_])
            gives(outputs)
            if adds_loss:
                self.losses[loss_index] += outputs["loss"]

        return run_forward
