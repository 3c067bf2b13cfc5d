"""benchmarks/multimodal: its monolithic layouts are what they are called, and the committed result is quoted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "results" / "results.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Several modules, in a lab\n")[1].split("\n## ")[0]
RESULT = ROOT / "benchmarks" / "results" / "multimodal.json"


def test_the_papers_kind_has_the_fewest_stages_that_fit_and_nothing_that_does_not_fit_is_run() -> None:
    from benchmarks.multimodal.lab import SHARDS, rivals
    from benchmarks.multimodal.layouts import Layout, Rated

    plain = Layout(ends="apart", replicas=1, shards=SHARDS, stages=2, microbatches=4, recompute="none")
    rated = [
        Rated(replace(plain, stages=1), 1.0, False),
        Rated(plain, 4.0, True),
        Rated(replace(plain, microbatches=8), 3.0, True),
        Rated(replace(plain, stages=3), 2.0, True),
        Rated(replace(plain, ends="merged", shards=1), 1.5, True),
        Rated(replace(plain, ends="merged"), 0.5, False),
    ]
    found = {name: one.step_s for name, one in rivals(rated).items()}
    assert found == {"paper": 3.0, "apart 1": 2.0, "merged 1": 1.5}


def test_image_counts_are_lognormal_about_their_mean_and_end_with_the_sequence() -> None:
    from benchmarks.multimodal.model import IMAGES, MOST, SEQUENCE, TOKENS, image_counts

    half, one = (image_counts(20_000, sigma, 0) for sigma in (0.5, 1.0))
    assert abs(half.mean() / IMAGES - 1) < 0.05 and half.max() == one.max() == MOST
    assert half.std() < one.std() and 2 * TOKENS * MOST < SEQUENCE
    free = image_counts(20_000, 0.5, 0, most=10**6)
    logs = np.log(free[free > 2])
    assert free.std() / free.mean() == pytest.approx(np.sqrt(np.expm1(0.25)), rel=0.06) and len(logs) > 19_000


def committed(section: str) -> list[dict[str, Any]]:
    """Rows of a section of the result."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert "+changes" not in found[section]["provenance"]["commit"]
    rows: list[dict[str, Any]] = found[section]["rows"]
    return rows


def quoted(cells: list[str]) -> None:
    """A line of the page's section is made of these cells."""
    assert "| " + " | ".join(cells) + " |" in SECTION.splitlines(), cells


def row_of_the_page(row: dict[str, Any]) -> list[str]:
    """What a case of a lab is told as."""
    plans, ours = row["plans"], row["plans"]["ours"]
    used = row["useful_s"] / row["devices"] / ours["measured_s"]
    cells = [
        f"{row['sigma']}",
        row["training"],
        ours["layout"]["modules"],
        f"{ours['measured_s']:.2f} s",
        f"{ours['predicted_s']:.2f} s",
    ]
    for name in ("paper", "apart 1", "merged 1"):
        ratio, predicted = (plans[name][key] / ours[key] for key in ("measured_s", "predicted_s"))
        cells.append(f"{ratio:.2f} ({predicted:.2f})")
    return [*cells, f"{used:.1%}", f"{ours['lower_bound_s'] / ours['measured_s']:.0%}"]


def test_few_long_samples_gain_what_is_quoted_by_dividing_images() -> None:
    from benchmarks.multimodal.lab import FEW_GAIN, GAIN, UTILISATION

    page = " ".join(SECTION.split())
    rows = committed("few-samples")
    for row in rows:
        plans, ours = row["plans"], row["plans"]["ours"]
        quoted(row_of_the_page(row))
        assert ours["layout"]["vision.divide"] == ours["layout"]["generator.divide"] == "images"
        assert plans["paper"]["valid"] and row["batch"] < row["devices"]
        assert max(row["efficiency"][name]["2"] for name in ("vision", "generator")) < 0.6
        assert plans["paper"]["measured_s"] >= GAIN * ours["measured_s"]
        assert all(one["valid"] and -0.045 < one["error"] < 0 for one in plans.values())
        assert plans["merged 1"]["measured_s"] >= FEW_GAIN * ours["measured_s"]
        assert min(one["measured_s"] for one in plans.values()) == ours["measured_s"]
    assert rows[0]["useful_s"] >= UTILISATION * rows[0]["devices"] * rows[0]["plans"]["ours"]["measured_s"]
    first = rows[0]
    shares, two = first["shares"], {name: one["2"] for name, one in first["efficiency"].items()}
    share = shares["vision"] + shares["generator"]
    small = share / sum(shares[name] / two[name] for name in ("vision", "generator"))
    assert f"at {two['vision']:.2f} and {two['generator']:.2f} of a single device's efficiency" in page
    assert f"{share:.1%} of the work" in page
    gains = [row["plans"]["merged 1"]["measured_s"] / row["plans"]["ours"]["measured_s"] for row in rows]
    assert f"and {gains[0]:.3f} and {gains[1]:.3f} times as fast as the best monolithic layout" in page
    assert f"the bound above allows {most_gain(share, small, two['language']):.2f}" in page


def test_what_ran_beside_monolithic_layouts_is_quoted() -> None:
    from benchmarks.multimodal.lab import CASES, GAIN, LAB, UTILISATION

    rows = committed("lab")
    assert sorted((row["lab"], row["sigma"], row["training"]) for row in rows) == sorted((LAB, *case) for case in CASES)
    for row in rows:
        plans, ours = row["plans"], row["plans"]["ours"]
        quoted(row_of_the_page(row))
        for name, one in plans.items():
            assert one["valid"] and abs(one["error"]) < (0.035 if row["training"] == "trained" else 0.075), name
            assert ours["predicted_s"] <= 1.001 * one["predicted_s"], name
        assert plans["paper"]["measured_s"] >= GAIN * ours["measured_s"]
        assert min(one["measured_s"] for one in plans.values()) >= 0.99 * ours["measured_s"]
    assert rows[0]["useful_s"] >= UTILISATION * rows[0]["devices"] * rows[0]["plans"]["ours"]["measured_s"]


def test_an_encoder_that_takes_several_microbatches_is_predicted_as_told() -> None:
    from benchmarks.multimodal.lab import MULTIPLES

    (row,) = committed("together")
    for multiple, one in zip(MULTIPLES, row["plans"].values(), strict=True):
        assert one["valid"] and one["layout"]["vision.multiple"] == f"{multiple}"
        assert abs(one["error"]) < 0.015
        quoted([f"{multiple}", f"{one['measured_s']:.2f} s", f"{one['predicted_s']:.2f} s"])


def most_gain(share: float, small: float, large: float) -> float:
    """Over a layout in which small modules, this share of the work, have the efficiency `small`, and the rest `large`:
    of a plan that does the share as well as a device alone, and the rest alike."""
    return ((1 - share) / large + share / small) / ((1 - share) / large + share)


def test_what_small_modules_can_gain_at_most_is_quoted() -> None:
    page = " ".join(SECTION.split())
    assert f"that is {most_gain(0.11, 0.6, 1.0):.3f} for g = 1" in page and most_gain(0.11, 0.6, 0.85) < 1.073
    for small, large in ((0.52, 1.0), (0.49, 0.85)):
        assert most_gain(0.11, small + 0.005, large) < 1.1 < most_gain(0.11, small - 0.005, large)
        assert f"{small}" in page
    row = committed("lab")[0]
    shares, two = row["shares"], {name: one["2"] for name, one in row["efficiency"].items()}
    share = shares["vision"] + shares["generator"]
    small = share / sum(shares[name] / two[name] for name in ("vision", "generator"))
    assert f"s = {share:.3f} and e = {small:.2f}: at most {most_gain(share, small, two['language']):.2f}." in page


def test_dividing_devices_takes_what_is_told() -> None:
    slowest = max(committed("closed"), key=lambda row: float(row["planning_s"]))
    assert slowest["devices"] == 1296 and slowest["model"] == "MLLM-72B" and slowest["planning_s"] < 1.0
    assert f"at most {slowest['planning_s']:.2f} s" in SECTION
    plans = committed("plans")
    for row in plans:
        quoted([
            f"`{row['model']}`", f"{row['devices']:,}", row["decisions"]["modules"], f"{row['step_s']:.2f} s",
            f"{row['utilisation']:.1%}", f"{row['lower_bound_s'] / row['step_s']:.0%}",
            f"{row['planning_processor_s']:.0f} s",
        ])  # fmt: skip
    every = {(f"mllm-{size}", devices) for size in ("9b", "15b", "72b") for devices in (1172, 1296)}
    assert {(row["model"], row["devices"]) for row in plans} == every


def test_arrangements_gain_what_was_asked_for_and_what_is_quoted() -> None:
    from benchmarks.multimodal.order import TARGETS

    for row in committed("arranging"):
        assert all(row["gains"][way] >= least for way, least in TARGETS.items())
        quoted([f"{row['rows']} a microbatch", *(f"{row['gains'][way]:.2f}" for way in TARGETS)])
    (measured,) = committed("arranging-lab")
    ways = measured["ways"]
    assert all(one["valid"] for one in ways.values())
    assert all(ways[way]["measured_gain"] >= least for way, least in TARGETS.items())
    steps = [pair for one in ways.values() for pair in zip(one["predicted_s"], one["measured_s"], strict=True)]
    long = [f"{predicted / real - 1:.0%}".rstrip("%") for predicted, real in steps]
    assert f"predicted {min(long, key=int)} to {max(long, key=int)} % too long" in SECTION
    quoted(["measured", *(f"{ways[way]['measured_gain']:.2f}" for way in TARGETS)])
    quoted(["predicted for the lab", *(f"{ways[way]['predicted_gain']:.2f}" for way in TARGETS)])


def test_the_simulated_gains_are_those_of_their_command() -> None:
    """By the code that the result was made with: nothing was edited by hand, and nothing drifts."""
    from benchmarks.multimodal.order import SETTINGS, simulated_gains

    (row,) = (row for row in committed("arranging") if row["rows"] == 4)
    assert simulated_gains(SETTINGS[2]) == pytest.approx(row["gains"])
