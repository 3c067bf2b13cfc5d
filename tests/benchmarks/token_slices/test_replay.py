"""`benchmarks/token_slices`: its V100 costs against closed forms and figures that they were not fitted to, and the
quick run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipefit.codec import dump_text
from pipefit.lab.spec import load_lab

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def _torch() -> None:
    pytest.importorskip("torch")


def test_published_slices_are_whole_sequences_and_layouts_fill_their_devices() -> None:
    from benchmarks.token_slices.v100 import HOST, settings

    rows = settings()
    assert [row.number for row in rows] == list(range(1, 11))
    for row in rows:
        assert row.replicas * row.stages * row.shards % HOST == 0
        assert row.batch % row.replicas == 0 and row.layers % row.stages == 0
        assert not row.slices or sum(row.slices) == row.sequence


def test_constants_come_from_the_steps_without_slices_alone() -> None:
    from benchmarks.token_slices.v100 import FITTED, fit, settings, unsliced_s

    rows = settings()
    found = fit(rows)
    assert fit([replace(row, with_s=row.with_s * 7, slices=()) for row in rows]) == found
    errors = [abs(unsliced_s(row, found) / row.without_s - 1) for row in rows]
    assert np.mean(errors) < 0.1 and max(errors) < 0.2
    made = [replace(row, without_s=unsliced_s(row, found)) for row in rows]
    again = fit(made)
    for name in FITTED:
        assert getattr(again, name) == pytest.approx(getattr(found, name), rel=1e-3), "its own steps give it back"


def test_a_layer_of_the_1b_model_takes_what_figure_3_shows() -> None:
    """Flat up to 256 tokens; at 1024, which nothing was fitted to, within a fifth."""
    from benchmarks.token_slices.v100 import LayerTime, fit, published, settings

    rows, shown = settings(), published()["one_layer"]
    time = LayerTime(next(row for row in rows if row.number == 1), replace(fit(rows), score_bytes=0.0))
    at = {tokens: float(time.forward_s(np.array(tokens), np.array(0))) for tokens in (1, 256, 300, 1024)}
    assert at[1] == pytest.approx(shown["floor_s"], rel=0.01)
    assert at[256] == pytest.approx(shown["floor_s"], rel=0.08)
    assert at[300] > at[256]
    assert at[1024] == pytest.approx(shown["at_1024_tokens_s"], rel=0.2)


def test_simulated_steps_are_those_of_the_closed_forms() -> None:
    """GPipe: (m + K - 1) stages. With slices: TeraPipe's objective, up to its one maximum over F and B together."""
    from benchmarks.token_slices.replay import objective_s, run
    from benchmarks.token_slices.v100 import fit, settings, unsliced_s

    rows = settings()
    constants, row = fit(rows), rows[4]
    assert run(row, constants, "gpipe").step_s == pytest.approx(unsliced_s(row, constants), rel=0.005)
    assert run(row, constants, "1f1b").step_s == pytest.approx(unsliced_s(row, constants), rel=0.005)
    sliced = run(row, constants, "gpipe", slices=row.slices).step_s
    assert sliced == pytest.approx(objective_s(row, constants, row.slices), rel=0.01)


def test_the_overhead_of_a_slice_is_that_of_the_cost_function() -> None:
    from benchmarks.token_slices.overhead import overhead_of

    assert overhead_of(4096, 7, lambda tokens, past: 0.01 + tokens * (1.0 + tokens / 2 + past)) == pytest.approx(0.01)


def test_the_lab_is_the_one_that_was_written_before_measuring() -> None:
    from benchmarks.token_slices.lab import LAB, lab_file

    path = BENCHMARKS / "data" / "clusters" / f"{LAB}.json"
    assert path.read_text(encoding="utf-8") == dump_text(lab_file()), "python -m benchmarks.token_slices.lab"
    assert load_lab(path) == lab_file()


def test_live_tokens_are_counted_from_forward_to_the_last_part_of_the_backward() -> None:
    from types import SimpleNamespace

    from benchmarks.token_slices.lab import live_tokens

    plan = SimpleNamespace(order=SimpleNamespace(slices=(5, 3)))
    spans = [("0F0", 0, 1, 0), ("0F0/1", 1, 2, 0), ("0I0/1", 2, 3, 0), ("0F1", 3, 4, 0), ("0W0/1", 4, 5, 0)]
    trace = ([*spans, ("0B0", 5, 6, 0), ("0F1/1", 6, 7, 0), ("0SEND_F1", 7, 8, 0)],)
    assert live_tokens(plan, SimpleNamespace(trace=trace)) == 5 + 3 + 5


@pytest.mark.slow
@pytest.mark.gloo
def test_quick_measures_everything_but_the_lab(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.token_slices.sections", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert out.exists(), done.stderr
    text = out.read_text()
    assert str(ROOT) not in text and str(tmp_path) not in text
    result = json.loads(text)
    assert list(result) == ["replay", "peaks", "head", "real"]
    for section in result.values():
        assert {"commit", "date", "machine", "command"} <= set(section["provenance"])
        assert section["targets"]
        for target in section["targets"]:
            assert f"{target['what']}: {target['reached']:.3f}" in done.stdout
    missed = [t for name in ("replay", "peaks", "head") for t in result[name]["targets"] if not t["met"]]
    assert not missed, "what is not measured does not depend on the machine"
    assert result["real"]["loss_spread"] < 1e-5, "slices give the loss of whole sequences"
    assert done.returncode == (0 if all(t["met"] for t in result["real"]["targets"]) else 1)
