"""The cluster of a plan before a run: found by its name, with its calibration, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.vision_language import MODELS

from pipefit.cluster import open_cluster, save_cluster_file
from pipefit.cluster.calibration import ClusterCalibration, DeviceFactors, save_calibration
from pipefit.errors import StalePlanError
from pipefit.model.registry import open_model, resolve_model
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.types import Job, Plan
from pipefit.run.session.staleness import check_cluster, check_model


def plan_on(text: str) -> Plan:
    constraints = parse_constraints(["dp=2", "schedule=1f1b"], 8)
    job = Job(batch=8, sequence=64, precision="bfloat16")
    return make_plan(open_model("tiny-llama"), open_cluster(text), job, constraints, cluster_source=text)


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    save_calibration(ClusterCalibration(devices={"H100": DeviceFactors(compute=0.5)}), tmp_path / "mine.json")
    return tmp_path / "mine.json"


@pytest.mark.parametrize("text", ["2xH100", "2x1xH100:400Gbit/s", "file"])
def test_a_plan_with_a_calibration_finds_its_cluster(text: str, calibration: Path, tmp_path: Path) -> None:
    if text == "file":
        text = str(tmp_path / "cluster.json")
        save_cluster_file(open_cluster("2xH100"), text)
    plan = plan_on(f"{text}@{calibration}")
    assert check_cluster(plan, tmp_path / "plan.json") == open_cluster(plan.cluster)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    calibration.rename(elsewhere / "mine.json")
    assert check_cluster(plan, elsewhere / "plan.json") is not None, "the calibration is beside the plan"
    with pytest.raises(StalePlanError, match=r"was not found[\s\S]*mine.json beside the plan"):
        check_cluster(plan, tmp_path / "plan.json")
    save_calibration(ClusterCalibration(devices={"H100": DeviceFactors(compute=0.6)}), calibration)
    with pytest.raises(StalePlanError, match="cluster"):
        check_cluster(plan, tmp_path / "plan.json")


def test_weights_with_other_colours_belong_to_the_plan_and_others_are_named_by_field(tmp_path: Path) -> None:
    config, folder = MODELS["llava"], tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plan = plan_on("2xH100")
    described = resolve_model(str(folder))
    plan = replace(plan, model=replace(plan.model, family=described.family, config=described.config))
    colours = {"image_mean": [0.1] * 3, "image_std": [0.2] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(colours), encoding="utf-8")
    assert resolve_model(str(folder)) != described
    check_model(plan, str(folder))
    text = {**config["text_config"], "vocab_size": 99}
    (folder / "config.json").write_text(json.dumps({**config, "text_config": text}), encoding="utf-8")
    with pytest.raises(StalePlanError, match=r"another model[\s\S]*seen: text_config.vocab_size 99"):
        check_model(plan, str(folder))
