"""Measurement of a plan's memory on one device: the ranks with the largest need run one at a time, each alone.

A rank builds its worker and runs training steps and an evaluation in a world with synthetic other ranks
(`run/verify/alone.py`). PyTorch's allocators count its peak memory, independently of the cost model: the CPU
allocator's record of every allocation, or CUDA's counters.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipefit.data.rows import RowSplit
from pipefit.data.samples import InputField, UserSamples, field_of
from pipefit.errors import PlanError, RunError
from pipefit.model.graph import Model
from pipefit.model.ops import KINDS
from pipefit.plan.request.sequence_length import fixed_length
from pipefit.plan.types import LanePrediction, Plan
from pipefit.plugins import load_plugins
from pipefit.run.inputs.feeding import BatchSource, SampleBatchSource, TextBatchSource
from pipefit.run.inputs.image_feeding import is_multimodal
from pipefit.run.inputs.random_images import RandomImages
from pipefit.run.session.faults import is_out_of_memory
from pipefit.run.stage.memory_audit import AllocationAudit
from pipefit.run.transfers.comms import CommGroups
from pipefit.run.update.optimizer import OptimizerConfig
from pipefit.run.verify.alone import alone_world
from pipefit.run.worker.build import build_worker
from pipefit.run.worker.worker import device_lane
from pipefit.units import format_bytes

LANES = 4
"""Number of lanes of which one rank is run by default: the fullest relative to their limit."""

VERIFIED_STEPS = 2
"""Training steps of a rank: the second runs with all memory that the first has allocated and kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """The peak memory of one rank, in bytes."""

    build: int
    "Peak while parameters, gradients and optimizer state were created."
    train: int
    "Peak in a training step."
    evaluate: int
    "Peak in an evaluation."
    reserved: int = 0
    "Memory that CUDA's caching allocator reserved on the device; 0 on a CPU, which has no such cache."

    @property
    def largest_bytes(self) -> int:
        return max(self.build, self.train, self.evaluate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Prediction, measurement and limit of one rank, in bytes."""

    rank: int
    device: int
    "The device's number in the cluster."
    lane: int
    predicted_bytes: float
    limit_bytes: float
    measured: MeasuredMemory | None
    "None if the device ran out of memory."

    @property
    def fits_limit(self) -> bool:
        return self.measured is not None and self.measured.largest_bytes <= self.limit_bytes


def critical_ranks(plan: Plan, most: int = LANES) -> tuple[int, ...]:
    """Return the ranks whose memory decides if the plan fits: the fullest device of each lane, at most `most`, in
    descending order of predicted peak over limit. Lanes with equal predictions count once."""
    lanes = lane_predictions(plan)
    order = sorted(range(len(lanes)), key=lambda lane: -lanes[lane].peak_bytes / lanes[lane].limit_bytes)
    distinct: dict[tuple[float, float], int] = {}
    for lane in order:
        distinct.setdefault((lanes[lane].peak_bytes, lanes[lane].limit_bytes), lane)
    ranks = [plan.used_devices.index(_fullest_device(plan, lane, lanes[lane].kind)) for lane in distinct.values()]
    return tuple(ranks[:most])


def is_fullest(plan: Plan, device: int) -> bool:
    """Return True if a device has as many rows and as large a shard as the device of its prediction. That is the
    fullest of its lane, or of its kind in the lane if kinds hold different amounts."""
    lane = device_lane(plan, device)
    group = plan.lane_mesh(lane)
    fullest = _fullest_device(plan, lane, lane_predictions(plan)[lane].for_device(device).kind)
    return all(
        axis.shares[group.axis_position(device, axis.name)] == axis.shares[group.axis_position(fullest, axis.name)]
        for axis in group.axes
    )


def check_ranks(plan: Plan, ranks: Sequence[int]) -> None:
    """Raise RunError for a rank that the plan does not have."""
    for rank in ranks:
        if not 0 <= rank < len(plan.used_devices):
            raise RunError(
                "The plan has no such rank.",
                where="--rank",
                seen=rank,
                allowed=f"0 to {len(plan.used_devices) - 1}: the plan has {len(plan.used_devices)} devices",
            )


def lane_predictions(plan: Plan) -> tuple[LanePrediction, ...]:
    """Return the prediction of every lane. Raises PlanError for a plan without a prediction."""
    if plan.prediction is None:
        raise PlanError(
            "The plan has no prediction to compare a measurement with.",
            where="prediction",
            next_step="name the cluster: --cluster FILE.json or --local N; the simulator then makes one",
        )
    return plan.prediction.lanes


def verify_rank(plan: Plan, model: Model, rank: int, device: torch.device, steps: int = VERIFIED_STEPS) -> RankMemory:
    """Measure one rank in a fresh process of this machine. Raises RunError if this machine cannot decide if it fits."""
    plan_device = plan.used_devices[rank]
    lane = device_lane(plan, plan_device)
    predicted = lane_predictions(plan)[lane].for_device(plan_device)
    check_memory(predicted.peak_bytes, device)
    measured = in_fresh_process(_measured_or_none, plan, model, rank, str(device), steps, rank=rank)
    if measured is None:
        has = _device_bytes(device)
        if has < predicted.limit_bytes:
            raise RunError(
                f"Rank {rank} ran out of memory on a device that is smaller than the plan's.",
                where=str(device),
                seen=format_bytes(has),
                allowed=f"a device with the {format_bytes(predicted.limit_bytes)} of the plan's own, or more",
            )
    return RankMemory(
        rank=rank,
        device=plan_device,
        lane=lane,
        predicted_bytes=predicted.peak_bytes,
        limit_bytes=predicted.limit_bytes,
        measured=measured,
    )


def measure_rank(
    plan: Plan, model: Model, rank: int, device: torch.device, steps: int = VERIFIED_STEPS
) -> MeasuredMemory:
    """Return the memory of a rank, measured in this process, which must not be part of a world."""
    count: Callable[[list[tuple[str, Callable[[], None]]]], MeasuredMemory]
    count = _count_on_cuda if device.type == "cuda" else count_on_cpu
    with alone_world(rank, len(plan.used_devices)), _threads_of_a_run(plan):
        return count(work_phases(plan, model, device, steps))


@contextmanager
def _threads_of_a_run(plan: Plan) -> Iterator[None]:
    """Use one thread per rank, as launchers do by default on one machine: kernels' buffers depend on it."""
    threads = torch.get_num_threads()
    if len(plan.used_devices) > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def work_phases(
    plan: Plan, model: Model, device: torch.device, steps: int, comms: CommGroups | None = None
) -> list[tuple[str, Callable[[], None]]]:
    """Return (name, work) for each phase of this rank of the current world: build, train, evaluate."""
    state: list[Any] = []

    def build_phase() -> None:
        worker = build_worker(plan, model, comms or CommGroups(device), device, OptimizerConfig())
        state.extend((worker, random_batch_source(plan, model, worker.device, device)))

    def train_phase() -> None:
        worker, feeding = state
        for step in range(steps):
            fed = feeding.step_inputs(0)
            worker.run_step(fed.feeds, step, fed.divisor, fed.counts)

    def evaluate_phase() -> None:
        worker, feeding = state
        fed = feeding.evaluation_inputs(0)
        worker.evaluate_batch(fed.feeds, fed.counts)

    return [("build", build_phase), ("train", train_phase), ("evaluate", evaluate_phase)]


def random_batch_source(plan: Plan, model: Model, rank_device: int, device: torch.device) -> BatchSource:
    """Return random data for a device: valid tokens, with images if the model takes them, or the inputs of a captured
    module."""
    if is_multimodal(model):
        return RandomImages(plan, model, vocabulary_size(model), rank_device, device)
    if fixed_length(model) is None:
        return TextBatchSource(plan, RandomText(plan, model), rank_device, device)
    tensors = [tensor for layer in model.layers for tensor in model.layer_graph(layer).inputs]
    fed = {tensor.name: tensor for tensor in tensors if tensor.role != "activation"}  # both names may be x
    fields = {name: field_of(tensor) for name, tensor in fed.items()}
    rows = RandomItems(fields, vocabulary_size(model), 2 * plan.job.batch)
    samples = UserSamples(rows, fields, where="random rows", batch=plan.job.batch, held_out=plan.job.batch)
    return SampleBatchSource(plan, model, samples, fed, rank_device, device, lambda number: number)


class RandomItems:
    """A data set for the inputs of a captured module: random numbers, random tokens, zeros for any other integer."""

    def __init__(self, fields: Mapping[str, InputField], vocabulary: int, count: int) -> None:
        self._fields, self._vocabulary, self._count = fields, vocabulary, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> dict[str, NDArray[Any]]:
        draw = np.random.default_rng(row)
        return {name: self._random_value(name, field, draw) for name, field in self._fields.items()}

    def _random_value(self, name: str, field: InputField, draw: np.random.Generator) -> NDArray[Any]:
        if field.dtype == "float":
            return draw.normal(size=field.shape)
        return draw.integers(0, self._vocabulary if name == "tokens" else 1, field.shape).astype(field.numpy_dtype)


class RandomText:
    """Rows of random valid tokens; token 0 ends a document, if documents are kept apart."""

    separator = 0
    digest = "random"

    def __init__(self, plan: Plan, model: Model) -> None:
        batch, self.length = plan.job.batch, plan.job.sequence + 1
        self.rows = RowSplit(count=2 * batch, sequence=self.length - 1, last_labels=self.length - 1, held_out=batch)
        self.vocabulary = vocabulary_size(model)

    def row(self, index: int) -> NDArray[np.int64]:
        return np.random.default_rng(index).integers(0, self.vocabulary, self.length)


def vocabulary_size(model: Model) -> int:
    """Return the number of tokens in the model's vocabulary: the rows of its token embedding; 2 if it has none."""
    for layer in model.layers:
        graph = model.layer_graph(layer)
        tokens = {tensor.name for tensor in graph.inputs if tensor.role == "tokens"}
        tables = {parameter.name: parameter for parameter in graph.parameters}
        for operator in graph.operators:
            if KINDS[operator.kind].is_lookup and tokens & {*operator.inputs}:
                return min(int(tables[name].shape[0]) for name in operator.inputs if name in tables)
    return 2


def check_memory(needed_bytes: float, device: torch.device) -> None:
    """Raise RunError if this machine lacks the memory to run a rank that needs `needed_bytes`."""
    has = _free_bytes(device)
    if needed_bytes > has:
        raise RunError(
            "This machine has too little memory to run a rank of the plan.",
            where=str(device),
            seen=f"{format_bytes(has)} free, and the rank is predicted to need {format_bytes(needed_bytes)}",
            next_step="run `pipefit verify` on one of the devices that the plan is for",
        )


def in_fresh_process(work: Callable[..., Any], *arguments: Any, rank: int) -> Any:
    """Return the result of `work` in a new process, free of earlier state. Raises RunError if it is killed."""
    import torch.multiprocessing as multiprocessing

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler logs its start and end
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_run_with_plugins, work, *arguments).result()
        except BrokenProcessPool:
            raise RunError(
                f"The process of rank {rank} was killed before it was done: most likely the machine ran out of memory.",
                where=f"rank {rank}",
                next_step="run `pipefit verify` on a machine with more memory",
            ) from None


def _run_with_plugins(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `work`, with the plug-ins that this new process has not loaded yet."""
    load_plugins()
    return work(*arguments)


def _measured_or_none(plan: Plan, model: Model, rank: int, device: str, steps: int) -> MeasuredMemory | None:
    try:
        return measure_rank(plan, model, rank, torch.device(device), steps)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return None
        raise


def count_on_cpu(work: Sequence[tuple[str, Callable[[], None]]]) -> MeasuredMemory:
    """Return the peaks of these phases, from this thread's allocations: memory freed by another thread still counts."""
    gc.collect()  # an earlier worker released during the audit must not count as freed memory
    with AllocationAudit() as audit:
        for name, call in work:
            AllocationAudit.mark_phase(name, call)()
    return MeasuredMemory(**{phase.name: phase.peak_bytes for phase in audit.usage})


def _count_on_cuda(work: Sequence[tuple[str, Callable[[], None]]]) -> MeasuredMemory:
    peaks = {}
    for name, call in work:
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated()
    return MeasuredMemory(**peaks, reserved=torch.cuda.memory_reserved())


def _fullest_device(plan: Plan, lane: int, kind: str) -> int:
    """Return the device of a lane and kind with most rows and the largest shard: the one that the prediction is for."""
    group, said = plan.lane_mesh(lane), lane_predictions(plan)[lane]
    return max(
        [device for device in group.devices if said.for_device(device).kind == kind],
        key=lambda device: (
            tuple(axis.shares[group.axis_position(device, axis.name)] for axis in group.axes),
            -plan.used_devices.index(device),
        ),
    )


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next((line for line in lines if line.startswith("MemAvailable:")), "")
    except OSError:
        available = ""
    return float(available.split()[1]) * 1024 if available else float("inf")


def _device_bytes(device: torch.device) -> float:
    return float(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else _free_bytes(device)
