"""How many devices a training needs: sizes, steps of round numbers, figures of every cluster, answers, mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.plan_toys import toy_model

from pipefit.cluster import device_count, open_cluster
from pipefit.codec import dump_text
from pipefit.errors import FormatError, PipefitError, PlanError
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.sizing.request import (
    MAX_TOKEN_CHANGE,
    ClusterSize,
    SizingRequest,
    check_prices,
    cluster_sizes,
    read_prices,
    step_rows,
)
from pipefit.plan.sizing.sizes import DAY_S, SizedTraining, answer_sizes, layout_words, size_trainings
from pipefit.plan.sizing.text import answer_lines, format_days, size_cells, size_columns
from pipefit.plan.types import Job
from pipefit.show.size_page import render_sizes

JOB = Job(batch=16, sequence=64, precision="bfloat16")


def request_of(**changes: object) -> SizingRequest:
    request = SizingRequest(
        name="toy", model=toy_model(3), job=JOB, tokens=1e9, devices=("H100", "A100-40"), max_devices=16
    )
    return replace(request, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "sequence", "rows"),
    [(4e6, 4096, 1024), (4194304, 4096, 1024), (1e6, 8192, 128), (64, 64, 1), (3 * 64, 64, 3), (977 * 4096, 4096, 977)],
)
def test_rows_of_a_step_divide_over_many_devices(tokens: float, sequence: int, rows: int) -> None:
    assert step_rows(tokens, sequence) == rows
    assert abs(rows * sequence - tokens) <= MAX_TOKEN_CHANGE * tokens


def test_a_step_holds_a_sequence() -> None:
    with pytest.raises(PlanError, match="fewer tokens than one sequence") as error:
        step_rows(1000, 4096)
    assert "--batch" in str(error.value)


def test_clusters_grow_by_devices_and_then_by_hosts() -> None:
    sizes = list(cluster_sizes("h100", 40))
    assert [size.devices for size in sizes] == [1, 2, 4, 8, 16, 32]
    assert sizes[3] == ClusterSize("H100", 8, "8xH100") and sizes[4].cluster == "2x8xH100:8x400Gbit/s"
    assert [size.devices for size in cluster_sizes("GB200", 150)] == [1, 2, 4, 8, 16, 32, 64, 72, 144]
    for size in (*sizes, *cluster_sizes("A10", 32, "25Gbit/s")):
        assert device_count(open_cluster(size.cluster)) == size.devices


def test_figures_are_those_of_the_plan() -> None:
    """A pinned layout, so that `make_plan` makes the same one."""
    fixed = Constraints(stages=1, replicas=(1, 1), microbatches=1, schedule="1f1b", sharded_state="none")
    request = request_of(devices=("A100-40",), max_devices=2, prices={"A100-40": 3.0}, deadline_s=DAY_S)
    one, two = size_trainings(request, fixed)
    assert one.days is None and "more devices than the cluster" in one.layout
    prediction = make_plan(request.model, open_cluster("2xA100-40"), JOB, fixed).prediction
    assert prediction is not None and two.step_s == pytest.approx(prediction.step_s)
    total_s = prediction.step_s * 1e9 / (16 * 64)
    hours = 2 * total_s / 3600
    assert two.days is not None and two.days * DAY_S == pytest.approx(total_s)
    assert two.device_hours == pytest.approx(hours) and two.cost == pytest.approx(3 * hours)
    assert two.mfu == pytest.approx(prediction.flops_per_step / prediction.step_s / 2 / 312e12)
    assert two.layout == "dp=2"


def test_larger_clusters_are_no_slower() -> None:
    trainings = list(size_trainings(request_of(devices=("H100",))))
    steps = [training.step_s or 0.0 for training in trainings]
    assert len(steps) == 5 and all(later <= 1.001 * before for before, later in pairwise(steps))


def sized(devices: int, days: float | None, cost: float | None = None) -> SizedTraining:
    size = ClusterSize("H100", devices, f"{devices}xH100")
    return SizedTraining(size=size, days=days, step_s=days, cost=cost, layout="dp", device_hours=1.0)


def test_answers_are_the_least_of_those_that_count() -> None:
    trainings = [sized(1, None), sized(2, 50.0, 10.0), sized(4, 20.0, 12.0), sized(8, 11.0, 11.5), sized(16, 9.0, 30.0)]
    answers = {answer.question: answer.training for answer in answer_sizes(trainings, 25 * DAY_S)}
    counts = {question: training and training.size.devices for question, training in answers.items()}
    assert counts == {"smallest that fits": 2, "smallest in time": 4, "cheapest in time": 8, "fastest": 16}
    free = answer_sizes(trainings, None)
    assert [(a.question, a.training and a.training.size.devices) for a in free][1] == ("cheapest", 2)
    late = answer_sizes([sized(2, 50.0)], DAY_S)
    assert [a.training is None for a in late] == [False, True, False]
    assert all(answer.training is None for answer in answer_sizes([sized(1, None)], DAY_S))


def test_layouts_have_the_names_of_their_axes() -> None:
    assert layout_words(ParallelConfig()) == "one device"
    many = ParallelConfig(
        stages=4, replicas=(1, 1), shards=(1, 1), sharding="megatron-sp", microbatches=8, sharded_state="parameters",
        recompute=("full",),
    )  # fmt: skip
    assert layout_words(many) == "dp=2 tp=2 pp=4 zero=3, 8 microbatches, 1f1b, recompute full"
    assert layout_words(ParallelConfig(shards=(1, 1), sharding="expert", replicas=(1, 1))) == "dp=2 ep=2"


def test_text_and_page_hold_every_cluster() -> None:
    request = request_of(deadline_s=30 * DAY_S, prices={"H100": 2.0})
    trainings = [sized(1, None), sized(2, 50.0, 1e6), sized(4, 20.0, 12.5)]
    for training in trainings:
        assert len(size_cells(request, training)) == len(size_columns(request))
    assert size_cells(request, trainings[2])[3:6] == ("20.0 days", "yes", "1.00")
    assert "smallest in time: 4xH100, 20.0 days, 12.50; dp" in answer_lines(request, trainings)
    page = render_sizes(request, trainings)
    assert all(training.size.cluster in page for training in trainings)
    assert page.count("<circle") == 2 and "deadline</text>" in page and "1,000,000" in page
    assert "<circle" not in render_sizes(request, trainings[:1]), "nothing to draw"
    named = render_sizes(replace(request, name="<i>toy"), trainings)
    assert "<i>toy" not in named and "&lt;i&gt;toy" in named


@pytest.mark.parametrize(
    ("days", "words"), [(1e-5, "864 ms"), (0.5, "12.0 hours"), (3.0, "3.0 days"), (4e3, "4,000.0 days")]
)
def test_durations_have_a_fitting_unit(days: float, words: str) -> None:
    assert format_days(days) == words


def test_prices_are_read_by_device(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("\ufeffDevice, Price\nH100-SXM,2.49\nNVIDIA A100-SXM4-80GB, 1.1\n", encoding="utf-8")
    assert read_prices(path) == {"H100": 2.49, "A100-80": 1.1}
    with pytest.raises(PlanError, match="The price of MI300X is missing"):
        check_prices(("H100", "MI300X"), read_prices(path), str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["a column for the device", "no rows"]),
        ("gpu,price\nH100,1\n", ["a column for the device", "gpu, price"]),
        ("device,price\nH100,cheap\n", ["line 2", "'cheap'"]),
        ("device,price\nH100\n", ["line 2", "None"]),
        ("device,price\nH100,-1\n", ["line 2", "'-1'"]),
        ("device,price\nH1000,1\n", ["No data sheet", "H1000", "line 2"]),
    ],
)
def test_wrong_prices_are_told(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PipefitError) as error:
        read_prices(path)
    assert all(word in str(error.value) for word in words)
    with pytest.raises(FormatError, match="cannot be read"):
        read_prices(tmp_path / "absent.csv")


@pytest.fixture
def toy_file(tmp_path: Path) -> str:
    (tmp_path / "model.json").write_text(dump_text(toy_model(3)), encoding="utf-8")
    return str(tmp_path / "model.json")


def test_the_command_prints_tables_json_and_a_page(pipefit, toy_file: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ("size", "--model", toy_file, "--tokens", "1B", "--batch", "1K", "--seq", "64", "--max-gpus", "4")
    page = tmp_path / "out" / "size.html"
    code, out, err = pipefit(*words, "--deadline", "2d", "-o", str(page))
    assert code == 0 and "4xH100" in out and "smallest in time: 1xH100" in out and str(page) in out
    assert "planning 2xH100" in err and "4xH100" in page.read_text(encoding="utf-8")
    code, out, _ = pipefit(*words, "--json", "--quiet")
    data = json.loads(out)
    assert code == 0 and [t["size"]["devices"] for t in data["trainings"]] == [1, 2, 4]
    assert data["job"]["batch"] == 16 and data["answers"]["fastest"] in ("1xH100", "2xH100", "4xH100")


def test_interruption_keeps_the_sizes_so_far(
    pipefit,  # type: ignore[no-untyped-def]
    toy_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted_sizes(*_: object) -> object:
        yield sized(2, 50.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("pipefit.plan.sizing.sizes.size_trainings", interrupted_sizes)
    words = ("size", "--model", toy_file, "--tokens", "1B", "--batch", "1K", "--seq", "64")
    code, out, err = pipefit(*words)
    assert code == 130 and "smallest that fits: 2xH100, 50.0 days" in out and "interrupted: the sizes so far" in err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--tokens", "many"), ["--tokens", "not a number with a unit"]),
        (("--tokens", "3Q"), ["--tokens", "The unit is unknown"]),
        (("--batch", "0"), ["--batch", "above zero"]),
        (("--batch", "10"), ["--batch", "fewer tokens than one sequence"]),
        (("--deadline", "30"), ["--deadline", "The unit is unknown", "d"]),
        (("--deadline", "0d"), ["--deadline", "above zero"]),
        (("--tokens", "1e400"), ["--tokens", "too large"]),
        (("--devices", "H100,A100-80", "--precision", "fp8"), ["The A100-80 has no peak for fp8", "--precision"]),
        (("--precision", "fp8", "--devices", "H100"), ["No linear layer of this model can run in FP8"]),
        (("--devices", "H1000"), ["No data sheet", "where: --devices", "did you mean H100"]),
        (("--max-gpus", "0"), ["--max-gpus", "above zero"]),
        (("--network", "fast", "--max-gpus", "16"), ["--network", "not a number with a unit"]),
        (("--precision", "int8"), ["--precision", "bfloat16"]),
        (("--prices", "absent.csv"), ["absent.csv", "cannot be read"]),
        (("--fix", "stage=2"), ["--fix"]),
    ],
)
def test_mistakes_are_told(pipefit, toy_file: str, more: tuple[str, ...], words: list[str]) -> None:  # type: ignore[no-untyped-def]
    options = {"--tokens": "1B", "--batch": "1K", "--seq": "64", "--max-gpus": "2"}
    options |= dict(zip(more[::2], more[1::2], strict=True))
    typed = [word for pair in options.items() for word in pair]
    code, out, err = pipefit("size", "--model", toy_file, "--quiet", *typed)
    assert code == 2 and not out, err
    assert all(word in err for word in words), err


def test_models_of_several_modules_are_refused(pipefit) -> None:  # type: ignore[no-untyped-def]
    words = ("size", "--model", "multimodal-tiny", "--tokens", "1B", "--batch", "1K", "--seq", "128", "--quiet")
    code, _, err = pipefit(*words)
    assert code == 2 and "Only a model of one module" in err
