"""The emulated device of this process: a stage does its real arithmetic, then waits until the emulated device would be
done.

This is the one interface between the lab and the packages that compute. `run/` and `profile/` pass their stages through
`pace_program`, which returns them unchanged if `PIPEFIT_LAB` names no lab. The last backward of a stage is paced layer
by layer, so that reductions start when the emulated device would have started them. So are all actions of a stage with
sharded layers. Time in collectives inside a stage
is added to the device's time (`pace_collective`). Each collective starts when the emulated device would reach it;
otherwise ranks would wait there for each other's real work. A late wake-up is subtracted from the next action if that
follows at once.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import fsum
from pathlib import Path
from typing import Any, TypeVar

from pipefit.cost.static_memory import optimizer_traffic_bytes
from pipefit.lab.layer_work import exchange_count
from pipefit.lab.layer_work import layer_facts as layer_facts
from pipefit.lab.layer_work import stage_layer_s as stage_layer_s
from pipefit.lab.tables import DeviceTable, LayerFacts
from pipefit.model.graph import LOCAL
from pipefit.model.ops.attention import CONTEXT_PARTS
from pipefit.model.ops.packed_attention import SQUARES
from pipefit.optimizers import OptimizerKind

T = TypeVar("T")

INVALID_SHARE = 0.01
"""A run is invalid if more than this share of its actions took longer for real than on the emulated device."""

LAYER_SHARE = 1e-3
"""Tolerance of a layer in the last backward, as a share of its total time. The real work of a layer starts after the
wait for the layer behind it, so a small layer cannot start earlier. The tolerance is a tenth of the devices' jitter."""

AT_ONCE_S = 5e-4
"""An action that starts within this time after the last one did not wait."""


@dataclass(slots=True)
class PaceCounts:
    """Counts of a paced process. Actions before the second step of a stage are warm-up: paced, but not judged."""

    actions: int = 0
    late: int = 0
    "Actions whose real work took longer than the emulated device."
    warm: int = 0
    emulated_s: float = 0.0
    taken_s: float = 0.0
    "Emulated and real seconds of the judged actions."
    worst_s: float = 0.0
    "Largest delay of a late action."


class EmulatedDevice:
    """The emulated device of this process; created from the environment by `emulated_device`."""

    def __init__(self, table: DeviceTable, *, seed: int, number: int, memory_bytes: int) -> None:
        self.table, self.seed, self.number, self.memory_bytes = table, seed, number, memory_bytes
        self.counts = PaceCounts()
        self.exchange_s = 0.0
        "Seconds in collectives since this process began."
        self._turn = self._drawn = 0
        self._started = self._woke = self._debt_s = 0.0
        self._due: Sequence[float] = ()
        self._arrived = 0
        self._before_s = 0.0

    def begin_step(self) -> None:
        """Restart the drift: the device has cooled down between two steps."""
        self._turn = 0

    def draw_factor(self) -> float:
        """Return the factor of the next action: drift within the step, and jitter."""
        self._turn += 1
        self._drawn += 1
        return self.table.drift_factor(self._turn - 1) * self.table.jitter_factor(self.seed, self.number, self._drawn)

    def operator_rates(self) -> tuple[float, float, float]:
        """Return (FLOP/s of large matrix products, bytes/s of a copy, seconds of a small operator), as a profile would
        measure them."""
        large = LayerFacts(dense_flops=1e9, attention_flops=0.0, traffic_bytes=0.0, tokens=8192, context=1)
        table = self.table
        seconds = table.layer_time_s("F", {"F": large}) - table.layer_s
        return 1e9 / seconds, table.memory_bytes_per_s, table.layer_s / 12

    def begin_action(self) -> float:
        """Return the time at which the action that starts now began on the emulated device: earlier than now if the
        last action woke up late."""
        self._started = now = time.perf_counter()
        return now - self._debt_s if now - self._woke < AT_ONCE_S else now

    def expect_collectives(self, due: Sequence[float]) -> None:
        """Set the times at which the emulated device reaches its next collectives, not counting collective time."""
        self._due, self._arrived, self._before_s = due, 0, self.exchange_s

    @property
    def as_expected(self) -> bool:
        """True if the number of collectives was as expected."""
        return self._arrived == len(self._due)

    def await_collective(self) -> None:
        """Wait until the emulated device reaches the collective that is about to begin."""
        if self._arrived < len(self._due):
            self.wait_until(self._due[self._arrived] + self.exchange_s - self._before_s)
        self._arrived += 1

    def wait_until(self, deadline: float) -> tuple[float, float]:
        """Sleep until `deadline`. Returns (seconds by which the call was late, seconds by which the wake-up was
        late)."""
        late_s = time.perf_counter() - deadline
        if late_s >= 0:
            return late_s, 0.0
        time.sleep(-late_s)
        return 0.0, max(0.0, time.perf_counter() - deadline)

    def finish_action(
        self, deadline: float, seconds: float, exchanged_s: float, warm: bool, marks: LayerMarks | None = None
    ) -> None:
        """End an action at `deadline`, if its real work is done by then. `seconds` is its time on the device without
        collectives. `marks` are those of a last backward, which has already waited for its layers."""
        late_s, overslept_s = self.wait_until(deadline)
        self._woke = time.perf_counter()
        self._debt_s = overslept_s
        if marks is not None:
            # The time after the last layer started its reduction; that is not device work.
            late_s = marks.late_s if marks.late_s > LAYER_SHARE * seconds else 0.0
            self._debt_s = overslept_s or marks.overslept_s
        counts = self.counts
        if warm:
            counts.warm += 1
            return
        counts.actions += 1
        counts.emulated_s += seconds
        counts.taken_s += self._woke - self._started - exchanged_s
        if late_s > 0:
            counts.late += 1
            counts.worst_s = max(counts.worst_s, late_s)


@dataclass(slots=True)
class LayerMarks:
    """Delays of the layers of a last backward."""

    late_s: float = 0.0
    "Largest delay of a layer's real work."
    overslept_s: float = 0.0
    "Late wake-up at the last layer."
    excused_s: float = 0.0
    "Delay by the last wake-up and by the start of its reductions."


class PacedStage:
    """A stage program (`run.stage.StageProgram`) at the pace of an emulated device. Other attributes are passed
    through."""

    def __init__(self, program: Any, device: EmulatedDevice) -> None:
        self._program, self._device = program, device
        self._steps = 0
        self._sizes: dict[tuple[int, int], dict[str, int]] = {}
        self._known: dict[tuple[object, ...], list[float]] = {}
        self._arrivals: dict[tuple[object, ...], list[float]] = {}
        """Key: action and sizes. Seconds from the start of the action until the device reaches each collective, without
        collective time."""
        self._counts: dict[tuple[int, str], int] = {}
        "Number of collectives by (layer, action)."
        self.on_layer_gradients: Callable[[int], None] | None = None
        self._sharded: Any = None
        "The sharded layers of the stage: each communicates when the emulated device has done it."

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def bind_sharded_layers(self, sharded: Any) -> None:
        self._sharded = sharded
        self._program.bind_sharded_layers(sharded)

    def begin_step(self, step: int, divisor: int, *weight: float) -> None:
        self._program.begin_step(step, divisor, *weight)
        self._device.begin_step()
        self._steps += 1

    def forward(self, microbatch: int, slice_: int, inputs: Any, feed: Any) -> Any:
        sizes = self._sizes_of(microbatch, slice_, inputs, feed)
        return self._run_paced("F", sizes, lambda: self._program.forward(microbatch, slice_, inputs, feed))

    def backward(self, microbatch: int, slice_: int, gradients: Any) -> Any:
        sizes = self._sizes.pop((microbatch, slice_))
        return self._run_paced("B", sizes, lambda: self._program.backward(microbatch, slice_, gradients))

    def backward_input(self, microbatch: int, slice_: int, gradients: Any) -> Any:
        sizes = self._sizes[microbatch, slice_]
        return self._run_paced("I", sizes, lambda: self._program.backward_input(microbatch, slice_, gradients))

    def backward_weight(self, microbatch: int, slice_: int) -> None:
        sizes = self._sizes.pop((microbatch, slice_))
        self._run_paced("W", sizes, lambda: self._program.backward_weight(microbatch, slice_))

    def _run_paced(self, kind: str, sizes: Mapping[str, int], work: Callable[[], T]) -> T:
        device = self._device
        began, before_s = device.begin_action(), device.exchange_s
        layers_s = self._layer_times(kind, sizes)
        factor = device.draw_factor()
        done, shown_s, marks = self.on_layer_gradients, device.table.action_s, LayerMarks()

        def announce_layer(place: int) -> None:
            """Wait until the emulated device has done a layer and all before it; then announce its gradients."""
            nonlocal shown_s
            shown_s += layers_s[place]
            deadline = began + shown_s * factor + device.exchange_s - before_s
            late_s, marks.overslept_s = device.wait_until(deadline)
            marks.late_s = max(marks.late_s, late_s - marks.excused_s)
            if announces:
                assert done is not None
                done(place)
            marks.excused_s = time.perf_counter() - deadline - max(0.0, late_s - marks.excused_s)

        announces = done is not None and kind in "BW"
        by_layer = announces or self._sharded is not None
        if self._sharded is not None:
            self._sharded.on_layer_end = announce_layer
        else:
            self._program.on_layer_gradients = announce_layer if announces else None
        key = (kind, *sizes.values())
        device.expect_collectives(
            [began + after_s * factor for after_s in self._collective_times(key, kind, sizes, layers_s)]
        )
        result = work()
        if self._sharded is not None:
            self._sharded.on_layer_end = None
        if not device.as_expected:
            self._arrivals[key] = []
        device.expect_collectives(())
        seconds = (device.table.action_s + fsum(layers_s)) * factor
        exchanged_s = device.exchange_s - before_s
        warm = self._steps < 2
        device.finish_action(began + seconds + exchanged_s, seconds, exchanged_s, warm, marks if by_layer else None)
        return result

    def _layer_times(self, kind: str, sizes: Mapping[str, int]) -> list[float]:
        key = (kind, *sizes.values())
        if key not in self._known:
            recompute, still = self._program.recompute, 0 if kind == "F" else self._program.frozen
            self._known[key] = [
                0.0
                if index < still
                else stage_layer_s(self._device.table, layer.graph, kind, self._own_sizes(layer, sizes), recompute)
                for index, layer in enumerate(self._program.layers)
            ]
        return self._known[key]

    def _collective_times(
        self, key: tuple[object, ...], kind: str, sizes: Mapping[str, int], layers_s: Sequence[float]
    ) -> list[float]:
        """Return the seconds from the start of an action until the device reaches each of its collectives, spread
        evenly over the time of their layer. The list is empty if an earlier action of this key ran another number of
        collectives."""
        if key not in self._arrivals:
            arrivals, begin_s = [], self._device.table.action_s
            indices = range(len(layers_s)) if kind == "F" else range(len(layers_s) - 1, -1, -1)
            for index in indices:
                runs = kind == "F" or index >= self._program.frozen
                count = self._exchange_count(index, kind, sizes) if runs else 0
                arrivals += [begin_s + (turn + 0.5) / count * layers_s[index] for turn in range(count)]
                begin_s += layers_s[index]
            self._arrivals[key] = arrivals
        return self._arrivals[key]

    def _exchange_count(self, place: int, kind: str, sizes: Mapping[str, int]) -> int:
        if (place, kind) not in self._counts:
            layer = self._program.layers[place]
            layer_sizes = self._own_sizes(layer, sizes)
            self._counts[place, kind] = exchange_count(layer.graph, kind, layer_sizes, self._program.recompute)
        return self._counts[place, kind]

    def _own_sizes(self, layer: Any, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """Return the sizes of a layer that has its own shares."""
        shard = self._program.shard
        if shard is None or not layer.shares:
            return sizes
        return {**sizes, **_shared_sizes(replace(shard, shares=layer.shares), sizes)}

    def _sizes_of(self, microbatch: int, slice_: int, inputs: Any, feed: Any) -> dict[str, int]:
        rows, tokens = feed.extent(inputs.get(""))
        past = sum(self._sizes[microbatch, earlier]["T"] for earlier in range(slice_))
        sizes = {"B": rows, "T": tokens, "P": past, **_packed_sizes(feed)}
        sizes |= _shared_sizes(self._program.shard, sizes)
        if self._program.sequence is not None:
            sizes[CONTEXT_PARTS] = self._program.sequence.size
        self._sizes[microbatch, slice_] = sizes
        return sizes


def _shared_sizes(shard: Any, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return a device's part of the sizes that are split by shares."""
    full_sizes = {str(part): sizes[str(name)] for name, part in LOCAL.items() if name in sizes}
    return full_sizes if shard is None else {part: shard.length(size) for part, size in full_sizes.items()}


def _packed_sizes(feed: Any) -> dict[str, int]:
    """Return the lengths of packed rows in the sequence, and the summed squares of the image lengths of a packed
    row."""
    data = getattr(feed, "data", {})
    meeting = (("I", "image_places"), ("L", "condition_places"))
    packed = {symbol: int(data[name].shape[1]) for symbol, name in meeting if name in data}
    lengths = getattr(feed, "image_lengths", None)
    return packed if lengths is None else {**packed, SQUARES: sum(length * length for length in lengths)}


def emulated_device() -> EmulatedDevice | None:
    """Return the emulated device of this process. Returns None if `PIPEFIT_LAB` names no lab, or if the lab has no
    table for `PIPEFIT_DEVICE_KIND`."""
    path = os.environ.get("PIPEFIT_LAB", "")
    if not path:
        return None
    return _load_device(path, os.environ.get("PIPEFIT_DEVICE_KIND", ""), int(os.environ.get("PIPEFIT_LAB_DEVICE", "0")))


def pace_program(program: T) -> T:
    """Return the stage program paced by this process's emulated device, or unchanged if there is none."""
    device = emulated_device()
    return program if device is None else PacedStage(program, device)  # type: ignore[return-value]


def step_pacer(elements: int, optimizer: OptimizerKind) -> Callable[[Any, float], None] | None:
    """Return a callback for `Worker.pace` that gives the optimizer step over `elements` float32 numbers the time of the
    emulated device."""
    device = emulated_device()
    if device is None:
        return None
    seconds = optimizer_traffic_bytes(elements, 1.0, "float32", optimizer) / device.table.memory_bytes_per_s

    def pace_step(action: Any, duration_s: float) -> None:
        if action.kind == "STEP":
            device.wait_until(time.perf_counter() - duration_s + seconds)

    return pace_step


def pace_collective(call: Callable[[], T]) -> T:
    """Run `call`, a collective inside a stage, and return its result. An emulated device starts it when it reaches it;
    the time of `call` is not counted as device time."""
    device = emulated_device()
    if device is None:
        return call()
    device.await_collective()
    start = time.perf_counter()
    result = call()
    device.exchange_s += time.perf_counter() - start
    return result


def pace_wait(call: Callable[[], Any]) -> None:
    """Run `call`, a wait for communication that runs beside a stage. An emulated device does no work meanwhile."""
    device = emulated_device()
    if device is None:
        call()
        return
    start = time.perf_counter()
    call()
    device.exchange_s += time.perf_counter() - start


def own_time() -> float:
    """Read a clock that excludes other processes: the emulated device's, or this thread's processor time."""
    return time.thread_time() if emulated_device() is None else time.perf_counter()


def judge_counts(counts: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
    """Return (is the run valid, summary) from the counts of all ranks."""
    actions, late = sum(c["actions"] for c in counts), sum(c["late"] for c in counts)
    real_s, emulated_s = sum(c["taken_s"] for c in counts), sum(c["emulated_s"] for c in counts)
    if not actions:
        return True, "no paced action"
    worst = max(c["worst_s"] for c in counts)
    words = (
        f"{actions} paced actions, {late} ({late / actions:.2%}) with more real work than the emulated device takes"
        f"{f', by up to {worst * 1e3:.1f} ms' if late else ''}; in all {real_s / emulated_s:.4f} of the emulated time"
    )
    return late <= INVALID_SHARE * actions, words


def read_counts(folder: Path) -> dict[int, dict[str, Any]]:
    """Read the counts in the folder that `PIPEFIT_LAB_COUNTS` named, by device."""
    return {int(path.stem): json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}


@cache
def _load_device(path: str, kind: str, number: int) -> EmulatedDevice | None:
    from pipefit.lab.spec import load_lab

    lab = load_lab(path)
    table = lab.devices.get(kind)
    if table is None:
        return None
    memory = int(lab.cluster.kinds[kind].memory_bytes / lab.size_scale)
    device = EmulatedDevice(table, seed=lab.seed, number=number, memory_bytes=memory)
    _fine_timer()
    folder = os.environ.get("PIPEFIT_LAB_COUNTS", "")
    if folder:
        counts_path = Path(folder) / f"{number}.json"
        atexit.register(lambda: counts_path.write_text(json.dumps(asdict(device.counts)) + "\n", encoding="utf-8"))
    return device


def _fine_timer() -> None:
    """Let this thread's sleeps end within a microsecond of the deadline; Linux rounds up by 50 us otherwise."""
    pr_set_timerslack = 29
    ctypes.CDLL(None).prctl(pr_set_timerslack, ctypes.c_ulong(1000), 0, 0, 0)
