"""The benchmarks that run plans in a lab: their clusters are as committed, and the quick ones run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lab_toys import needs_lab

from pipefit.codec import dump_text
from pipefit.lab.spec import load

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_clusters_are_those_that_were_written_before_measuring() -> None:
    from lab_clusters import clusters

    for name, file in clusters().items():
        path = BENCHMARKS / "data" / "clusters" / f"{name}.json"
        assert path.read_text(encoding="utf-8") == dump_text(file), f"{name}: python benchmarks/lab_clusters.py"
        assert load(path) == file


def test_one_cluster_can_be_measured_again(tmp_path: Path) -> None:
    from lab_runs import with_others

    path = tmp_path / "result.json"
    assert with_others([{"lab": "b"}], str(path), ("a", "b")) == [{"lab": "b"}]
    path.write_text(json.dumps({"labs": [{"lab": "b", "old": 1}, {"lab": "a", "old": 1}]}))
    assert with_others([{"lab": "b"}], str(path), ("a", "b")) == [{"lab": "a", "old": 1}, {"lab": "b"}]


def test_formulas_agree_where_links_are_alike_and_cost_nothing() -> None:
    """One stage on one device: nothing but (forward + backward) of every microbatch."""
    from plan_toys import toy_model

    from contention import built, laid
    from formulas import amp, pipette, uniform
    from pipefit.cluster import parse_spec
    from pipefit.plan.build import Workbench
    from pipefit.plan.predict import simulate_plan
    from pipefit.plan.types import Job

    model, cluster = toy_model(4), parse_spec("2x2xA100-80:1GB/s")
    plan = built(cluster, model, laid(1, 1, 4), Job(batch=8, sequence=64, precision="float32"))
    bench = Workbench(model, cluster)
    simulation = simulate_plan(plan, model, cluster)
    costs = simulation.costs
    forward, backward = (float(costs.actions[kind].time_s.sum()) + costs.overhead_s for kind in "FB")
    assert uniform(plan, simulation, bench.network) == pytest.approx(4 * (forward + backward))
    assert pipette(plan, simulation, bench.network) == pytest.approx(4 * (forward + backward))
    assert amp(plan, simulation, bench.network) == pytest.approx(4 * 3 * forward)


def test_pipettes_formula_pays_the_way_once_for_every_turn() -> None:
    """Two stages on two hosts at 1 GB/s: 4 microbatches are two turns, so two more ways than none."""
    from plan_toys import toy_model

    from contention import built, laid
    from formulas import pipette, uniform
    from pipefit.cluster import parse_spec
    from pipefit.plan.build import Workbench
    from pipefit.plan.predict import simulate_plan
    from pipefit.plan.types import Job

    model, cluster = toy_model(4), parse_spec("2x1xA100-80:1GB/s")
    plan = built(cluster, model, laid(2, 1, 4), Job(batch=8, sequence=64, precision="float32"))
    bench, simulation = Workbench(model, cluster), simulate_plan(plan, model, cluster)
    ((_, _, size),) = simulation.work.edges[0].forward[0]
    slowest = max(
        sum(float(simulation.costs.actions[kind].time_s[stage].sum()) + simulation.costs.overhead_s for kind in "FB")
        for stage in (0, 1)
    )
    way = 2 * size / 1e9
    assert pipette(plan, simulation, bench.network) == pytest.approx(5 * slowest + 2 * way)
    assert uniform(plan, simulation, bench.network) == pytest.approx(5 * slowest + way)


def test_the_baseline_has_every_grid_in_both_layouts() -> None:
    """Four devices: 1 x 4, 2 x 2 in two layouts, 4 x 1; on hosts of two kinds the faster ones by themselves too."""
    from dataclasses import replace

    from plan_toys import toy_model

    from pipefit.cluster import parse_spec
    from pipefit.plan.types import Job
    from real_clusters import baseline, compute_bound

    plain = parse_spec("2x2xA100-80:1GB/s")
    (kind,) = plain.kinds.values()
    twice = replace(kind, name="twice", peak_flops_per_s={k: 2 * v for k, v in kind.peak_flops_per_s.items()})
    hosts = (plain.hosts[0], replace(plain.hosts[1], kind="twice"))
    cluster = replace(plain, kinds={kind.name: kind, "twice": twice}, hosts=hosts)
    assert compute_bound(cluster) == 1.5
    tried = list(baseline(cluster, toy_model(4), Job(batch=8, sequence=64, precision="float32")))
    grids = {(one.where, one.plan.decisions["stages"], one.plan.decisions["replicas"]) for one in tried}
    assert grids == {
        ("all", "1", "4"), ("all", "2", "2"), ("all", "4", "1"), ("twice only", "1", "2"), ("twice only", "2", "1"),
    }  # fmt: skip
    square = [one.plan for one in tried if one.where == "all" and one.plan.decisions["stages"] == "2"]
    assert {plan.decisions["inner"] for plan in square} == {"replica", "stage"}
    assert len({plan.decisions["cuts"] for plan in square}) == 1, "even layers, whatever stands where"
    assert all(one.plan.devices == (2, 3) for one in tried if one.where == "twice only")


def test_invalid_runs_of_the_baseline_count_and_ours_must_be_valid() -> None:
    """Plans at 1.4 s, one that was late at 1.2 s: against 1.0 s that is 1.2x, and nothing is reached if ours was
    late."""
    from plan_toys import toy_model

    from lab_runs import Measured
    from pipefit.cluster import parse_spec
    from pipefit.plan.types import Job
    from real_clusters import TARGETS, baseline, summary

    model, cluster = toy_model(4), parse_spec("2x2xA100-80:1GB/s")
    tried = list(baseline(cluster, model, Job(batch=8, sequence=64, precision="float32")))
    runs = [Measured((1.4, 1.4), True, "", ()) for _ in tried]
    runs[2] = Measured((1.2, 1.2), False, "late", ())
    ours = tried[0].plan
    found = summary("half-1.8", cluster, model, ours, Measured((1.0, 1.0), True, "", ()), tried, runs)
    assert TARGETS["half-1.8"] == 1.2 and found["invalid"] == 1
    assert found["gains"]["best baseline"] == found["gains"]["best of all"] == 1.2 and found["reached"]
    late = summary("half-1.8", cluster, model, ours, Measured((1.0, 1.0), False, "late", ()), tried, runs)
    assert not late["reached"]
    slow = summary("half-1.8", cluster, model, ours, Measured((1.1, 1.1), True, "", ()), tried, runs)
    assert not slow["reached"]


@needs_lab
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_real_clusters(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / "real_clusters.py"), "--quick", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (lab,) = json.loads(out.read_text())["labs"]
    assert lab["devices"] == 4 and lab["compute_bound"] == 1.0 and len(lab["plans"]) >= 3
    assert set(lab["gains"]) == {"best baseline", "best of all", "uniform", "amp"}
    assert "compute bound 1.00x" in done.stdout


@needs_lab
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_contention(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / "contention.py"), "--quick", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    (lab,) = result["labs"]
    assert len(lab["plans"]) == 3 and all(each["measured_s"] > 0.1 for each in lab["plans"])
    assert f"{result['errors']['simulator']['mean_error']:.1%}" in done.stdout


def test_the_committed_comparison_reaches_its_targets_and_is_quoted() -> None:
    from contention import LABS, SIMULATOR, errors_of, reached

    result = json.loads((BENCHMARKS / "results" / "contention.json").read_text())
    assert [lab["lab"] for lab in result["labs"]] == list(LABS)
    rows = [row for lab in result["labs"] for row in lab["plans"] if row["valid"]]
    assert len(rows) >= 24 and reached(result)
    assert result["errors"] == errors_of(rows)
    assert all(result["errors"][name]["mean_error"] > 2 * result["errors"][SIMULATOR]["mean_error"]
               for name in ("uniform", "pipette"))  # fmt: skip
    text = (ROOT / "docs" / "simulator.md").read_text()
    for title, errors in (*((lab["lab"], lab["errors"]) for lab in result["labs"]), ("all", result["errors"])):
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {title} |"))
        for name in ("uniform", "pipette", "closed form", "without sharing", SIMULATOR):
            each = errors[name]
            assert f"{each['mean_error']:.1%} ({each['max_error']:.1%}) {each['rank_correlation']:.2f}" in line


def test_the_committed_proof_reaches_its_targets_and_is_quoted() -> None:
    from real_clusters import TARGETS

    result = json.loads((BENCHMARKS / "results" / "real_clusters.json").read_text())
    page = (BENCHMARKS.parent / "docs" / "results.md").read_text()
    assert [lab["lab"] for lab in result["labs"]] == ["half-2.5", "half-1.8", "links-only"]
    for lab in result["labs"]:
        own = lab["ours"]["measured_s"]
        everywhere = [row["measured_s"] for row in lab["plans"] if row["where"] == "all"]
        everything = [row["measured_s"] for row in lab["plans"]]
        assert lab["ours"]["valid"] and lab["reached"] and lab["target"] == TARGETS[lab["lab"]]
        gains = [min(everywhere) / own, min(everything) / own, lab["gains"]["uniform"], lab["gains"]["amp"]]
        assert gains[0] >= lab["target"] and gains[1] >= 1
        assert abs(lab["ours"]["predicted_s"] / own - 1) < 0.012
        assert "| " + " | ".join(f"{gain:.2f}" for gain in (*gains, lab["compute_bound"])) + " |" in page
    rows = [row for lab in result["labs"] for row in lab["plans"]]
    assert f"of {len(rows)} even runs" in page and sum(not row["valid"] for row in rows) == 2
