"""`pipefit shard` as a user runs it: the program as a golden file, JSON, and every mistake with exit code 2."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.support.random_clusters import model_of
from tests.support.stage_toys import toy_layers

from pipefit.codec import dump_text

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
SLOWER = 1e4
"""How much slower the example's devices are made, so that a toy is worth splitting."""


@pytest.fixture
def files(tmp_path):
    """Options that name a toy model and a cluster of two kinds of devices."""
    cluster = json.loads((ROOT / "examples" / "clusters" / "mixed-kinds.json").read_text())
    for kind in cluster["kinds"].values():
        kind["peak_flops_per_s"] = {name: peak / SLOWER for name, peak in kind["peak_flops_per_s"].items()}
        kind["memory_bandwidth_bytes_per_s"] /= SLOWER
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    (tmp_path / "model.json").write_text(dump_text(model_of(toy_layers())))
    return "--model", str(tmp_path / "model.json"), "--cluster", str(tmp_path / "cluster.json")


SIZES = ("--batch", "64", "--seq", "32", "--precision", "float32")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("cli-searched-shares", ("--devices", "0,1,8", "--microbatches", "2")),
        ("cli-given-shares", ("--devices", "0,1", "--microbatches", "32", "--shares", "2:1")),
    ],
)
def test_the_program_as_text(pipefit, files, name, more):
    """To renew a file after a wanted change: PIPEFIT_REGENERATE=1, and read the difference."""
    code, out, err = pipefit("shard", *files, *SIZES, *more)
    assert (code, err) == (0, "")
    if os.environ.get("PIPEFIT_REGENERATE"):
        (GOLDEN / f"{name}.txt").write_text(out)
    assert out == (GOLDEN / f"{name}.txt").read_text()


def test_json_holds_what_the_text_says(pipefit, files):
    words = ("shard", *files, *SIZES, "--devices", "0,8")
    _, text, _ = pipefit(*words)
    code, out, _ = pipefit(*words, "--json")
    found = json.loads(out)
    assert code == 0
    assert f"shares {':'.join(map(str, found['shares']))}\n" in text
    shown = [line["text"] for layer in found["layers"] for line in layer["lines"]]
    assert all(line in text for line in shown)
    assert [layer["times"] for layer in found["layers"]] == [1, 2, 1, 1]
    total = sum(layer["times"] * layer["cost_s"] for layer in found["layers"])
    assert total * 0.8 < found["cost_s"] <= total * (1 + 1e-9), "devices wait for each other at collectives only"
    assert found["held_bytes"].keys() == {"A100-40", "V100"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--devices", "0"), ("two or more different devices", "where: --devices", "seen: 0", "0 to 23")),
        (("--devices", "0,0"), ("two or more different devices",)),
        (("--devices", "0,99"), ("two or more different devices", "seen: 0,99")),
        (("--devices", "zero"), ("two or more different devices", "seen: zero")),
        (("--devices", "0,1", "--shares", "2:1:1"), ("one for each device", "2 numbers, for example 2:1")),
        (("--devices", "0,1", "--shares", "2:0"), ("positive whole numbers",)),
        (("--devices", "0,1", "--shares", "2:\u00b2"), ("positive whole numbers",)),
        (("--devices", "0,1", "--microbatches", "5"), ("equal microbatches", "batch 64, microbatches 5")),
        (("--devices", "0,1", "--seq", "0"), ("at least one token",)),
        (("--devices", "0,1", "--precision", "int8"), ("is not known", "bfloat16-gradients, float16, float32")),
        (("--devices", "0,1", "--local", "2"), ("named twice",)),
    ],
)  # fmt: skip
def test_mistakes_are_told(pipefit, files, more, words):
    code, out, err = pipefit("shard", *files, "--batch", "64", *more)
    assert (code, out) == (2, "")
    for word in words:
        assert word in err


def test_what_does_not_fit_is_told(pipefit, files):
    code, _, err = pipefit("shard", *files, "--devices", "0,8", "--batch", "1000000", "--seq", "4096")
    assert code == 2
    assert "No program of these layers fits" in err and "A100-40 36.8 GiB, V100 14.7 GiB" in err


def test_a_plan_with_searched_programs_beats_the_fixed_one(pipefit, files, tmp_path):
    """The plan carries its recipes, can be simulated from its file, and is faster than Megatron's on these devices."""
    steps = {}
    for sharding in ("searched", "megatron"):
        path = str(tmp_path / f"{sharding}.json")
        fixed = ("shards=2:1", "replicas=1", "stages=2", "microbatches=4", "schedule=1f1b", f"sharding={sharding}")
        fixes = [word for fix in fixed for word in ("--fix", fix)]
        code, _, err = pipefit("plan", *files, "--batch", "64", "--seq", "32", *fixes, "-o", path)
        assert code == 0, err
        code, _, _ = pipefit("simulate", path)
        assert code == 0
        plan = json.loads(Path(path).read_text())
        assert len(plan["recipes"]) == (4 if sharding == "searched" else 0)
        steps[sharding] = plan["prediction"]["step_s"]
    assert steps["searched"] < steps["megatron"]
