"""Inputs of one rank for one step: the arrays of the step plan as tensors on the device, copied without waiting."""

from __future__ import annotations

import numpy as np
import torch

from pipefit.data.feed_arrays import FeedArrays, RowReader, feed_arrays
from pipefit.data.stepplan import StepPlan
from pipefit.layout import Run, zigzag_runs
from pipefit.plan.types import Plan
from pipefit.run.stage_inputs import StageInputs
from pipefit.run.worker.worker import device_lane


def make_inputs(
    plan: Plan, device: int, rows: RowReader, step_plan: StepPlan, torch_device: torch.device
) -> list[list[StageInputs]]:
    """Return inputs[microbatch][slice] of `device` for a training step, or for one batch of an evaluation."""
    stage, replica = device_place(plan, device)
    runs, part = token_runs(plan, device), row_part(plan, device)

    def arrays_of(microbatch: int, slice_: int) -> FeedArrays:
        arrays = feed_arrays(rows, step_plan, stage, microbatch, replica, slice_, part)
        return arrays.take_tokens(runs) if runs else arrays

    return [
        [
            _make_input(arrays_of(microbatch, slice_), step_plan.step, torch_device)
            for slice_ in range(len(step_plan.slice_runs))
        ]
        for microbatch in range(plan.order.microbatches)
    ]


def device_place(plan: Plan, device: int) -> tuple[int, int]:
    """Return (a stage of the device's lane, the device's replica)."""
    lane = device_lane(plan, device)
    return plan.order.placement.index(lane), plan.lane_mesh(lane).axis_position(device, "replica")


def row_part(plan: Plan, device: int) -> tuple[int, int]:
    """Return (position, size) of the expert axis that divides the rows of the device's replica; (0, 1) without one."""
    mesh = plan.lane_mesh(device_lane(plan, device))
    return mesh.axis_position(device, "expert"), mesh.find_axis("expert").size


def token_runs(plan: Plan, device: int) -> tuple[Run, ...]:
    """Return the tokens of every sequence that a device holds, in its order; () for complete sequences."""
    mesh = plan.lane_mesh(device_lane(plan, device))
    parts = mesh.find_axis("context").size
    return zigzag_runs(plan.job.sequence, parts)[mesh.axis_position(device, "context")] if parts > 1 else ()


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
