"""`pipefit explain PLAN --why-not WORDS` as a user runs it: the comparison, layouts that do not fit, and mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.plan_toys import toy_model

from pipefit.cluster import parse_spec, save_cluster_file
from pipefit.codec import dump_text
from pipefit.plan.check.rules import load_plan, save_plan
from pipefit.plan.types import InputHashes

JOB = ("--batch", "8", "--seq", "64", "--quiet")


@pytest.fixture
def plan(pipefit, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    model, path = tmp_path / "model.json", tmp_path / "plan.json"
    model.write_text(dump_text(toy_model(3, tied=True)))
    code, _, err = pipefit("plan", "--model", str(model), "--cluster", "4xA100-80", *JOB, "-o", str(path))
    assert code == 0, err
    return path


def test_a_layout_is_what_plan_makes_with_the_same_fixes(pipefit, plan: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pinned = tmp_path / "pinned.json"
    fixes = ("--fix", "pp=2", "--fix", "dp=2", "-o", str(pinned))
    model = str(tmp_path / "model.json")
    assert pipefit("plan", "--model", model, "--cluster", "4xA100-80", *JOB, *fixes)[0] == 0
    code, out, err = pipefit("explain", str(plan), "--why-not", "pp=2 dp=2", "--json", "--quiet")
    assert code == 0, err
    facts, asked, chosen = json.loads(out), load_plan(pinned).prediction, load_plan(plan).prediction
    assert asked is not None and chosen is not None
    assert facts["fits"] is True and facts["asked"]["decisions"]["stages"] == "2"
    assert facts["asked"]["step_s"] == pytest.approx(asked.step_s, rel=1e-12)
    assert facts["chosen"]["step_s"] == pytest.approx(chosen.step_s, rel=1e-12)
    for figures in (facts["asked"], facts["chosen"]):
        assert sum(figures["parts_s"].values()) == pytest.approx(figures["step_s"], rel=1e-9)

    code, out, err = pipefit("explain", str(plan), "--why-not", "pp=2 dp=2", "--quiet")
    assert code == 0 and err == "" and facts["cause"] == out.splitlines()[1]
    for word in ("than the chosen plan", "layouts:", "asked", "seconds of a step on the busiest lane:", "difference"):
        assert word in out
    assert len(out.splitlines()) < 25, "one screen"


def test_the_layout_of_the_plan_itself(pipefit, plan: Path) -> None:  # type: ignore[no-untyped-def]
    replicas = load_plan(plan).decisions["replicas"]
    code, out, _ = pipefit("explain", str(plan), "--why-not", f"dp={replicas}", "--quiet")
    assert code == 0 and f"The chosen plan is the best plan with dp={replicas}." in out


def test_a_layout_that_does_not_fit_is_told_with_the_missing_memory(pipefit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, path, cluster = tmp_path / "model.json", tmp_path / "plan.json", tmp_path / "cluster.json"
    model.write_text(dump_text(toy_model(3)))
    spec = parse_spec("2xL4")
    small = replace(spec, kinds={"L4": replace(spec.kinds["L4"], memory_bytes=64 * 2**20 + 90_000)})
    save_cluster_file(small, cluster)
    words = ("--model", str(model), "--cluster", str(cluster), "--precision", "float32", *JOB)
    code, _, err = pipefit("plan", *words, "-o", str(path))
    assert code == 0, err
    code, out, err = pipefit("explain", str(path), "--why-not", "devices=1 zero=0 microbatches=1", "--quiet")
    assert code == 0 and err == ""
    assert out.startswith("devices=1 zero=0 microbatches=1: No plan fits: at least ")
    assert "are missing on each device of lane 0" in out and "needed" in out and "--fix" not in out
    code, out, _ = pipefit("explain", str(path), "--why-not", "devices=1 zero=0 microbatches=1", "--quiet", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["fits"] is False and "are missing" in facts["cause"] and facts["try"]


MISTAKES = {
    "no words": (("--why-not", " "), ["layout to compare with is empty"]),
    "unknown key": (("--why-not", "tpp=2"), ["--why-not has no key 'tpp'", "did you mean 'tp'"]),
    "too many devices": (("--why-not", "dp=16"), ["where: ", "nearest possible: replicas="]),
    "of several modules": (("--why-not", "vision.tp=2"), ["no modules", "--why-not", "leave vision.shards out"]),
    "two clusters": (("--why-not", "tp=2", "--cluster", "4xA100-80", "--local", "2"), ["named twice"]),
    "another cluster": (("--why-not", "tp=2", "--cluster", "8xH100"), ["plan is stale", "cluster changed"]),
    "risk alone": (("--why-not", "tp=2", "--risk", "0.1"), ["unknown without a memory correction"]),
    "a cluster for nothing": (("--cluster", "8xH100"), ["none is named", "--cluster", 'add --why-not "tp=8 pp=4"']),
    "a model for nothing": (("--model", "tiny"), ["none is named", "--model"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_message_and_exit_code_2(pipefit, plan: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    words, expected = MISTAKES[name]
    code, out, err = pipefit("explain", str(plan), *words, "--quiet")
    assert code == 2 and out == "" and err.count("pipefit: ") == 1
    for word in expected:
        assert word in err, err


def test_a_plan_that_names_no_cluster_says_what_is_missing(pipefit, plan: Path) -> None:  # type: ignore[no-untyped-def]
    save_plan(replace(load_plan(plan), cluster="", hashes=InputHashes(model="", cluster="")), plan)
    code, _, err = pipefit("explain", str(plan), "--why-not", "pp=2", "--quiet")
    assert code == 2 and "does not say which cluster" in err and "--cluster FILE.json" in err
    code, out, _ = pipefit("explain", str(plan), "--why-not", "pp=2", "--cluster", "4xA100-80", "--quiet")
    assert code == 0 and "layouts:" in out


def test_a_layout_of_several_modules(pipefit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.json"
    words = ("--model", "multimodal-tiny", "--cluster", "4xH100", "--batch", "8", "--seq", "128", "--quiet")
    code, _, err = pipefit("plan", *words, "-o", str(path))
    assert code == 0, err
    asked = "vision.replicas=2 modules=disjoint"
    code, out, err = pipefit("explain", str(path), "--why-not", asked, "--quiet", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["asked"]["decisions"]["vision.replicas"] == "2" and facts["cause"].startswith(asked)
    assert sum(facts["asked"]["parts_s"].values()) == pytest.approx(facts["asked"]["step_s"], rel=1e-9)
    code, _, err = pipefit("explain", str(path), "--why-not", "dp=2", "--quiet")
    assert code == 2 and "cannot be fixed for a model of several modules" in err and "--why-not" in err
