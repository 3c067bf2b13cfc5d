"""`pipefit plan`, `explain` and `simulate` as a user runs them: output, files, and every mistake with exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.golden_plans import two_modules
from tests.support.plan_toys import toy_model

from pipefit.cluster import parse_spec, save_cluster_file
from pipefit.codec import dump_text
from pipefit.optimizers import OPTIMIZERS
from pipefit.plan.check.rules import check_plan, load_plan, save_plan
from pipefit.plan.types import InputHashes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.json"
    path.write_text(dump_text(toy_model(3, tied=True)))
    return str(path)


JOB = ("--batch", "8", "--seq", "64")


def test_plan_explain_simulate_in_turn(pipefit, model: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.json"
    words = (
        "plan",
        "--model",
        model,
        "--cluster",
        "4xA100-80",
        *JOB,
        "--fix",
        "stages=2",
        "--top",
        "3",
        "-o",
        str(path),
        "--quiet",
    )
    code, out, err = pipefit(*words)
    assert code == 0 and err == ""
    for word in ("predicted step", "critical path: ", "lower bound", "decisions:", "stages:", "memory per"):
        assert word in out
    assert "chosen" in out and "slower: " in out and "data-sheet" in out
    plan = load_plan(path)
    check_plan(plan, toy_model(3, tied=True), parse_spec("4xA100-80"))
    assert plan.cluster == "4xA100-80" and plan.model.name == model and plan.job.precision == "bfloat16"

    code, explained, _ = pipefit("explain", str(path))
    assert code == 0 and "alternatives:" in explained
    assert explained.split("decisions:")[1] in out, "explain prints what plan printed"

    trace = tmp_path / "trace.json"
    code, simulated, _ = pipefit("simulate", str(path), "--trace", str(trace))
    assert code == 0 and "lane 0" in simulated and "F0" in simulated and "bubble" in simulated
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert "0F0" in names and {"1B0", "1I0"} & names

    code, text, _ = pipefit("simulate", str(path), "--json")
    assert plan.prediction is not None
    assert json.loads(text)["prediction"]["step_s"] == pytest.approx(plan.prediction.step_s), "one evaluator"
    assert json.loads(text)["fits"] is True


def test_json_is_the_plan_itself(pipefit, model: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.json"
    code, out, _ = pipefit("plan", "--model", model, "--cluster", "2xH100", *JOB, "--json", "-o", str(path))
    assert code == 0 and out == path.read_text()
    code, out, _ = pipefit("explain", str(path), "--json")
    facts = json.loads(out)
    assert code == 0 and facts["tables"]["decisions"] and facts["figures come from"]


def test_local_plans_for_this_machine(pipefit, model: str) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = pipefit("plan", "--model", model, "--local", "2", *JOB)
    assert code == 0 and "float32, adamw, on" in out and "of local:2" in out and "assumed" in out


def test_planning_from_a_saved_model_needs_no_torch(model: str, tmp_path: Path) -> None:
    """In a process where importing torch fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('this test has no torch')")
    script = "import sys; from pipefit.cli import main; sys.argv[0] = 'pipefit'; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", "--model", model, "--cluster", "4xH100", *JOB],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "predicted step" in done.stdout


def bad_cluster(tmp_path: Path) -> str:
    save_cluster_file(parse_spec("2x1xH100:10GB/s"), tmp_path / "cluster.json")
    data = json.loads((tmp_path / "cluster.json").read_text())
    data["rails"][0]["bandwidth_bytes_per_s"][0][1] = 0
    (tmp_path / "cluster.json").write_text(json.dumps(data))
    return str(tmp_path / "cluster.json")


MISTAKES = {
    "unknown model": (["--model", "lama", "--cluster", "2xH100", *JOB], ["model is not known", "seen: lama"]),
    "unknown fix": (
        ["--cluster", "2xH100", *JOB, "--fix", "stage=2"],
        ["no key 'stage'", "did you mean 'stages'"],
    ),
    "no fix": (["--cluster", "2xH100", *JOB, "--fix", "stages"], ["written KEY=VALUE", "replicas (a count"]),
    "value of a fix": (
        ["--cluster", "2xH100", *JOB, "--fix", "sharded_state=maybe"],
        ["not a kind of sharded state", "--fix sharded_state", "none, optimizer, gradients, parameters"],
    ),
    "unknown optimizer": (
        ["--cluster", "2xH100", *JOB, "--optimizer", "adam"],
        ["optimizer is unknown", "--optimizer", ", ".join(sorted(OPTIMIZERS)), "did you mean 'adamw'?"],
    ),
    "fix twice": (["--cluster", "2xH100", *JOB, "--fix", "stages=1", "--fix", "stages=2"], ["fixed twice"]),
    "fixes that differ": (
        ["--cluster", "2xH100", *JOB, "--fix", "stages=3", "--fix", "cuts=2"],
        ["different numbers of stages", "2, 3"],
    ),
    "sharding alone": (["--cluster", "2xH100", *JOB, "--fix", "sharding=megatron"], ["needs the number of shards"]),
    "shards without": (
        ["--cluster", "2xH100", *JOB, "--fix", "shards=2", "--fix", "sharding=none"],
        ["More than one shard needs a sharding"],
    ),
    "a module of none": (
        ["--cluster", "2xH100", *JOB, "--fix", "vision.replicas=2"],
        ["has no modules", "seen: vision.replicas", "leave vision.replicas out"],
    ),
    "modules of none": (["--cluster", "2xH100", *JOB, "--fix", "modules=shared"], ["has no modules", "seen: modules"]),
    "units of none": (["--cluster", "2xH100", *JOB, "--fix", "ahead=2"], ["has no modules", "seen: ahead"]),
    "shared with none": (
        ["--cluster", "2xH100", *JOB, "--fix", "placement=shared"],
        ["has no modules", "seen: placement=shared", "the lane of every stage"],
    ),
    "batch that nothing divides": (
        ["--cluster", "4xH100", "--batch", "7", "--seq", "64", "--fix", "microbatches=3"],
        ["cannot be cut into this many equal microbatches", "batch 7, microbatches 3", "allowed: 1, 7"],
    ),
    "empty batch": (["--cluster", "2xH100", "--batch", "0", "--seq", "64"], ["above zero", "--batch"]),
    "precision": (["--cluster", "2xH100", *JOB, "--precision", "int8"], ["not one of the choices", "'bfloat16'"]),
    "no fp8 device": (["--cluster", "2xV100", *JOB, "--precision", "fp8"], ["The V100 has no peak for fp8", "tf32"]),
    "no fp8 layer": (["--cluster", "2xH100", *JOB, "--precision", "fp8"], ["No linear layer", "multiples of 16"]),
    "no cluster": ([*JOB], ["Say which cluster", "--local 4"]),
    "two clusters": ([*JOB, "--cluster", "2xH100", "--local", "2"], ["named twice"]),
    "missing cluster file": ([*JOB, "--cluster", "none.json"], ["cannot be read", "none.json"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_message_and_exit_code_2(pipefit, model: str, tmp_path: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    words, expected = MISTAKES[name]
    path = tmp_path / "plan.json"
    given = words if "--model" in words else ["--model", model, *words]
    code, out, err = pipefit("plan", *given, "-o", str(path))
    assert code == 2 and out == "" and err.count("pipefit: ") == 1
    for word in expected:
        assert word in err, err
    assert not path.exists(), "nothing is written"


def test_a_broken_cluster_file_names_the_link(pipefit, model: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, _, err = pipefit("plan", "--model", model, "--cluster", bad_cluster(tmp_path), *JOB)
    assert code == 2 and "missing or impossible: host0 -> host1" in err


def test_a_model_that_fits_nowhere(pipefit, model: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    cluster = parse_spec("1xL4")
    small = replace(cluster, kinds={"L4": replace(cluster.kinds["L4"], memory_bytes=64 * 2**20 + 40_000)})
    save_cluster_file(small, tmp_path / "small.json")
    code, _, err = pipefit("plan", "--model", model, "--cluster", str(tmp_path / "small.json"), *JOB)
    assert code == 2
    for word in ("No plan fits", "are missing on each device of lane 0", "(L4)", "needed", "of memory", "try: use"):
        assert word in err


def test_a_stale_plan_is_refused(pipefit, model: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.json"
    assert pipefit("plan", "--model", model, "--cluster", "2xH100", *JOB, "-o", str(path))[0] == 0
    before = path.read_text()
    Path(model).write_text(dump_text(replace(toy_model(3, tied=True), config={"changed": True})))
    code, _, err = pipefit("simulate", str(path))
    assert code == 2 and "The plan is stale: the model changed" in err and "pipefit plan" in err
    code, _, err = pipefit("simulate", str(path), "--cluster", "4xH100")
    assert code == 2 and "the model and cluster changed" in err
    assert path.read_text() == before


def test_a_plan_by_hand_needs_a_cluster_named(pipefit, model: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.json"
    pipefit("plan", "--model", model, "--cluster", "2xH100", *JOB, "--fix", "stages=2", "-o", str(path))
    by_hand = replace(
        load_plan(path), prediction=None, alternatives=(), cluster="", hashes=InputHashes(model="", cluster="")
    )
    save_plan(by_hand, path)
    code, _, err = pipefit("simulate", str(path))
    assert code == 2 and "does not say which cluster" in err
    code, out, _ = pipefit("simulate", str(path), "--cluster", "4xV100")
    assert code == 0 and "predicted step" in out
    code, out, _ = pipefit("explain", str(path))
    assert code == 0 and "written by hand" in out


def test_two_modules_are_explained_and_simulated(pipefit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = two_modules()
    save_plan(made.plan, tmp_path / "plan.json")
    (tmp_path / "model.json").write_text(dump_text(made.model))
    code, out, _ = pipefit("explain", str(tmp_path / "plan.json"))
    assert code == 0 and "vision 0 to 1" in out and "3 replicas" in out
    save_cluster_file(made.cluster, tmp_path / "cluster.json")
    words = ("--model", str(tmp_path / "model.json"), "--cluster", str(tmp_path / "cluster.json"))
    code, out, err = pipefit("simulate", str(tmp_path / "plan.json"), *words)
    assert code == 0, err


def test_a_plan_file_cut_short_is_told(pipefit, model: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.json"
    pipefit("plan", "--model", model, "--cluster", "2xH100", *JOB, "-o", str(path))
    path.write_text(path.read_text()[:500])
    for name in ("explain", "simulate"):
        code, _, err = pipefit(name, str(path))
        assert code == 2 and "may have been cut short" in err


def test_outputs_make_their_folder_and_say_where_they_cannot_be_written(  # type: ignore[no-untyped-def]
    pipefit, model: str, tmp_path: Path
) -> None:
    plan, trace = tmp_path / "new" / "folder" / "plan.json", tmp_path / "other" / "trace.json"
    words = ("plan", "--model", model, "--cluster", "2xH100", *JOB, "-o")
    code, _, err = pipefit(*words, str(plan))
    assert code == 0, err
    code, _, err = pipefit("simulate", str(plan), "--trace", str(trace))
    assert code == 0 and trace.is_file(), err

    below_a_file = str(plan / "more" / "plan.json")
    code, out, err = pipefit(*words, below_a_file)
    assert code == 2 and "The plan cannot be written." in err and f"where: {below_a_file}" in err and "try: " in err
    assert not out, "it is said before the search, not after"
    code, _, err = pipefit(*words, str(tmp_path))
    assert code == 2 and "The plan cannot be written." in err and "Is a folder" in err
    code, _, err = pipefit("simulate", str(plan), "--trace", str(plan / "trace.json"))
    assert code == 2 and "The trace cannot be written." in err
    code, _, err = pipefit("profile", "--local", "2", "-o", str(plan / "cluster.json"))
    assert code == 2 and "The cluster file cannot be written." in err


def test_tolerance_chooses_a_simpler_plan_and_names_the_fastest(pipefit, model: str) -> None:  # type: ignore[no-untyped-def]
    words = ("plan", "--model", model, "--cluster", "2xA100-80", *JOB, "--fix", "stages=2", "--quiet")
    code, simple, err = pipefit(*words, "--tolerance", "30%")
    assert code == 0, err
    assert "tolerance: the fastest plan takes " in simple and "% faster (" in simple
    code, fastest, _ = pipefit(*words, "--tolerance", "0")
    assert code == 0 and "tolerance:" not in fastest
    assert simple.split("predicted step ")[1] != fastest.split("predicted step ")[1]


@pytest.mark.parametrize("value", ["2", "-1%", "little"])
def test_a_bad_tolerance_is_one_error(pipefit, model: str, value: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = pipefit("plan", "--model", model, "--cluster", "2xA100-80", *JOB, f"--tolerance={value}")
    assert code == 2 and out == "" and err.count("pipefit: ") == 1
    assert "not a valid tolerance" in err and f"'{value}'" in err and "such as 1%" in err


def test_a_tolerance_for_several_modules_is_refused(pipefit) -> None:  # type: ignore[no-untyped-def]
    words = ("--model", "multimodal-tiny", "--cluster", "2xA100-80", "--batch", "8", "--seq", "128")
    code, _, err = pipefit("plan", *words, "--tolerance", "1%")
    assert code == 2 and "several modules is the fastest" in err and "leave --tolerance out" in err
