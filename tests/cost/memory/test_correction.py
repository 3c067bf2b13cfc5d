"""The learned memory correction on made-up runs whose truth is known: coefficients, errors, bands, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipefit.codec import dump_text
from pipefit.cost.memory.correction import LEAST_CONFIGURATIONS, PEAK_PARTS, MemoryRun, learn_correction
from pipefit.cost.memory.correction_file import MemoryFacts, learn_facts, load_memory, record_runs
from pipefit.errors import ClusterError, FormatError

TRUTH = {
    "parameters": 1.0, "gradients": 1.0, "optimizer": 1.1, "saved": 1.2, "passing": 1.4, "messages": 1.0,
    "workspace": 0.5,
}  # fmt: skip
NOISE = 0.01


def runs(count: int, seed: int, scale: float = 1.0, noise: float = NOISE, devices: int = 4) -> list[MemoryRun]:
    """Plans of two ranks each, that take what TRUTH says, times a random factor."""
    random = np.random.default_rng(seed)
    made = []
    for plan in range(count):
        for rank in range(2):
            unit = random.uniform(1e6, 1e8) * scale
            sizes = [2, 4, 12 * random.choice([1, 0.5, 0.25]), random.uniform(1, 30), random.uniform(0.5, 5)]
            parts = dict(
                zip(PEAK_PARTS, [unit * size for size in [*sizes, random.uniform(0.1, 2)]] + [2.0**26], strict=True)
            )
            measured = sum(TRUTH[name] * size for name, size in parts.items()) * float(np.exp(random.normal(0, noise)))
            made.append(
                MemoryRun(
                    configuration=f"{seed}-{plan}", kind="x", devices=devices, rank=rank, parts=parts,
                    measured_bytes=measured,
                )
            )  # fmt: skip
    return made


def test_the_truth_is_found() -> None:
    found = learn_correction(runs(20, seed=1, noise=0.0), "x")
    for name, value in TRUTH.items():
        assert found.coefficients[name] == pytest.approx(value, abs=0.08), name
    assert 0.002 <= found.spread < 0.004, "never believed to be better than that"
    assert found.configurations == 20 and found.most_devices == 4


def test_errors_beyond_what_was_measured_are_as_probable_as_stated() -> None:
    """Four times as large as all that was learned from; 400 other plans."""
    found = learn_correction(runs(25, seed=2), "x")
    others = runs(400, seed=3, scale=4.0)
    risks = np.array([found.estimate_rank(one.parts).oom_probability(one.measured_bytes) for one in others])
    for level in (0.05, 0.2, 0.5):
        assert np.mean(risks < level) <= 1.6 * level, "a risk below the level is not met more often than stated"
    beyond = [
        one.measured_bytes > (estimate := found.estimate_rank(one.parts)).expected_bytes + estimate.margin_bytes
        for one in others
    ]
    assert not any(beyond)
    assert (
        np.mean(np.abs([o.measured_bytes / found.estimate_rank(o.parts).expected_bytes - 1 for o in others]))
        < 1.5 * NOISE
    )


def test_a_risk_is_what_the_quantile_says() -> None:
    found = learn_correction(runs(25, seed=2), "x")
    for probability in (0.3, 0.1, 0.05, 0.01, 0.001):
        assert found.exceedance_probability(found.error_quantile(probability)) <= probability * (1 + 1e-9)
        assert found.exceedance_probability(found.error_quantile(probability) - 0.002) > probability
    estimate = found.estimate_rank(runs(1, seed=9)[0].parts)
    limits = np.linspace(0.9, 1.2, 50) * estimate.expected_bytes
    risks = [estimate.oom_probability(limit) for limit in limits]
    assert risks == sorted(risks, reverse=True) and risks[0] > 0.99 and risks[-1] < 0.001


def test_the_band_gets_wider_with_the_distance() -> None:
    found = learn_correction(runs(25, seed=2), "x")
    near = runs(1, seed=5)[0].parts
    far = {name: size * 1000 for name, size in near.items()}
    odd = {name: size if name == "messages" else 0.0 for name, size in near.items()}
    distances = [found.estimate_rank(parts).distance for parts in (near, far, odd)]
    assert 1.0 <= distances[0] < 1.2 and distances[1] > 4 and distances[2] > 1.2


def test_too_few_plans_teach_nothing() -> None:
    with pytest.raises(ClusterError, match="Too few plans were measured") as error:
        learn_correction(runs(LEAST_CONFIGURATIONS - 1, seed=1), "x")
    assert "5 plans" in str(error.value) and "6 or more" in str(error.value)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    first, more = runs(3, seed=1), runs(4, seed=2)
    facts = record_runs(path, first)
    assert facts.corrections == {} and load_memory(path) == facts
    again = [replace(first[0], measured_bytes=1e9)]
    facts = record_runs(path, [*again, *more])
    assert load_memory(path) == facts and len(facts.runs) == 14, "a rank that was measured again stands once"
    assert [run.measured_bytes for run in facts.runs if run.configuration == "1-0" and run.rank == 0] == [1e9]
    assert facts.corrections["x"] == learn_correction(facts.runs, "x")


BROKEN = {
    "nothing measured": (lambda run: replace(run, measured_bytes=0.0), "0 bytes measured"),
    "a part is missing": (lambda run: replace(run, parts={"saved": 1.0}), "parts saved"),
    "a part below 0": (lambda run: replace(run, parts=dict.fromkeys(PEAK_PARTS, -1.0)), "none below 0"),
    "not a number": (lambda run: replace(run, measured_bytes=float("nan")), "nan bytes measured"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(tmp_path: Path, name: str) -> None:
    change, words = BROKEN[name]
    path = tmp_path / "memory.json"
    path.write_text(dump_text(MemoryFacts(runs=(change(runs(1, seed=1)[0]),))))
    with pytest.raises(FormatError, match="The recorded run is invalid") as error:
        load_memory(path)
    assert words in str(error.value) and "runs[0]" in str(error.value)
    path.write_text('{"format": "other"}')
    with pytest.raises(FormatError, match="not one of the choices"):
        load_memory(path)


IMPOSSIBLE = {
    "a coefficient is missing": {"coefficients": dict.fromkeys(PEAK_PARTS[1:], 1.0)},
    "a coefficient below 0": {"coefficients": dict.fromkeys(PEAK_PARTS, 1.0) | {"saved": -1.0}},
    "no coefficient above 0": {"coefficients": dict.fromkeys(PEAK_PARTS, 0.0)},
    "no spread": {"spread": 0.0},
    "no errors": {"errors": ()},
    "an error that is no number": {"errors": (float("nan"),)},
    "a matrix that is too small": {"precision": ((1.0,),)},
    "an empty range": {"range_bytes": (0.0, 0.0)},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_correction_that_no_runs_can_teach(tmp_path: Path, name: str) -> None:
    facts = learn_facts(runs(8, seed=1))
    path = tmp_path / "memory.json"
    path.write_text(dump_text(facts))
    assert load_memory(path) == facts
    path.write_text(dump_text(replace(facts, corrections={"x": replace(facts.corrections["x"], **IMPOSSIBLE[name])})))
    with pytest.raises(FormatError, match="The memory correction is invalid") as error:
        load_memory(path)
    assert "corrections.x" in str(error.value) and "to learn them again" in str(error.value)
