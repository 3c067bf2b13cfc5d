"""The hidden tables, and stages that keep to them."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.lab_toys import lab_path, toy_lab

from pipefit.lab import pace
from pipefit.lab.tables import DeviceTable, LayerFacts
from pipefit.model.capture.layers import capture_family
from pipefit.model.registry import open_model, resolve_model
from pipefit.optimizers import find_optimizer
from pipefit.profile.device import describe_rank, measure_rates
from pipefit.profile.layers import LayerBench, PointSamples, ProfiledLayer, typical_times
from pipefit.profile.points import WorkPoint
from pipefit.run.stage_inputs import StageInputs

TABLE = DeviceTable(flops_per_s=1e9, memory_bytes_per_s=1e10, jitter=0.0, boost=0.0)


def facts(tokens: int, attention: float = 0.0, context: int = 1) -> dict[str, LayerFacts]:
    one = LayerFacts(
        dense_flops=1e5 * tokens, attention_flops=attention, traffic_bytes=1e3 * tokens, tokens=tokens, context=context
    )
    return dict.fromkeys("FIW", one)


def test_the_rate_saturates_and_time_grows_with_tokens() -> None:
    times = [TABLE.layer_time_s("F", facts(tokens)) - TABLE.layer_s for tokens in (8, 32, 128, 1024, 8192)]
    rates = [1e5 * tokens / time_s for tokens, time_s in zip((8, 32, 128, 1024, 8192), times, strict=True)]
    assert sorted(times) == times and sorted(rates) == rates
    assert rates[1] == pytest.approx(0.5e9, rel=0.01), "half of the rate at the knee"
    assert rates[-1] == pytest.approx(1e9, rel=0.02)
    assert TABLE.layer_time_s("F", facts(0)) == 0


def test_kinds_differ_and_a_fused_backward_is_less_than_its_parts() -> None:
    forward, inner, weight, fused = (TABLE.layer_time_s(kind, facts(100)) for kind in "FIWB")
    assert len({forward, inner, weight}) == 3
    assert fused == pytest.approx(0.97 * (inner + weight))


def test_attention_fades_with_its_context() -> None:
    near, far = (TABLE.layer_time_s("F", facts(64, 1e7, context)) for context in (1, 4096))
    base = TABLE.layer_time_s("F", facts(64))
    assert (far - base) / (near - base) == pytest.approx(4096**0.05)


def test_slices_of_a_causal_sequence_take_its_attention_together_where_nothing_masked_is_computed() -> None:
    """A causal square costs the sum of its slices' rectangles and triangles; a plain product twice as much."""
    from pipefit.lab.pace import layer_facts

    graph = next(g for g in open_model("tiny").graphs.values() if any(op.kind == "attention" for op in g.operators))
    kinds = {"masked_share": 0.0, "attention_fade": 0.0, "layer_s": 0.0, "knee_tokens": 1e-9, "join": 1.0}
    flash = DeviceTable(flops_per_s=1e9, memory_bytes_per_s=1e18, **kinds)
    plain = replace(flash, masked_share=1.0)

    def seconds(table: DeviceTable, tokens: int, past: int) -> float:
        return table.layer_time_s("F", layer_facts(graph, {"B": 2, "T": tokens, "P": past, "S": tokens}))

    whole = seconds(flash, 64, 0)
    parts = seconds(flash, 40, 0) + seconds(flash, 23, 40) + seconds(flash, 1, 63)
    assert parts == pytest.approx(whole, rel=1e-9)
    attention = layer_facts(graph, {"B": 2, "T": 64, "P": 0, "S": 64})["F"].attention_flops
    assert seconds(plain, 64, 0) - whole == pytest.approx(attention / 0.6e9 * 63 / 128)


def test_jitter_is_seeded_lognormal_with_mean_one() -> None:
    table = DeviceTable(flops_per_s=1e9, memory_bytes_per_s=1e9, jitter=0.02)
    drawn = [table.jitter_factor(1, 0, turn) for turn in range(4000)]
    assert drawn == [table.jitter_factor(1, 0, turn) for turn in range(4000)]
    assert drawn[:5] != [table.jitter_factor(2, 0, turn) for turn in range(5)]
    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=0.002)
    assert statistics.stdev(map(math.log, drawn)) == pytest.approx(0.02, rel=0.05)


def test_the_first_actions_of_a_step_are_faster() -> None:
    table = DeviceTable(flops_per_s=1e9, memory_bytes_per_s=1e9, boost=0.1, boost_actions=4)
    drift = [table.drift_factor(turn) for turn in range(30)]
    assert drift[0] == pytest.approx(0.9) and sorted(drift) == drift and drift[-1] == pytest.approx(1, abs=1e-3)


def emulate(
    monkeypatch: pytest.MonkeyPatch, folder: Path, table: DeviceTable = TABLE, **fields: Any
) -> pace.EmulatedDevice:
    """Make this process a device of a lab."""
    path = lab_path(folder, toy_lab(devices={"slow": table}, **fields))
    for name, value in (("PIPEFIT_LAB", str(path)), ("PIPEFIT_DEVICE_KIND", "slow"), ("PIPEFIT_LAB_DEVICE", "3")):
        monkeypatch.setenv(name, value)
    device = pace.emulated_device()
    assert device is not None and device is pace.emulated_device()
    return device


class Clock:
    """Time that passes only where somebody sleeps; who sleeps wakes up late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late_s: float = 0.0) -> None:
        self.now, self.late_s = 100.0, late_s
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late_s


class Program:
    """A stage of three layers whose real work takes no time; it announces its layers' gradients, last first."""

    recompute, shard, sequence, frozen = "none", None, None, 0

    def __init__(self, work: Callable[[], None] = lambda: None, last: Callable[[], None] = lambda: None) -> None:
        """`work` before the first layer of an action, and `last` before the last one of a backward."""
        graph = tiny_block()
        self.layers = [SimpleNamespace(graph=graph) for _ in range(3)]
        self.on_layer_gradients: Callable[[int], None] | None = None
        self.work, self.last = work, last

    def begin_step(self, step: int, divisor: int) -> None:
        pass

    def forward(self, microbatch: int, slice_: int, inputs: Any, feed: Any) -> str:
        self.work()
        return "outputs"

    def backward(self, microbatch: int, slice_: int, gradients: Any) -> str:
        self.work()
        for place in (2, 1, 0):
            if place == 0:
                self.last()
            if self.on_layer_gradients is not None:
                self.on_layer_gradients(place)
        return "gradients"


@cache
def tiny_block() -> Any:
    model = open_model("tiny")
    return model.layer_graph(model.layers[1])


NONE = {"late": 0, "taken_s": 1.0, "emulated_s": 1.0, "worst_s": 0.0}
FEED = StageInputs(positions=torch.zeros(2, 16))
SIZES = {"B": 2, "T": 16, "P": 0, "S": 16}


def expected_s(kind: str, layers: int = 3) -> float:
    return TABLE.action_s + layers * pace.stage_layer_s(TABLE, tiny_block(), kind, SIZES)


@cache
def frozen_encoder() -> Any:
    config = resolve_model("multimodal-tiny").config
    return capture_family("multimodal", {**config, "frozen": ["vision.encoder"]})


def test_packed_rows_are_paced_by_the_squares_of_their_images_and_seams_by_their_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = frozen_encoder()
    device = emulate(monkeypatch, tmp_path)
    block, embed = (model.layer_graph(model.modules[place].layers[at]) for place, at in ((0, 1), (1, 0)))
    program = Program()
    program.layers = (SimpleNamespace(graph=block, shares=()),)
    stage = pace.pace_program(program)

    def taken_s(lengths: tuple[int, ...]) -> float:
        feed = StageInputs(documents=torch.zeros(1, sum(lengths), dtype=torch.int64), image_lengths=lengths)
        sizes = stage._sizes_of(0, 0, {}, feed)
        assert sizes["squares"] == sum(n * n for n in lengths) and sizes["S"] == sizes["T"]
        return pace.stage_layer_s(device.table, block, "F", sizes)

    assert taken_s((256, 256)) < taken_s((500, 12)) < taken_s((512,))
    sizes = stage._sizes_of(0, 0, {}, StageInputs(documents=torch.zeros(1, 40), image_lengths=(40,)))
    assert pace.stage_layer_s(device.table, block, "W", sizes) == 0.0, "its weights are frozen"
    program.input_gradient = False
    program.layers = (*program.layers, SimpleNamespace(graph=model.layer_graph(model.modules[0].layers[-1]), shares=()))
    program.frozen = 1
    frozen_s, projector_s = stage._layer_times("I", sizes)
    assert frozen_s == 0.0 < projector_s, "nothing before the projector is trained"
    data = {"image_places": torch.zeros(1, 9), "condition_places": torch.zeros(1, 4)}
    sizes = stage._sizes_of(0, 0, {}, StageInputs(tokens=torch.zeros(2, 16), data=data))
    assert (sizes["I"], sizes["J"], sizes["L"], sizes["M"]) == (9, 9, 4, 4)
    assert pace.stage_layer_s(device.table, embed, "F", sizes) > 0.0


def test_nothing_is_paced_outside_a_lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = Program()
    monkeypatch.delenv("PIPEFIT_LAB", raising=False)
    assert pace.pace_program(program) is program and pace.step_pacer(1, find_optimizer("adamw")) is None
    assert pace.pace_collective(lambda: 5) == 5
    emulate(monkeypatch, tmp_path)
    monkeypatch.setenv("PIPEFIT_DEVICE_KIND", "another")
    assert pace.pace_program(program) is program, "a kind without a table"


def test_actions_take_the_time_of_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device, clock = emulate(monkeypatch, tmp_path), Clock(monkeypatch)
    stage = pace.pace_program(Program(lambda: clock.sleep(1e-3)))
    for step in range(2):
        stage.begin_step(step, 1)
        for microbatch in range(4):
            begin = clock.now
            assert stage.forward(microbatch, 0, {}, FEED) == "outputs"
            middle = clock.now
            assert stage.backward(microbatch, 0, {}) == "gradients"
            assert middle - begin == pytest.approx(expected_s("F"))
            assert clock.now - middle == pytest.approx(expected_s("B"))
    counts = device.counts
    assert (counts.warm, counts.actions, counts.late) == (8, 8, 0)
    assert counts.emulated_s == pytest.approx(4 * (expected_s("F") + expected_s("B")))
    assert counts.taken_s == pytest.approx(counts.emulated_s)


def test_waking_up_late_is_taken_off_the_next_action_if_it_waited_for_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device, clock = emulate(monkeypatch, tmp_path, seed=6), Clock(monkeypatch, late_s=2e-3)
    stage = pace.pace_program(Program())
    for step in range(2):
        stage.begin_step(step, 1)
        begin = clock.now
        for microbatch in range(10):
            stage.forward(microbatch, 0, {}, FEED)
        assert clock.now - begin == pytest.approx(10 * expected_s("F") + 2e-3)
        clock.now += 0.1
    assert device.counts.taken_s == pytest.approx(device.counts.emulated_s + 2e-3)
    began, waited = clock.now, 0.01
    stage.forward(10, 0, {}, FEED)
    clock.now += waited
    stage.forward(11, 0, {}, FEED)
    assert clock.now - began == pytest.approx(2 * (expected_s("F") + 2e-3) + waited)


def test_gradients_of_layers_are_ready_when_the_device_would_have_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    emulate(monkeypatch, tmp_path, seed=7)
    clock = Clock(monkeypatch)
    stage = pace.pace_program(Program())
    seen: list[tuple[int, float]] = []
    stage.begin_step(0, 1)
    stage.forward(0, 0, {}, FEED)
    begin = clock.now
    stage.on_layer_gradients = lambda place: seen.append((place, clock.now - begin))
    stage.backward(0, 0, {})
    stage.on_layer_gradients = None
    assert [place for place, _ in seen] == [2, 1, 0]
    assert [at for _, at in seen] == pytest.approx([expected_s("B", done) for done in (1, 2, 3)])


def test_starting_reductions_is_no_work_of_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device, clock = emulate(monkeypatch, tmp_path, seed=8), Clock(monkeypatch)
    stage = pace.pace_program(Program())
    for step in range(2):
        stage.begin_step(step, 1)
        stage.forward(0, 0, {}, FEED)
        begin = clock.now
        stage.on_layer_gradients = lambda place: clock.sleep(1e-3)
        stage.backward(0, 0, {})
        stage.on_layer_gradients = None
        assert clock.now - begin == pytest.approx(expected_s("B") + 1e-3), "the first two run beside the device's work"
    assert device.counts.late == 0 and device.counts.actions == 2


def test_a_layer_whose_real_work_is_late_makes_the_last_backward_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device, clock = emulate(monkeypatch, tmp_path, seed=9), Clock(monkeypatch, late_s=1e-4)
    first_s = expected_s("B", 1)
    stage = pace.pace_program(Program(lambda: clock.sleep(first_s + 0.01)))
    for step in range(2):
        stage.begin_step(step, 1)
        stage.forward(0, 0, {}, FEED)
        stage.on_layer_gradients = lambda place: clock.sleep(5e-4)
        stage.backward(0, 0, {})
        stage.on_layer_gradients = None
    assert device.counts.late == 1 and device.counts.actions == 2
    assert device.counts.worst_s == pytest.approx(0.0102, abs=1e-6), "two sleeps of the test wake up late"


@pytest.mark.parametrize(("share", "late"), [(0.9, 0), (1.1, 1)])
def test_a_small_last_layer_may_be_done_later_by_a_thousandth_of_the_backward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float, late: int
) -> None:
    device, clock = emulate(monkeypatch, tmp_path, seed=10), Clock(monkeypatch)
    layer_s, whole_s = expected_s("B", 1) - expected_s("B", 0), expected_s("B")
    stage = pace.pace_program(Program(last=lambda: clock.sleep(layer_s + share * pace.LAYER_SHARE * whole_s)))
    for step in range(2):
        stage.begin_step(step, 1)
        stage.forward(0, 0, {}, FEED)
        stage.on_layer_gradients = lambda place: None
        stage.backward(0, 0, {})
        stage.on_layer_gradients = None
    assert device.counts.late == late and device.counts.actions == 2


def test_real_work_that_takes_longer_is_counted_and_invalid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device, clock = emulate(monkeypatch, tmp_path, seed=1), Clock(monkeypatch)
    stage = pace.pace_program(Program(lambda: clock.sleep(expected_s("F") + 0.02)))
    for step in range(2):
        stage.begin_step(step, 1)
        stage.forward(0, 0, {}, FEED)
    assert (device.counts.warm, device.counts.actions, device.counts.late) == (1, 1, 1)
    assert device.counts.worst_s == pytest.approx(0.02)
    valid, words = pace.judge_counts([vars_of(device), {**NONE, "actions": 98}])
    assert not valid and "99 paced actions, 1 (1.01%) with more real work than the emulated device takes" in words
    assert pace.judge_counts([vars_of(device), {**NONE, "actions": 99}])[0]
    assert pace.judge_counts([]) == (True, "no paced action")


def vars_of(device: pace.EmulatedDevice) -> dict[str, Any]:
    return {name: getattr(device.counts, name) for name in ("actions", "late", "taken_s", "emulated_s", "worst_s")}


def test_collectives_inside_a_stage_come_on_top(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device, clock = emulate(monkeypatch, tmp_path, seed=2), Clock(monkeypatch)
    stage = pace.pace_program(Program(lambda: pace.pace_collective(lambda: clock.sleep(0.5))))
    begin = clock.now
    for step in range(2):
        stage.begin_step(step, 1)
        stage.forward(0, 0, {}, FEED)
    assert clock.now - begin == pytest.approx(2 * (expected_s("F") + 0.5))
    assert device.counts.late == 0


def test_collectives_begin_when_the_device_has_come_to_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two a layer, evenly over its time, whatever the real work before them takes; none is waited for after an action
    of these sizes did another number of them. The action takes what it takes without, and the collectives."""
    device, clock = emulate(monkeypatch, tmp_path, seed=11), Clock(monkeypatch)
    monkeypatch.setattr(pace, "exchange_count", lambda *_: 2)
    started: list[float] = []
    wanted = 6

    def collective() -> None:
        started.append(clock.now)
        clock.sleep(0.1)

    def work() -> None:
        for _ in range(wanted):
            pace.pace_collective(collective)

    stage = pace.pace_program(Program(work))
    own_s, layer_s = expected_s("F", 0), expected_s("F", 1) - expected_s("F", 0)
    free_s = [own_s + (layer + part) * layer_s for layer in range(3) for part in (0.25, 0.75)]
    for step in range(3):
        stage.begin_step(step, 1)
        started.clear()
        begin = clock.now
        stage.forward(0, 0, {}, FEED)
        even = [begin + after_s + turn * 0.1 for turn, after_s in enumerate(free_s)]
        at_once = [begin + turn * 0.1 for turn in range(wanted)]
        assert started == pytest.approx(at_once if step == 2 else even[:wanted], abs=1e-9)
        assert clock.now - begin == pytest.approx(expected_s("F") + wanted * 0.1)
        wanted = 5
    assert device.counts.late == 0


def test_the_optimizer_step_takes_the_time_of_the_devices_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    emulate(monkeypatch, tmp_path, seed=3)
    clock = Clock(monkeypatch)
    bytes_per_parameter = 28  # AdamW in float32 reads four numbers and writes three
    elements = int(0.06 * TABLE.memory_bytes_per_s / bytes_per_parameter)
    pacer = pace.step_pacer(elements, find_optimizer("adamw"))
    assert pacer is not None
    pacer(SimpleNamespace(kind="F"), 0.01)
    assert clock.now == 100.0
    pacer(SimpleNamespace(kind="STEP"), 0.02)
    assert clock.now == pytest.approx(100.04)


def test_a_profile_sees_the_emulated_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real block, whose real work takes none of the clock's time."""
    device, _ = emulate(monkeypatch, tmp_path, seed=4, size_scale=4.0), Clock(monkeypatch)
    graph = tiny_block()
    bench = LayerBench(ProfiledLayer(graph, "block", "float32"), torch.device("cpu"))
    samples = PointSamples(0, WorkPoint(2, 16), [bench.visit_point(WorkPoint(2, 16), 0.0)])
    seconds, _ = typical_times(samples.visits)
    assert seconds == pytest.approx({kind: expected_s(kind, 1) for kind in "FIWB"})
    assert device.counts.actions + device.counts.warm == 5
    member = describe_rank(0, 0, 4, torch.device("cpu"))
    assert (member.total_bytes, member.process_bytes, member.cores, member.kind) == ((1 << 30) // 4, 0, 4, "slow")
    assert measure_rates(torch.device("cpu")).flops_per_s["float32"] == pytest.approx(1e9, rel=0.02)


def test_counts_are_left_for_whoever_started_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "3.json").write_text(json.dumps({"actions": 4}))
    assert pace.read_counts(tmp_path) == {3: {"actions": 4}}
