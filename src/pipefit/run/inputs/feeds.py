"""Inputs of one rank for one step: the arrays of the step plan as tensors on the device, copied without waiting."""

from __future__ import annotations

import numpy as np
import torch

from pipefit.data.feed_arrays import FeedArrays, RowReader, feed_arrays
from pipefit.data.stepplan import StepPlan
from pipefit.plan.types import Plan
from pipefit.run.stage_inputs import StageInputs
from pipefit.run.worker.worker import device_lane


def make_inputs(
    plan: Plan, device: int, rows: RowReader, step_plan: StepPlan, torch_device: torch.device
) -> list[list[StageInputs]]:
    """Return inputs[microbatch][slice] of `device` for a training step, or for one batch of an evaluation."""
    stage, replica = device_place(plan, device)
    return [
        [
            _make_input(feed_arrays(rows, step_plan, stage, microbatch, replica, slice_), step_plan.step, torch_device)
            for slice_ in range(len(step_plan.slice_runs))
        ]
        for microbatch in range(plan.order.microbatches)
    ]


def device_place(plan: Plan, device: int) -> tuple[int, int]:
    """Return (a stage of the device's lane, the device's replica)."""
    lane = device_lane(plan, device)
    return plan.order.placement.index(lane), plan.lane_mesh(lane).axis_position(device, "replica")


def _make_input(arrays: FeedArrays, step: int, device: torch.device) -> StageInputs:
    def move_array(array: object) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    documents = arrays.documents_BT
    has_documents = documents is not None and documents.size > 0
    return StageInputs(
        tokens=move_array(arrays.tokens_BT),
        positions=move_array(arrays.positions_BT),
        labels=move_array(arrays.labels_BT),
        documents=None if documents is None else move_array(np.ascontiguousarray(documents)),
        document_bounds=(int(documents[:, 0].min()), int(documents[:, -1].max())) if has_documents else (0, 0),
        rows=move_array(arrays.rows_B),
        step=step,
    )
