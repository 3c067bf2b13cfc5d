"""The worker: interprets this rank's lane of a lowered plan over torch.distributed.

Everything possible is decided before the first step: the lane becomes a flat list of bound operations, one per action,
over preallocated cells and buckets. A step walks that list. No operation waits for the device except where gloo must (a
message, a reduction). A clock and a pacing hook run between the actions, for traces and the lab; they cost nothing
while they are off.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.errors import PlanError
from pipefit.layout import Box, Mesh
from pipefit.optimizers import find_optimizer
from pipefit.plan.types import Edge, Plan
from pipefit.run.stage.program import StageProgram
from pipefit.run.stage_inputs import StageInputs
from pipefit.run.transfers.action_tensors import ActionTensors
from pipefit.run.transfers.cells import Operation, TensorCell
from pipefit.run.transfers.comms import CommGroups
from pipefit.run.transfers.packed import Counts
from pipefit.run.transfers.wiring import TransferWiring
from pipefit.run.update.buckets import GradientBucket, flat_piece
from pipefit.run.update.grad_norm import clip_factor, counts_in_norm, sum_of_squares
from pipefit.run.update.loss_scale import LossScale
from pipefit.run.update.optimizer import OptimizerConfig, learning_rate, optimizer_options
from pipefit.run.update.reduce import GradientReducer
from pipefit.schedule.actions import EVERY, Action
from pipefit.schedule.lowering.frozen import with_backward
from pipefit.simulate.timeline import TimelineSpan

Feeds = Sequence[Sequence[StageInputs]]
"""feeds[microbatch][slice] of this rank: of every unit that its stage takes, in order."""

Divisors = int | Mapping[str, int]
"""Divisor of the summed losses: of the only loss, or by module."""

Frozen = tuple[tuple[int, ...], Box, Tensor, bool]
"""For a frozen parameter: global shape, the local box, the tensor, True if this lane saves it."""


@dataclass(slots=True)
class StepResult:
    """The results of a step, still on the device: reading a value waits for it."""

    loss: Tensor
    "Mean over the labels of the step, float64, the same on all ranks; of several modules, the weighted sum of means."
    grad_norm: Tensor
    "Global, before clipping, float64."
    lr: float

    def read_values(self) -> tuple[float, float]:
        """Return (loss, gradient norm) as numbers; waits for the device once."""
        pair = torch.stack((self.loss, self.grad_norm)).tolist()
        return pair[0], pair[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """The parts of one rank that `build.py` made for a plan."""

    device: int
    "The rank's device in the plan."
    ranks: Mapping[int, int]
    "Device -> rank, for all devices of the plan."
    comms: CommGroups
    world: Any
    "The process group of all ranks."
    programs: Mapping[int, StageProgram]
    "Stage -> its program, for every stage of the lane."
    buckets: Sequence[GradientBucket]
    reducer: GradientReducer
    torch_device: torch.device
    dtype: torch.dtype
    "The computing type."
    master_dtype: torch.dtype
    shape_of: Callable[[Edge, int], Sequence[int]]
    "(edge, slice) -> the shape of its hidden states."
    optimizer: OptimizerConfig
    loss_modules: Sequence[str]
    "The modules with a loss, in the order of loss vectors."
    loss_scale: LossScale | None = None
    "The scale of the loss, under float16."
    frozen: Mapping[str, Frozen] = field(default_factory=dict)
    "Frozen parameters, by global name."
    frozen_buckets: Sequence[GradientBucket] = ()
    "Frozen parameters of which this rank keeps its run (ZeRO-3)."


class Worker:
    """One rank of a run.

    `programs` holds the program of every stage of the lane; `buckets` hold their parameters; `world` is the process
    group of all ranks of the plan (None for a single rank). `build.build_worker` makes all of these from a plan.
    """

    def __init__(self, plan: Plan, setup: WorkerSetup) -> None:
        device, buckets, torch_device = setup.device, setup.buckets, setup.torch_device
        self.plan, self.device, self.ranks = plan, device, setup.ranks
        self.comms, self.world = setup.comms, setup.world
        self.programs, self.buckets, self.reducer = setup.programs, list(buckets), setup.reducer
        self.torch_device, self.dtype = torch_device, setup.dtype
        self.frozen = dict(setup.frozen)
        self.frozen_buckets = tuple(setup.frozen_buckets)
        self.config = setup.optimizer
        self.optimizer = find_optimizer(plan.job.optimizer)
        self.options = optimizer_options(setup.optimizer, self.optimizer)
        self.lane = device_lane(plan, device)
        self.groups: Mapping[int, Mesh] = {stage: plan.stage_mesh(stage) for stage in setup.programs}
        "Stage -> its mesh, for every stage of the lane."
        schedule = plan.to_schedule()
        self.actions = schedule.lanes[self.lane]
        self.trained = with_backward(schedule)
        self.wiring = TransferWiring(
            plan, self.lane, device, setup.comms, setup.ranks, torch_device, setup.dtype, setup.shape_of
        )
        self.ends = ActionTensors(plan, self.wiring, self.trained)
        self._turns = schedule.turns
        pieces = [flat_piece(bucket, setup.master_dtype, setup.reducer.parts_sum(bucket)) for bucket in buckets]
        self.optimizers = [self.optimizer.state(self.optimizer, piece, self.options) for piece in pieces]
        self.pace: Callable[[Action, float], None] | None = None
        "If set, called after every action with its duration without message waits, in seconds; it may sleep (the lab)."
        self.clock: Callable[[], float] = time.perf_counter
        self.tracing = False
        "True while steps record a trace."
        self.trace: list[TimelineSpan] = []
        "The last traced step in the form of the simulator's timeline: seconds since this rank began the step."
        self.trace_waits_s: list[float] = []
        "For each action of `trace`, the seconds it waited for messages at its start."
        self.loss_scale = setup.loss_scale
        self.skips_infinite = setup.loss_scale is not None
        """True if a step whose gradients are not finite changes no parameter. The host then waits for the norm."""
        self.skipped_steps = 0
        self.loss_modules = tuple(setup.loss_modules)
        weights = plan.model.config.get("loss_weights", {})
        self.loss_weights = {name: float(weights.get(name, 1.0)) for name in self.loss_modules}
        self._feeds: Mapping[int, Feeds] = {}
        count = len(self.loss_modules)
        self._losses = torch.zeros(count, dtype=torch.float64, device=torch_device)
        self._scalars = torch.zeros(1 + count, dtype=torch.float64, device=torch_device)
        self._norm = torch.zeros((), dtype=torch.float64, device=torch_device)
        self._lr, self._count = 0.0, 0
        self._counted = [counts_in_norm(bucket, self.groups[bucket.stage], device) for bucket in buckets]
        self.shape_of = setup.shape_of
        "(edge, slice) -> the shape of its hidden states."
        self._operations = self._compile_actions(self.actions)

    def run_step(
        self, feeds: Feeds | Mapping[int, Feeds], step: int, divisor: Divisors, counts: Counts | None = None
    ) -> StepResult:
        """Run one training step. `feeds` are this rank's inputs from the step plan: the same for all its stages, or by
        stage. `divisor` is the number of labels of the step; `counts` are the tokens of every sample of the batch in
        packed spaces."""
        self._feeds = self.inputs_by_stage(feeds)
        self._lr, self._count = learning_rate(self.config, self.options.lr, step), step + 1 - self.skipped_steps
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        self._losses.zero_()
        self._scalars.zero_()
        self.reducer.zero_gradients()
        self.wiring.begin_step(counts or {})
        by_module = self.module_divisors(divisor)
        for stage, program in self.programs.items():
            module = self.plan.stages[stage].module
            program.begin_step(step, by_module.get(module, 1), scale * self.loss_weights.get(module, 1.0))
        if self.tracing or self.pace is not None:
            self._walk_slowly()
        else:
            for operation in self._operations:
                operation()
        self.wiring.wait_for_sends()
        self.reducer.finish_gathers()
        self._feeds = {}
        return StepResult(self.mean_loss(self._scalars[1:], by_module), self._norm.clone(), self._lr)

    @property
    def local_loss(self) -> Tensor:
        """The summed loss of the last step over this rank's own rows; zero if it has no loss."""
        return self._losses.sum()

    def mean_loss(self, losses: Tensor, divisor: Divisors) -> Tensor:
        """Return the training loss, shape (): the sum over modules of weight x summed loss / divisor."""
        by_module = self.module_divisors(divisor)
        means = [
            losses[index] / by_module[name] * self.loss_weights[name] for index, name in enumerate(self.loss_modules)
        ]
        return torch.stack(means).sum()

    def inputs_by_stage(self, feeds: Any) -> Mapping[int, Any]:
        """Return the inputs by stage; unless given by stage, all stages of this rank read the same."""
        return feeds if isinstance(feeds, Mapping) else dict.fromkeys(self.programs, feeds)

    def module_divisors(self, divisor: Divisors) -> Mapping[str, int]:
        if isinstance(divisor, Mapping):
            return divisor
        assert len(self.loss_modules) == 1, f"one divisor for the losses of {self.loss_modules}"
        return {self.loss_modules[0]: divisor}

    def _walk_slowly(self) -> None:
        clock, trace, waits = self.clock, [], []
        incoming = [self._input_cells(action) for action in self.actions]
        begin = clock()
        wait = torch.cuda.synchronize if self.torch_device.type == "cuda" else None
        for action, operation, cells in zip(self.actions, self._operations, incoming, strict=True):
            start = clock()
            for cell in cells:
                cell.await_message()
            if wait is not None:
                wait()
            ready = clock()
            operation()
            if wait is not None:
                wait()
            if self.pace is not None:
                self.pace(action, clock() - ready)
            trace.append(TimelineSpan(self.lane, action, start - begin, clock() - begin))
            waits.append(ready - start)
        if self.tracing:
            self.trace, self.trace_waits_s = trace, waits

    def _input_cells(self, action: Action) -> list[TensorCell]:
        """Return the cells from which a compute action takes its inputs."""
        if action.kind not in ("F", "I", "B"):
            return []
        return self.ends.input_cells(action, "F" if action.kind == "F" else "B")

    # From actions to operations.

    def _compile_actions(self, actions: Sequence[Action]) -> list[Operation]:
        last = {a.stage: index for index, a in enumerate(actions) if a.kind in ("B", "W")}
        operations: list[Operation] = []
        for index, action in enumerate(actions):
            if action.kind == "F":
                operations.append(self._forward_operation(action))
            elif action.kind in ("B", "I", "W"):
                operation = self._weight_operation(action) if action.kind == "W" else self._backward_operation(action)
                if last[action.stage] == index:
                    operation = self._overlap_reductions(operation, action.stage)
                operations.append(operation)
            elif action.kind in ("SEND_F", "SEND_B"):
                operations.append(self.wiring.send_operation(action))
            elif action.kind in ("RECV_F", "RECV_B"):
                operations.append(self.wiring.receive_operation(action))
            else:
                operations.append(self._stage_operation(action))
        return operations

    def _forward_operation(self, action: Action) -> Operation:
        stage, microbatch, slice_ = action.stage, action.microbatch, action.slice
        call = self.programs[stage].forward
        takes, gives = self.ends.make_take(action, "F"), self.ends.make_give(action, "F")
        adds_loss, fed = self.adds_loss(stage), self.feed_index(action)
        loss_index = self.loss_place(stage) if adds_loss else 0

        def run_forward() -> None:
            outputs = call(microbatch, slice_, takes(), self._feeds[stage][fed][slice_])
            gives(outputs)
            if adds_loss:
                self._losses[loss_index] += outputs["loss"]

        return run_forward

    def _backward_operation(self, action: Action) -> Operation:
        stage, microbatch, slice_ = action.stage, action.microbatch, action.slice
        program = self.programs[stage]
        call = program.backward if action.kind == "B" else program.backward_input
        takes, gives = self.ends.make_take(action, "B"), self.ends.make_give(action, "B")

        def run_backward() -> None:
            gives(call(microbatch, slice_, takes()))

        return run_backward

    def feed_index(self, action: Action) -> int:
        """Return the index of an F's inputs among those of its stage, which has one per unit."""
        _, turns, multiple = self._turns[action.stage] if self._turns else EVERY
        return action.microbatch // (turns * multiple)

    def adds_loss(self, stage: int) -> bool:
        """Return True if this device adds the stage's loss to the step's: the first shard of a stage with a loss."""
        return self.programs[stage].has_loss and self.groups[stage].axis_position(self.device, "shard") == 0

    def loss_place(self, stage: int) -> int:
        """Return the index of the module's losses in loss vectors."""
        return self.loss_modules.index(self.plan.stages[stage].module)

    def _weight_operation(self, action: Action) -> Operation:
        microbatch, slice_ = action.microbatch, action.slice
        call = self.programs[action.stage].backward_weight

        def run_weight() -> None:
            call(microbatch, slice_)

        return run_weight

    def _overlap_reductions(self, operation: Operation, stage: int) -> Operation:
        """Wrap the stage's last backward: finished layers start their reductions while it still runs."""
        program, ready = self.programs[stage], self.reducer.layer_callback(stage)

        def last_backward() -> None:
            program.on_layer_gradients = ready
            operation()
            program.on_layer_gradients = None

        return last_backward

    def _stage_operation(self, action: Action) -> Operation:
        stage = action.stage
        if action.kind == "REDUCE":
            # Tied sums wait for both lanes' reductions: `GradientReducer.finish_reductions` runs them before the norm.
            return _do_nothing if action.what else lambda: self.reducer.start_rest(stage)
        if action.kind == "NORM":
            return self._take_norm
        if action.kind == "STEP":
            return self._update_parameters
        if action.kind == "GATHER":
            return lambda: self.reducer.start_gathers(stage)
        raise PlanError(
            "This action is not supported yet.",
            where=f"lane {self.lane}",
            seen=str(action),
            allowed="all kinds but FREE",
        )

    def _take_norm(self) -> None:
        self.reducer.finish_reductions()
        pieces = [b.owned_gradients for b, counted in zip(self.buckets, self._counted, strict=True) if counted]
        self._scalars[0] = sum_of_squares(pieces, self.torch_device)
        self._scalars[1:] = self._losses
        if self.world is not None:
            dist.all_reduce(self._scalars, group=self.world)
        self._norm = self._scalars[0].sqrt()
        if self.loss_scale is not None:
            self._norm = self._norm / self.loss_scale.scale

    def _update_parameters(self) -> None:
        factor: Tensor | float | None = None
        if self.config.max_norm:
            factor = clip_factor(self._norm, self.config.max_norm)
        if self.loss_scale is not None:
            factor = (1.0 if factor is None else factor) / self.loss_scale.scale
        if self.skips_infinite and self._skip_update():
            return
        for bucket, optimizer in zip(self.buckets, self.optimizers, strict=True):
            gradient = bucket.owned_gradients
            if factor is not None:
                gradient.mul_(factor)
            optimizer.step(gradient, self._lr, self._count)

    def _skip_update(self) -> bool:
        """Return True if the gradients are not finite. Counts such steps, and changes the scale of the loss."""
        finite = math.isfinite(self._norm.item())
        self.skipped_steps += not finite
        if self.loss_scale is not None:
            self.loss_scale.update_scale(finite)
        return not finite


def device_lane(plan: Plan, device: int) -> int:
    """Return the lane of a device. Raises PlanError if it holds no stage."""
    for stage, lane in enumerate(plan.order.placement):
        if device in plan.groups[plan.stages[stage].group].devices:
            return lane
    raise PlanError("The device holds no stage.", seen=f"device {device}", allowed=f"{plan.used_devices}")


def last_stage(plan: Plan) -> int:
    """Return the stage that makes the loss: the only one without an edge to another."""
    sources = {edge.source for edge in plan.edges}
    return max(stage for stage in range(len(plan.stages)) if stage not in sources)


def _do_nothing() -> None:
    return None
