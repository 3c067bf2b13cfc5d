"""Time single layers on this device: forward, fused backward, and the backward split into I and W.

A layer runs as a stage of the runtime (`run.stage.StageProgram`), so the timings are those of training. Points are
visited in an order that is shuffled anew every round, so that a disturbance of the machine does not fall on one point.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipefit.lab import pace
from pipefit.model.graph import Graph, Operator, TensorSpec, size_value
from pipefit.model.ops import KINDS
from pipefit.precision import TENSOR_TYPE
from pipefit.profile.points import WorkPoint, sizes_at
from pipefit.run.session.faults import is_out_of_memory
from pipefit.run.stage.products import use_product_type
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.run.stage_inputs import StageInputs

PROFILED_ACTIONS = ("F", "B", "I", "W")
WINDOW_S = 0.02
"""A visit repeats its actions for this long."""

MOST_SLICES = 1 << 16
"""Maximum slices of a microbatch of a stage timed with context: more than any point has."""

DEEP = 9
"""Layers of the deeper of the two stages from which the overhead of an action is computed."""

SETTLED = 0.04
"""A point whose two fastest visits differ by more than this share is visited again."""

Call = tuple[float, float]
"""(seconds, seconds of them during which this thread had a processor); equal on a GPU, where events are timed."""

Visit = Mapping[str, Sequence[Call]]
"""Every call of one visit, by action."""


@dataclass(frozen=True, slots=True)
class ProfiledLayer:
    """One layer to measure: its graph, and a name for reports."""

    graph: Graph
    name: str
    dtype: str
    tokens: int = 0
    "The only row length at which the model works (captured as a whole); 0: any length."


@dataclass(slots=True)
class PointSamples:
    """The visits of one point."""

    subject: int
    point: WorkPoint
    visits: list[Visit] = field(default_factory=list)

    @property
    def alive_tokens(self) -> int:
        """Tokens alive at the point, earlier slices included."""
        return self.point.rows * (self.point.tokens + self.point.past)

    def undisturbed_times(self, action: str) -> list[float]:
        """Return `undisturbed_times` of this point."""
        return undisturbed_times(self.visits, action)


class StageBench:
    """Consecutive layers on one device, ready to be timed at any point."""

    def __init__(self, layers: Sequence[StageLayer], dtype: str, device: torch.device) -> None:
        self.layers, self.device, self.product_type = layers, device, dtype
        self.dtype = getattr(torch, TENSOR_TYPE[dtype])
        self._programs: dict[bool, StageProgram] = {}

    def visit_point(self, point: WorkPoint, window_s: float = WINDOW_S) -> Visit:
        """Run (F, B, F, I, W) at `point` for `window_s`, at least once, and return the seconds of each."""
        use_product_type(self.product_type, self.device)
        program = self._stage_program(sliced=bool(point.past))
        program.begin_step(0, point.rows * point.tokens)
        slice_, start = len(point.earlier_slices), 0
        for index, tokens in enumerate(point.earlier_slices):
            program.forward(0, index, *self._random_inputs(WorkPoint(point.rows, tokens), start))
            start += tokens
        inputs, feed = self._random_inputs(point, point.past)
        marks: list[list[Any]] = []
        gradients: dict[str, torch.Tensor] | None = None
        stop = time.perf_counter() + window_s
        while not marks or time.perf_counter() < stop:
            marks.append(line := [self._mark_time()])
            ahead = program.forward(0, slice_, inputs, feed)
            line.append(self._mark_time())
            gradients = gradients or {key: torch.rand_like(value) for key, value in ahead.items() if key != "loss"}
            if len(marks) == 1:
                line[1] = self._mark_time()
            program.backward(0, slice_, dict(gradients))
            line.append(self._mark_time())
            program.forward(0, slice_, inputs, feed)
            line.append(self._mark_time())
            program.backward_input(0, slice_, dict(gradients))
            line.append(self._mark_time())
            program.backward_weight(0, slice_)
            line.append(self._mark_time())
        program.abandon_microbatches()
        return self._mark_durations(marks)

    def drop_state(self) -> None:
        """Free all memory, after a point that did not fit."""
        self._programs.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _stage_program(self, sliced: bool) -> StageProgram:
        if sliced not in self._programs:
            slice_count = MOST_SLICES if sliced else 1
            program = pace.pace_program(
                StageProgram(
                    self.layers,
                    StageSetup(device=self.device, dtype=self.dtype, products=self.product_type, slices=slice_count),
                )
            )
            wide = torch.promote_types(self.dtype, torch.float32)
            buffers = {}
            for name, parameter in program.parameters.items():
                with torch.no_grad():
                    parameter.normal_(0.0, 0.02)
                buffers[name] = torch.zeros(parameter.shape, dtype=wide, device=self.device)
            program.bind_gradients(buffers)
            self._programs[sliced] = program
        return self._programs[sliced]

    def _random_inputs(self, point: WorkPoint, start: int) -> tuple[dict[str, torch.Tensor], StageInputs]:
        """Return random inputs of the layers at a point, `start` tokens into their sequences."""
        shape = (point.rows, point.tokens)
        inputs: dict[str, torch.Tensor] = {}
        for tensor in self.layers[0].graph.inputs:
            if tensor.role == "activation":
                name = "" if not inputs else tensor.name
                inputs[name] = self._random_input(tensor, point)
        feed = StageInputs(
            rows=torch.arange(point.rows, device=self.device),
            positions=torch.arange(start, start + point.tokens, device=self.device).expand(shape).contiguous(),
        )
        data = {}
        for tensor in {tensor.name: tensor for layer in self.layers for tensor in layer.graph.inputs}.values():
            if tensor.role in ("tokens", "labels"):
                sizes = _input_sizes(tensor, point)
                setattr(feed, tensor.role, torch.randint(self._class_count(tensor.role), sizes, device=self.device))
            elif tensor.role == "documents":
                feed.documents = torch.zeros(shape, dtype=torch.int64, device=self.device)
            elif tensor.role == "data":
                data[tensor.name] = self._random_input(tensor, point)
        feed.data = data
        return inputs, feed

    def _random_input(self, tensor: TensorSpec, point: WorkPoint) -> torch.Tensor:
        """Return random values for a floating-point input, zeros for an integer or boolean one."""
        if tensor.dtype in ("compute", "float32"):
            return torch.randn(_input_sizes(tensor, point), device=self.device).to(self.dtype)
        return torch.zeros(_input_sizes(tensor, point), dtype=getattr(torch, tensor.dtype), device=self.device)

    def _class_count(self, role: str) -> int:
        """Return the number of different tokens (rows of the embedding) or labels (columns of the logits)."""
        graphs = [layer.graph for layer in self.layers if any(t.role == role for t in layer.graph.inputs)]
        named = {t.name for graph in graphs for t in graph.inputs if t.role == role}
        class_counts = []
        for graph in graphs:
            for operator in graph.operators:
                if role == "labels" and KINDS[operator.kind].scores_classes:
                    class_counts.append(int(graph.find_tensor(operator.inputs[0]).shape[-1]))
                elif KINDS[operator.kind].is_lookup and operator.inputs[0] in named:
                    class_counts.append(graph.find_parameter(operator.inputs[1]).shape[0])
        return min(class_counts, default=2)

    def _mark_time(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter(), pace.own_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _mark_durations(self, marks: Sequence[Sequence[Any]]) -> Visit:
        calls: dict[str, list[Call]] = {action: [] for action in PROFILED_ACTIONS}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for line in marks:
            spans = [self._time_between(a, b) for a, b in itertools.pairwise(line)]
            for action, span in zip(("F", "B", "F", "I", "W"), spans, strict=True):
                calls[action].append(span)
        return calls

    def _time_between(self, start: Any, stop: Any) -> Call:
        if self.device.type == "cuda":
            seconds = float(start.elapsed_time(stop)) * 1e-3
            return seconds, seconds
        return stop[0] - start[0], stop[1] - start[1]


def _input_sizes(tensor: TensorSpec, point: WorkPoint) -> list[int]:
    """Return the sizes of an input at a point."""
    sizes = sizes_at(point.rows, point.tokens)
    return [size_value(size, sizes) for size in tensor.shape]


class LayerBench(StageBench):
    """One layer on one device. `copies` chains it with itself this many times."""

    def __init__(self, subject: ProfiledLayer, device: torch.device, copies: int = 1) -> None:
        names = [parameter.name for parameter in subject.graph.parameters]
        layers = [
            StageLayer(f"layer{i}", subject.graph, {name: f"{i}.{name}" for name in names}) for i in range(copies)
        ]
        super().__init__(layers, subject.dtype, device)


def survey_points(
    benches: Sequence[StageBench],
    samples: Sequence[PointSamples],
    rounds: int,
    *,
    seed: int = 0,
    window_s: float = WINDOW_S,
    again: int = 0,
    sync: Callable[[], None] = lambda: None,
    agree: Callable[[list[int]], list[int]] = lambda places: places,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Visit every point `rounds` times in shuffled order and record the visits.

    Up to `again` more rounds revisit the points whose fastest visits differ (`unsettled_points`). Processes that
    measure together wait for each other in `sync` before each visit, and use one process's list of such points, from
    `agree`.
    """
    order = random.Random(seed)
    for turn in range(rounds + again):
        places = list(range(len(samples))) if turn < rounds else agree(unsettled_points(samples))
        order.shuffle(places)
        for done, index in enumerate(places, 1):
            sync()
            sample = samples[index]
            sample.visits.append(benches[sample.subject].visit_point(sample.point, window_s))
            if turn < rounds:
                progress(turn * len(samples) + done, rounds * len(samples))


def feasible_points(benches: Sequence[StageBench], samples: Sequence[PointSamples]) -> list[PointSamples]:
    """Return the points that fit into the device's memory. Each is tried with one visit, which is discarded (warm-up).

    After a layer runs out of memory at one point, its points with at least as many alive tokens are not tried.
    """
    limits: dict[int, int] = {}
    fitting = []
    for sample in sorted(samples, key=lambda sample: sample.alive_tokens):
        if sample.alive_tokens >= limits.get(sample.subject, sample.alive_tokens + 1):
            continue
        try:
            benches[sample.subject].visit_point(sample.point, 0.0)
            fitting.append(sample)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            limits[sample.subject] = sample.alive_tokens
            benches[sample.subject].drop_state()
    return [sample for sample in samples if sample in fitting]


def unsettled_points(samples: Sequence[PointSamples]) -> list[int]:
    """Return the indices of the points whose two fastest visits differ by more than `SETTLED` in some action."""
    return [
        index
        for index, sample in enumerate(samples)
        if any(
            len(times) < 2 or times[1] > times[0] * (1 + SETTLED)
            for times in map(sample.undisturbed_times, PROFILED_ACTIONS)
        )
    ]


def typical_times(visits: Sequence[Visit], crowding: float = 1.0) -> tuple[dict[str, float], dict[str, float]]:
    """Return (seconds, spread) by action, of one point.

    A call counts the time during which it had a processor, so interruptions by other work are excluded. A visit is the
    median of its calls, and the point its fastest visit, because a disturbance only ever adds. `crowding` is the number
    of measured processes per core: each then takes that many times as long. An emulated device has a core of its own
    and symmetric noise; there the point is the median visit.
    """
    of_visits = min if pace.emulated_device() is None else statistics.median
    seconds, spread = {}, {}
    for action in PROFILED_ACTIONS:
        visit_times = undisturbed_times(visits, action)
        seconds[action] = of_visits(visit_times) * crowding
        spread[action] = (visit_times[-1] - visit_times[0]) / visit_times[0]
    return seconds, spread


def undisturbed_times(visits: Sequence[Visit], action: str) -> list[float]:
    """Return the median of each visit's calls, without the time that other work took, ascending."""
    return sorted(statistics.median(min(call) for call in visit[action]) for visit in visits)


def action_overhead(dtype: str, device: torch.device, rounds: int = 5) -> dict[str, float]:
    """Return the seconds that an action costs beside its layers, by action, never below zero.

    It is the time of a stage minus the time of its layers, from stages of one and of `DEEP` layers that each negate one
    number.
    """
    graph = Graph(
        inputs=(TensorSpec(name="x", shape=("B", "T", 1)),),
        outputs=("y",),
        operators=(Operator(kind="neg", inputs=("x",), outputs=("y",)),),
        parameters=(),
        tensors=(TensorSpec(name="y", shape=("B", "T", 1)),),
    )
    benches = [LayerBench(ProfiledLayer(graph, "overhead", dtype), device, copies) for copies in (1, DEEP)]
    samples = [PointSamples(index, WorkPoint(1, 1)) for index in range(2)]
    survey_points(benches, samples, rounds)
    single, deep = (typical_times(sample.visits[1:])[0] for sample in samples)
    return {action: max(0.0, (DEEP * single[action] - deep[action]) / (DEEP - 1)) for action in PROFILED_ACTIONS}
