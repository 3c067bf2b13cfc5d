"""Vision-language models on two and more processes, from the files of a class of `transformers`, against that class:
loss and every gradient in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support import vision_language_cases as cases
from tests.support.vision_language import loss_of_theirs, sample_batch, save_gradients, save_model
from tests.support.worker_cases import prepare

from pipefit.model.registry import typed_config
from pipefit.model.weights.files import WeightFiles
from pipefit.plan.check.rules import check_plan

EXACT = 1e-9
QUICK = [(name, "one device each") for name in ("llava", "llava_onevision", "internvl", "gemma3", "qwen2_5_vl")]
MORE = [
    ("internvl, rms", "one device each, recomputed"),
    ("gemma3", "one device each, recomputed"),
    ("internvl", "two shards each, split tokens"),
    ("gemma3", "two shards each, split tokens"),
    ("llava_onevision", "two shards each, split tokens"),
    ("internvl", "two replicas of vision"),
    ("qwen2_5_vl", "one device each, recomputed"),
    ("qwen2_5_vl", "two shards each, split tokens"),
    ("qwen2_5_vl", "two replicas of vision"),
    ("qwen2_vl", "two shards each, split tokens"),
    ("qwen3_vl", "one device each"),
    ("qwen3_vl", "one device each, recomputed"),
    ("qwen3_vl", "two shards each, split tokens"),
    ("qwen3_vl", "two replicas of vision"),
    ("qwen3_vl", "two stages each"),
]


def cases_of(pairs: list[tuple[str, str]], *marks: Any) -> list[Any]:
    return [pytest.param(*pair, id=", ".join(pair), marks=marks) for pair in pairs]


@pytest.mark.parametrize(("name", "case"), [*cases_of(QUICK), *cases_of(MORE, pytest.mark.slow)])
def test_processes_compute_what_transformers_does(name: str, case: str, gloo_pool: Any, tmp_path: Path) -> None:
    theirs = save_model(name, tmp_path / "model")
    plan, model = cases.planned(str(tmp_path / "model"), case)
    check_plan(plan, model)
    gloo_pool.run(prepare, [(plan, model)], True, ranks=8)
    ranks = len(plan.used_devices)
    assert ranks >= 2
    found = gloo_pool.run(cases.step_on_processes, plan, model, str(tmp_path / "model"), ranks=ranks)[0]
    typed: Any = typed_config(plan.model.family, plan.model.config)
    loss = loss_of_theirs(theirs, typed, sample_batch(typed, 0, cases.JOB.batch))
    loss.backward()
    assert found["loss"] * found["divisor"] == pytest.approx(float(loss.detach()), rel=1e-11)
    save_gradients(theirs, tmp_path / "gradients")
    files = WeightFiles(tmp_path / "gradients", plan.model.family, plan.model.config)
    assert {*found["gradients"]} == {parameter.name for parameter in plan.parameters}
    for parameter, gradient in found["gradients"].items():
        wanted = files.read(parameter, gradient.shape).numpy()
        # Keys' biases have no gradient, but for rounding.
        bound = EXACT * max(1e-3, abs(wanted).max())
        assert abs(gradient * found["divisor"] - wanted).max() <= bound, parameter
