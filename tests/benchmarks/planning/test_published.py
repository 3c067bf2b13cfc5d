"""The file of published configurations, and its rows as requests; `benchmarks/planning/published.py --quick` runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planning.published import (
    FAMILIES,
    OutOfTimeError,
    PlanMaker,
    RunLimits,
    find_obstacles,
    is_beaten,
    judge_rows,
    limit_time,
    time_plan,
)
from pipefit.cluster.kinds import RESERVED_SHARE
from pipefit.cluster.topology import device_count
from pipefit.errors import ClusterError, ModelError
from pipefit.model.registry import resolve_model
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.types import Plan
from pipefit.validate.published import (
    PublishedDevice,
    PublishedRow,
    cluster_of,
    constraint_texts,
    model_config,
    model_source,
    published_step_s,
    read_published,
)

ROOT = Path(__file__).parents[3]
PUBLISHED = read_published()
ROWS = {row.name: row for row in PUBLISHED.rows}


@pytest.mark.parametrize("row", PUBLISHED.rows, ids=list(ROWS))
def test_row_agrees_with_itself(row: PublishedRow) -> None:
    assert row.sources and {*row.sources} <= {*PUBLISHED.sources} and row.where and row.family in FAMILIES
    assert row.model in PUBLISHED.models and row.device in PUBLISHED.devices
    degrees = (row.dp, row.tp, row.cp, row.pp, row.ep, row.vp or 1, row.mbs or 1, row.batch, row.sequence)
    assert all(type(degree) is int and degree >= 1 for degree in degrees)
    assert row.dp * row.tp * row.cp * row.pp == row.devices
    assert row.batch % (row.dp * (row.mbs or 1)) == 0
    assert (row.dp * row.cp * row.tp) % row.ep == 0, "experts are spread over the devices of a stage"
    assert row.zero in (None, 0, 1, 2, 3) and row.recompute in (None, "none", "selective", "full")
    assert (row.pp > 1) or (row.vp == 1 and row.schedule is None)
    assert row.vp is None or (row.schedule == "interleaved-1f1b") == (row.vp > 1)
    assert (row.sp is None) if row.tp == 1 else True


def test_file_has_every_source_once() -> None:
    assert len(ROWS) == len(PUBLISHED.rows) >= 100
    assert all(source.title and source.url.startswith("https://") for source in PUBLISHED.sources.values())
    assert {name for row in PUBLISHED.rows for name in row.sources} == {*PUBLISHED.sources}
    assert {row.model for row in PUBLISHED.rows} == {*PUBLISHED.models}
    assert {row.device for row in PUBLISHED.rows} <= {*PUBLISHED.devices}
    assert all(model.source for model in PUBLISHED.models.values())
    assert Counter(row.family for row in PUBLISHED.rows).keys() == {*FAMILIES}


def test_published_operations_give_published_aggregates() -> None:
    """The SC21 paper's table 1 gives 502.0 PFLOP/s for its largest model: 163 TFLOP/s on each of 3072 devices."""
    row = ROWS["sc21-1t"]
    step_s = published_step_s(row, PUBLISHED)
    assert step_s is not None and row.tflops_per_s_per_device is not None
    parameters = 1008.0e9
    assert step_s * 502.0e15 == pytest.approx(8 * parameters * row.batch * row.sequence, rel=0.02), "its equation 4"
    assert published_step_s(ROWS["selene-22b-full"], PUBLISHED) == 1.42
    assert published_step_s(ROWS["titan-8b-8"], PUBLISHED) == pytest.approx(16 * 8192 / (8 * 6667))
    assert published_step_s(ROWS["nemo-llama3-8b-bf16"], PUBLISHED) is None


def test_degrees_become_constraints() -> None:
    row = ROWS["sc21-76b"]
    constraints = parse_constraints(constraint_texts(row), row.batch)
    assert (constraints.replica_count, constraints.shard_count, constraints.context) == (32, 8, 1)
    assert constraints.placement == tuple(stage % 4 for stage in range(12)), "60 layers, 5 on each of 12 stages"
    assert (constraints.schedule, constraints.recompute) == ("interleaved-1f1b", ("full",))
    assert (constraints.sharding, constraints.sharded_state) == ("megatron", "none")
    assert constraints.microbatches == 1792 // (32 * 2)
    row = ROWS["titan-8b-cp4"]
    constraints = parse_constraints(constraint_texts(row), row.batch)
    assert (constraints.replica_count, constraints.context, constraints.stages) == (2, 4, 1)
    assert (constraints.sharded_state, constraints.sharding) == ("parameters", None)


def test_unknown_degrees_stay_free() -> None:
    row = ROWS["titan-405b-interleaved"]
    constraints = parse_constraints(constraint_texts(row), row.batch)
    assert (constraints.stages, constraints.placement, constraints.microbatches) == (None, None, None)
    assert (constraints.devices, constraints.schedule) == (512, "interleaved-1f1b")
    assert "recompute" not in " ".join(constraint_texts(ROWS["sc21-175b-zero3-384"]))


def test_expert_parallelism_is_within_data_and_tensor_parallelism() -> None:
    constraints = parse_constraints(constraint_texts(ROWS["nemo-mixtral-8x7b"]), 256)
    assert (constraints.sharding, constraints.shard_count, constraints.replica_count) == ("expert", 8, 2)
    constraints = parse_constraints(constraint_texts(ROWS["nemo-mixtral-8x22b"]), 256)
    assert (constraints.sharding, constraints.shard_count, constraints.expert) == ("megatron-sp", 4, 2)
    assert (constraints.replica_count, constraints.context) == (1, 8)


def test_missing_devices_and_models_are_refused(tmp_path: Path) -> None:
    future = replace(PUBLISHED, devices={"B200": PublishedDevice(kind="B2000", source="none")})
    with pytest.raises(ClusterError, match="B2000"):
        cluster_of(ROWS["bridge-llama3-8b-b200"], future)
    with pytest.raises(ModelError, match="lacks the field"):
        resolve_model(model_source(ROWS["nemo-deepseek-v3"], PUBLISHED, tmp_path))


def test_rows_lack_devices_and_models_alone(tmp_path: Path) -> None:
    maker = PlanMaker(PUBLISHED, RunLimits(pinned_s=1, free_s=1, max_devices=1), tmp_path)
    lacking = {row.name: {*find_obstacles(row, maker)} for row in PUBLISHED.rows}
    assert set().union(*lacking.values()) == {"model"}
    assert lacking["bridge-deepseek-v3"] == {"model"} and not lacking["bridge-qwen3-235b-gb300"]
    assert not lacking["sc21-1t"] and not lacking["titan-405b-cp8"]
    assert sum(not axes for axes in lacking.values()) >= 100


def test_cluster_has_the_published_devices() -> None:
    for row in PUBLISHED.rows:
        if row.devices <= 64:
            assert device_count(cluster_of(row, PUBLISHED)) == row.devices
    kind = cluster_of(ROWS["titan-8b-8"], PUBLISHED).kinds["H100"]
    assert kind.memory_bytes == round(96e9 * (1 - RESERVED_SHARE)) and kind.memory_bandwidth_bytes_per_s == 2.4e12


def test_model_sizes_are_those_of_the_publication(tmp_path: Path) -> None:
    sizes = PUBLISHED.models["gpt-18b"]
    config = model_config(sizes, 2048)
    assert (config["n_layer"], config["n_embd"]) == (sizes.layers, sizes.hidden)
    described = resolve_model(model_source(ROWS["sc21-18b"], PUBLISHED, tmp_path))
    assert described.family == "gpt2" and described.config["n_head"] == 48
    described = resolve_model(model_source(ROWS["nemo-qwen3-235b"], PUBLISHED, tmp_path))
    assert (described.config["num_experts"], described.config["head_dim"]) == (128, 128)
    described = resolve_model(model_source(ROWS["mpt-13b-8-long"], PUBLISHED, tmp_path))
    assert described.config["n_positions"] == 16384


def test_a_shorter_pinned_step_beats_the_free_plan() -> None:
    row = {"row": "a", "outcome": "planned", "free_outcome": "planned", "ratio": 1.006, "pinned_cpu_s": 2.5}
    assert is_beaten(row) and not is_beaten({**row, "ratio": 1.004})
    assert is_beaten({**row, "ratio": None, "free_outcome": "does not fit"})
    assert not is_beaten({**row, "ratio": None, "free_outcome": "skipped: more than 64 devices"})
    lacking = {"row": "b", "outcome": "not expressible", "obstacles": {"ep": "", "model": ""}}
    verdicts = judge_rows([row, lacking])
    assert (verdicts["slow"], verdicts["faster than free"], verdicts["compared"]) == (["a"], ["a"], 1)
    assert verdicts["not expressible"] == {"ep": ["b"], "model": ["b"]}


def test_a_plan_stops_at_its_limit() -> None:
    with pytest.raises(OutOfTimeError), limit_time(0.05):
        while True:
            pass


def test_a_crash_is_an_outcome() -> None:
    def make_nothing() -> Plan:
        raise AssertionError

    timed = time_plan(make_nothing, 1.0)
    assert timed["outcome"] == "crashed" and "make_nothing" in timed["error"]
    row = {"row": "a", "outcome": "planned", "free_outcome": "crashed", "ratio": None, "pinned_cpu_s": 0.1}
    assert judge_rows([row])["crashed"] == ["a"]


def test_rows_of_one_request_share_their_free_plan() -> None:
    row = ROWS["sc21-figure15-tp2"]
    assert row.request == ROWS["sc21-figure15-tp8"].request == replace(row, mbs=4, zero=1).request
    assert row.request != ROWS["sc21-figure16-mbs1"].request


@pytest.mark.slow
def test_quick_compares_small_rows(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.planning.published", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stderr
    text = out.read_text()
    assert str(ROOT) not in text and str(tmp_path) not in text
    result = json.loads(text)
    assert {"commit", "date", "machine", "packages", "command", "python"} <= set(result["provenance"])
    assert result["verdicts"]["outcomes"] == {"planned": 2}
    assert result["verdicts"]["compared"] == 2 and not result["verdicts"]["not expressible"]
    assert done.stdout.count("planned") == 3
