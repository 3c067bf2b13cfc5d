"""`pipefit report` as a user calls it: files written, messages, exit codes."""

import json
import re
import subprocess
import sys

import pytest
from tests.support.show_toys import toy_model, toy_plan, write_toy_run

from pipefit.cluster import save_cluster_file
from pipefit.codec import dump_text
from pipefit.model.registry import save_model


@pytest.fixture
def files(tmp_path):
    """A run, its plan, and its model as a file, so that nothing must be captured."""
    plan, cluster = toy_plan()
    write_toy_run(tmp_path / "run", plan, cluster)
    save_cluster_file(cluster, tmp_path / "cluster.json")
    (tmp_path / "plan.json").write_text(dump_text(plan))
    save_model(toy_model(9), tmp_path / "model.json")
    return tmp_path


def started(directory, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "pipefit", *arguments], cwd=directory, capture_output=True, text=True, timeout=60
    )


def test_a_run_becomes_one_file_and_a_trace(files):
    done = started(files, "report", "run", "--model", "model.json", "-o", "out.html", "--trace", "both.json")
    assert done.returncode == 0, done.stderr
    assert "report written to out.html (0." in done.stdout and "perfetto" in done.stdout
    assert (files / "out.html").read_text().startswith("<!doctype html>")
    events = json.loads((files / "both.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}


def test_a_plan_is_reported_with_a_named_cluster(files, pipefit, monkeypatch):
    monkeypatch.chdir(files)
    code, _, error = pipefit(
        "report", "plan.json", "--model", "model.json", "--cluster", "cluster.json", "-o", "out.html"
    )
    assert code == 0, error
    assert "The plan has not run" in (files / "out.html").read_text()


def test_mistakes_end_with_one_message_and_code_2(files, pipefit, monkeypatch):
    monkeypatch.chdir(files)
    for arguments, words in (
        (["nothing"], "no such file or directory"),
        (["plan.json", "--model", "model.json"], "does not say which cluster"),
        (["run", "--model", "model.json", "-o", "model.json/out.html"], "report cannot be written"),
    ):
        code, _, error = pipefit("report", *arguments)
        assert code == 2 and words in error and "Traceback" not in error, error
    assert not list(files.glob("*.html"))


@pytest.mark.slow
@pytest.mark.gloo
def test_from_a_plan_through_training_to_its_report(tmp_path, pipefit, monkeypatch):
    """Training in processes of its own, the other commands in this one."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 2000)
    steps = (
        ["plan", "--model", "tiny-llama", "--local", "2", "--batch", "8", "--seq", "64", "--fix", "stages=2", "-o",
         "p.json"],
        ["train", "p.json", "--data", str(text), "-o", "run", "--steps", "4", "--local", "2", "--trace", "3"],
        ["report", "run", "-o", "out.html"],
        ["compare", "p.json", "run"],
    )  # fmt: skip
    for arguments in steps:
        if arguments[0] == "train":
            done = started(tmp_path, *arguments)
            code, error = done.returncode, done.stderr
        else:
            code, _, error = pipefit(*arguments)
        assert code == 0, error
    assert {"plan.json", "cluster.json", "environment.json", "trace.json"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }
    source = (tmp_path / "out.html").read_text()
    assert "<dt>Run: torch</dt>" in source
    assert "trace of step 3, on one time axis" in source
    start = source.index('id="data">') + len('id="data">')
    data = json.loads(source[start : source.index("</script>", start)])
    measured = [row for row in data["timeline"]["rows"] if row["trace"] == "measured"]
    assert len(measured) == 2 and all("waits" in row for row in measured)
    assert len(data["training"]["loss"]) == 4


@pytest.mark.parametrize(("shares", "crowded"), [((0.95, 0.62, 1.0, 1.0), "62%"), ((0.97, 1.0, 0.92, 1.0), "")])
def test_differences_and_a_busy_machine_are_printed(files, pipefit, monkeypatch, shares, crowded):
    monkeypatch.chdir(files)
    trace = json.loads((files / "run" / "trace.json").read_text())
    for rank, share in zip(trace["ranks"], shares, strict=True):
        rank["core_share"] = share
    (files / "run" / "trace.json").write_text(json.dumps(trace))
    code, out, error = pipefit("report", "run", "--model", "model.json", "-o", "out.html")
    assert code == 0, error
    assert re.search(r"step time: \S+ \S+ predicted, \S+ \S+ measured \(-9.1 %\)", out)
    assert re.search(r"peak memory of a device: .* predicted, .* measured \(-9.1 %\)", out)
    said = f"had a core for only {crowded} of the time"
    assert (said in out) == bool(crowded) == (said in (files / "out.html").read_text())
