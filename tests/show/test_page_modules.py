"""The report of a plan of several modules: where each lies and why, in words; a timeline as ragged as its samples."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
from tests.show.test_page import Page
from tests.support.devtools import CHROMIUM, Browser
from tests.support.three_modules import skewed_samples, three_modules

from pipefit.cluster import parse_spec
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.types import Job
from pipefit.show.page import render_report
from pipefit.show.subject import ReportSubject, make_subject
from pipefit.units import format_seconds

CLUSTER = parse_spec("4xA100-80")
PLACED = {
    "disjoint": ("modules=disjoint", "microbatches=4"),
    "shared": ("modules=shared", "language.stages=2", "microbatches=4"),
    "inline": ("modules=inline", "language.stages=2", "microbatches=4"),
    "chosen": (),
}


@lru_cache
def subject(placement: str) -> ReportSubject:
    model = three_modules()
    constraints = parse_constraints(PLACED[placement])
    plan = make_plan(model, CLUSTER, Job(batch=8, sequence=4096), constraints, samples=skewed_samples(8, mean=300))
    return make_subject(plan, model, CLUSTER)


@pytest.mark.parametrize("placement", PLACED)
def test_the_placement_its_rivals_and_why_are_told(placement: str) -> None:
    plan = subject(placement).plan
    words = Page(render_report(subject(placement))).words
    assert plan.prediction is not None and plan.arranging is not None
    told = [note for note in plan.prediction.assumptions if note.startswith(("modules:", "samples:", "step:"))]
    assert any("on the devices of language (" in note or "devices of its own (disjoint)" in note for note in told)
    for note in told:
        assert " ".join(note.split()) in words, note
    for name in ("vision", "language", "generator"):
        assert f"{name}.replicas {plan.decisions[f'{name}.replicas']}" in words
    if placement != "chosen":
        assert "no other placement was looked at" in words
        return
    scored = [note for note in told if " at best; limited by " in note]
    assert {note.split(": ")[1] for note in scored} >= {"all disjoint", "generator and vision inline"}
    assert all("compute of stage" in note and note.count("(vision)") + note.count("(language)") for note in scored)
    mean = format_seconds(plan.prediction.step_s)
    assert f"{mean} for the batch shown" in words
    for other in plan.alternatives:
        assert " ".join(other.reason.split()) in words


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: no chromium or google-chrome in PATH")
@pytest.mark.parametrize("placement", ["disjoint", "shared", "inline"])
def test_a_browser_draws_every_action_of_every_module(placement: str, tmp_path: Path) -> None:
    """Also those of modules that take turns on a lane, and microbatches of different lengths."""
    found = subject(placement)
    file = tmp_path / "report.html"
    file.write_text(render_report(found), encoding="utf-8")
    with Browser() as browser:
        browser.size(1200, 900)
        browser.open(file)
        browser.settle()
        unpacked = browser.evaluate(
            "decodeRows(DATA.timeline).map(row => row.spans.map(({action: a, start, stop}) =>"
            " [a.kind, a.stage, a.microbatch, start, stop]))"
        )
        assert browser.problems == []
        assert int(browser.evaluate("document.getElementById('timeline').dataset.drawn")) > 5
    forwards: dict[int, set[float]] = {}
    for kind, stage, _, start, stop in (span for row in unpacked for span in row):
        if kind == "F":
            forwards.setdefault(stage, set()).add(round((stop - start) * 1e7))
    assert {*forwards} == {*range(len(found.plan.stages))}
    vision = [stage for stage, one in enumerate(found.plan.stages) if one.module == "vision"]
    assert len(set.union(*(forwards[stage] for stage in vision))) > 1, "images make some microbatches longer"
