"""The benchmarks that run plans in a lab: their clusters are as committed, and the quick ones run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.lab_toys import needs_lab
from tests.support.plan_toys import toy_model

from pipefit.cluster import Cluster, parse_spec
from pipefit.codec import dump_text
from pipefit.lab.spec import load_lab
from pipefit.plan.types import Job, Plan

if TYPE_CHECKING:
    from benchmarks.real_clusters.baseline import Tried

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"


def test_the_clusters_are_those_that_were_written_before_measuring() -> None:
    from benchmarks.lab.clusters import clusters

    for name, file in clusters().items():
        path = BENCHMARKS / "data" / "clusters" / f"{name}.json"
        assert path.read_text(encoding="utf-8") == dump_text(file), f"{name}: python -m benchmarks.lab.clusters"
        assert load_lab(path) == file


def test_one_cluster_can_be_measured_again(tmp_path: Path) -> None:
    from benchmarks.lab.runs import measured_labs

    path = tmp_path / "result.json"
    shown: list[dict[str, Any]] = []
    arguments = Namespace(quick=False, only="b", json=str(path))

    def measure_again() -> list[dict[str, Any]]:
        return measured_labs(arguments, ("a", "b"), lambda name: {"lab": name}, shown.append)

    assert measure_again() == [{"lab": "b"}]
    path.write_text(json.dumps({"labs": [{"lab": "b", "old": 1}, {"lab": "a", "old": 1}]}))
    assert measure_again() == [{"lab": "a", "old": 1}, {"lab": "b"}] and shown == [{"lab": "b"}] * 2


def test_formulas_agree_where_links_are_alike_and_cost_nothing() -> None:
    """One stage on one device: nothing but (forward + backward) of every microbatch."""
    from benchmarks.predictions.contention import built, laid
    from benchmarks.predictions.formulas import amp, pipette, uniform
    from pipefit.plan.assemble.predict import simulate_plan
    from pipefit.plan.evaluate.planner_context import PlannerContext

    model, cluster = toy_model(4), parse_spec("2x2xA100-80:1GB/s")
    plan = built(cluster, model, laid(1, 1, 4), Job(batch=8, sequence=64, precision="float32"))
    context = PlannerContext(model, cluster)
    simulation = simulate_plan(plan, model, cluster)
    costs = simulation.costs
    forward, backward = (float(costs.actions[kind].time_s.sum()) + costs.overhead_s for kind in "FB")
    assert uniform(plan, simulation, context.network) == pytest.approx(4 * (forward + backward))
    assert pipette(plan, simulation, context.network) == pytest.approx(4 * (forward + backward))
    assert amp(plan, simulation, context.network) == pytest.approx(4 * 3 * forward)


def test_pipettes_formula_pays_the_way_once_for_every_turn() -> None:
    """Two stages on two hosts at 1 GB/s: 4 microbatches are two turns, so two more ways than none."""
    from benchmarks.predictions.contention import built, laid
    from benchmarks.predictions.formulas import pipette, uniform
    from pipefit.plan.assemble.predict import simulate_plan
    from pipefit.plan.evaluate.planner_context import PlannerContext

    model, cluster = toy_model(4), parse_spec("2x1xA100-80:1GB/s")
    plan = built(cluster, model, laid(2, 1, 4), Job(batch=8, sequence=64, precision="float32"))
    context, simulation = PlannerContext(model, cluster), simulate_plan(plan, model, cluster)
    ((_, _, size),) = simulation.work.edges[0].forward[0]
    slowest = max(
        sum(float(simulation.costs.actions[kind].time_s[stage].sum()) + simulation.costs.overhead_s for kind in "FB")
        for stage in (0, 1)
    )
    way = 2 * size / 1e9
    assert pipette(plan, simulation, context.network) == pytest.approx(5 * slowest + 2 * way)
    assert uniform(plan, simulation, context.network) == pytest.approx(5 * slowest + way)


def two_kinds() -> Cluster:
    """Two hosts of two devices, the second host's twice as fast."""
    plain = parse_spec("2x2xA100-80:1GB/s")
    (kind,) = plain.kinds.values()
    twice = replace(kind, name="twice", peak_flops_per_s={k: 2 * v for k, v in kind.peak_flops_per_s.items()})
    hosts = (plain.hosts[0], replace(plain.hosts[1], kind="twice"))
    return replace(plain, kinds={kind.name: kind, "twice": twice}, hosts=hosts)


def even_plans(cluster: Cluster, recompute: tuple[str, ...] = ("none",)) -> list[Tried]:
    from benchmarks.real_clusters.baseline import baseline

    return list(baseline(cluster, toy_model(4), Job(batch=8, sequence=64, precision="float32"), recompute))


def test_the_baseline_has_every_grid_in_both_layouts() -> None:
    """Four devices: 1 x 4, 2 x 2 in two layouts, 4 x 1; on hosts of two kinds the faster ones by themselves too."""
    from benchmarks.real_clusters.compare import compute_bound

    assert compute_bound(two_kinds()) == 1.5
    tried = even_plans(two_kinds())
    grids = {(one.where, one.plan.decisions["stages"], one.plan.decisions["replicas"]) for one in tried}
    assert grids == {
        ("all", "1", "4"), ("all", "2", "2"), ("all", "4", "1"), ("twice only", "1", "2"), ("twice only", "2", "1"),
    }  # fmt: skip
    square = [one.plan for one in tried if one.where == "all" and one.plan.decisions["stages"] == "2"]
    assert {plan.decisions["inner"] for plan in square} == {"replica", "stage"}
    assert {plan.decisions["microbatches"] for plan in square} == {"1", "2", "4"}
    assert len({plan.decisions["cuts"] for plan in square}) == 1, "even layers, whatever stands where"
    assert all(one.plan.used_devices == (2, 3) for one in tried if one.where == "twice only")


def test_scarce_memory_changes_no_cut_and_doubles_the_baseline() -> None:
    plain, wide = two_kinds(), even_plans(two_kinds())
    kinds = {name: replace(kind, memory_bytes=1 << 20) for name, kind in plain.kinds.items()}
    narrow = even_plans(replace(plain, kinds=kinds), ("none", "full"))
    assert len(narrow) == 2 * len(wide)
    assert [one.plan.decisions["cuts"] for one in narrow[::2]] == [one.plan.decisions["cuts"] for one in wide]
    assert {one.plan.decisions["recompute"] for one in narrow[1::2]} == {"full"}


def test_who_is_run_is_chosen_by_every_predictor_and_not_only_among_the_best() -> None:
    from benchmarks.real_clusters.baseline import ALL, BEST, SPREAD, Tried, chosen

    plan = even_plans(two_kinds())[0].plan
    few = [Tried("all", plan, {"a": a, "b": b}) for a, b in ((1.0, 9.0), (2.0, 6.0), (3.0, 12.0), (4.0, 6.1))]
    assert chosen(few) == [0, 1, 3], "2 is 3 and 2 times the best, by both"
    count = ALL + 10
    many = [Tried("all", plan, {"a": 1.0 + n, "simulator": 100.0 - n}, fits=n > 1) for n in range(count)]
    best, spread = set(range(2, 2 + BEST)) | set(range(count - BEST, count)), SPREAD
    picked = chosen(many)
    assert best <= set(picked), "the best of those that fit, by each predictor"
    assert {0, count - 1} <= set(picked) and best | {0} < set(picked), "from the simulator's best to its worst"
    assert len(picked) <= 2 * BEST + spread


def test_invalid_runs_of_the_baseline_count_and_ours_must_be_valid() -> None:
    """Plans at 1.4 s, one that was late at 1.2 s: against 1.0 s that is 1.2x, and nothing is reached if ours was
    late."""
    from benchmarks.lab.runs import Measured
    from benchmarks.real_clusters.compare import TARGETS, summary

    cluster, tried = two_kinds(), even_plans(two_kinds())
    runs = {place: Measured((1.4, 1.4), True, "", ()) for place in range(len(tried) - 1)}
    runs[2] = Measured((1.2, 1.2), False, "late", ())

    def found(seconds: float, valid: bool) -> dict[str, Any]:
        return summary(
            "half-1.8", cluster, [(cluster, tried[0].plan, Measured((seconds,), valid, "", ()))], tried, runs
        )

    assert TARGETS["half-1.8"] == 1.2 and found(1.0, True)["invalid"] == 1 and len(found(1.0, True)["not_run"]) == 1
    assert found(1.0, True)["gains"]["best baseline"] == found(1.0, True)["gains"]["best of all"] == 1.2
    assert found(1.0, True)["reached"] and not found(1.0, False)["reached"] and not found(1.1, True)["reached"]


def test_a_plan_that_holds_more_than_a_device_has_is_no_baseline_and_no_success() -> None:
    from benchmarks.lab.runs import Measured
    from benchmarks.real_clusters.compare import summary

    cluster, tried = two_kinds(), even_plans(two_kinds())
    limit = min(kind.memory_bytes for kind in cluster.kinds.values())

    def run(seconds: float, size: int, plan: Plan) -> Measured:
        return Measured((seconds,), True, "", (), (size,) * len(plan.used_devices))

    runs = {place: run(2.0, limit, one.plan) for place, one in enumerate(tried)}
    runs[1] = run(1.1, limit + 1, tried[1].plan)
    plan = tried[0].plan
    found = summary("half-1.8", cluster, [(cluster, plan, run(1.0, limit, plan)), (cluster, None, None)], tried, runs)
    assert found["unfit"] == 1 and found["gains"]["best of all"] == 2.0 and found["reached"]
    assert found["recommendations"][1] == {"plan": None, "limit_bytes": dict.fromkeys(cluster.kinds, limit)}
    own = [(cluster, plan, run(1.0, size, plan)) for size in (limit, limit + 1)]
    assert not summary("half-1.8", cluster, own, tried, runs)["reached"], "every recommendation must fit"


def test_measurements_are_kept_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven plans, six at a time; the time is up after the first six. A run that was late is repeated once."""
    from benchmarks.lab.runs import Measured
    from benchmarks.real_clusters import work as real_work
    from benchmarks.real_clusters.work import Unfinished, Work

    plans, asked, clock = [one.plan for one in even_plans(two_kinds())[:7]], [], [0.0]

    def run_plans(lab: object, some: list[Plan], model: object, **options: object) -> list[Measured]:
        asked.append([plans.index(plan) for plan in some])
        clock[0] += 10
        return [Measured((1.0 + plans.index(plan),), plans.index(plan) != 3, "", ([],), (5, 6)) for plan in some]

    monkeypatch.setattr(real_work, "run_plans", run_plans)
    monkeypatch.setattr(real_work, "lab_of", contextlib.nullcontext)
    monkeypatch.setattr(real_work.time, "monotonic", lambda: clock[0])
    with Work.kept(str(tmp_path), "one", 5.0) as work, pytest.raises(Unfinished, match="2 of 7 plans"):
        work.runs(plans, None, 1, False)  # type: ignore[arg-type]
    with Work.kept(str(tmp_path), "one", 5.0) as work:
        runs = work.runs(plans, None, 1, False)  # type: ignore[arg-type]
        assert [session["what"] for session in work.sessions] == ["6 plans", "2 plans"]
    assert asked == [[0, 1, 2, 3, 4, 5], [3, 6]] and [run.step_s[0] for run in runs] == [1, 2, 3, 4, 5, 6, 7]
    assert runs[0].peak_bytes == (5, 6) and not runs[3].valid


@needs_lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quick_real_clusters(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.real_clusters.compare", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (lab,) = json.loads(out.read_text())["labs"]
    assert lab["devices"] == 4 and lab["compute_bound"] == 1.0 and len(lab["plans"]) >= 3
    assert set(lab["gains"]) == {"best baseline", "best of all", "uniform", "amp"}
    assert "compute bound 1.00x" in done.stdout


@needs_lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quick_contention(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.predictions.contention", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    (lab,) = result["labs"]
    assert len(lab["plans"]) == 3 and all(each["measured_s"] > 0.1 for each in lab["plans"])
    assert f"{result['errors']['simulator']['mean_error']:.1%}" in done.stdout


@needs_lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quick_shares(tmp_path: Path) -> None:
    """Devices that are alike get equal shares, so that all three plans take the same."""
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.spmd.lab", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (lab,) = json.loads(out.read_text())["labs"]
    assert lab["devices"] == 4 and lab["gain_predicted"] == pytest.approx(1.0, rel=0.01)
    assert lab["plans"]["ours"]["decisions"]["shards"] == "4", "even"
    assert all(0 < plan["communication"] < 1 and plan["measured_s"] > 0.05 for plan in lab["plans"].values())
    assert f"{lab['gain']:.2f}x over equal shares" in done.stdout


def test_the_committed_comparison_reaches_its_targets_and_is_quoted() -> None:
    from benchmarks.predictions.contention import LABS, SIMULATOR, errors_of, reached

    result = json.loads((BENCHMARKS / "results" / "contention.json").read_text())
    assert [lab["lab"] for lab in result["labs"]] == list(LABS)
    rows = [row for lab in result["labs"] for row in lab["plans"] if row["valid"]]
    assert len(rows) >= 24 and reached(result)
    assert result["errors"] == errors_of(rows)
    assert all(result["errors"][name]["mean_error"] > 2 * result["errors"][SIMULATOR]["mean_error"]
               for name in ("uniform", "pipette"))  # fmt: skip
    text = (ROOT / "docs" / "design" / "simulator.md").read_text()
    for title, errors in (*((lab["lab"], lab["errors"]) for lab in result["labs"]), ("all", result["errors"])):
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {title} |"))
        for name in ("uniform", "pipette", "closed form", "without sharing", SIMULATOR):
            each = errors[name]
            assert f"{each['mean_error']:.1%} ({each['max_error']:.1%}) {each['rank_correlation']:.2f}" in line


def test_the_committed_proof_reaches_its_targets_and_is_quoted() -> None:
    from benchmarks.real_clusters.compare import LABS, TARGETS
    from benchmarks.real_clusters.memory import fits

    result = json.loads((BENCHMARKS / "results" / "real_clusters.json").read_text())
    page = (BENCHMARKS.parent / "docs" / "results" / "results.md").read_text()
    assert [lab["lab"] for lab in result["labs"]] == list(LABS)
    for lab in result["labs"]:
        own = lab["ours"]["measured_s"]
        able = [row for row in lab["plans"] if row.get("fits", True)]
        everywhere = [row["measured_s"] for row in able if row["where"] == "all"]
        assert lab["ours"]["valid"] and lab["reached"] and lab["target"] == TARGETS[lab["lab"]]
        gains = [min(everywhere) / own, min(row["measured_s"] for row in able) / own]
        assert gains[0] >= lab["target"] and gains[1] >= 1
        assert abs(lab["ours"]["predicted_s"] / own - 1) < 0.04
        numbers = (*gains, lab["gains"]["uniform"], lab["gains"]["amp"], lab["compute_bound"])
        cells = [str(lab["devices"]), str(len(lab["plans"])), *(f"{number:.2f}" for number in numbers)]
        assert "| " + " | ".join(cells) + " |" in page
    rows = [row for lab in result["labs"] for row in lab["plans"]]
    assert f"of {len(rows)} even runs" in page and sum(not row["valid"] for row in rows) <= 2
    for name in ("tight", "half-2.5-32"):
        (lab,) = (lab for lab in result["labs"] if lab["lab"] == name)
        asked = [one for one in lab["recommendations"] if one["plan"]]
        assert len(asked) == {"tight": 6, "half-2.5-32": 2}[name]
        for one in asked:
            assert one["valid"] and fits(one["peak_bytes"], one["limit_bytes"])
            held, limits = (
                " and ".join(f"{one[key][kind] / 1e6:.2f}" for kind in ("fast", "slow"))
                for key in ("peak_bytes", "limit_bytes")
            )
            assert f"| {lab['devices']} | {limits} | {held} | {one['measured_s']:.2f} |" in page
        assert sum(not fits(row["peak_bytes"], row["limit_bytes"]) for row in lab["plans"]) == lab["unfit"] > 0


@pytest.mark.slow
@needs_lab
def test_quick_uneven_collectives(tmp_path: Path) -> None:
    """Even parts are cheapest padded; where two hosts that reach each other slowly hold little, sent directly."""
    file = tmp_path / "uneven.json"
    words = [sys.executable, "-m", "benchmarks.collectives.uneven", "--quick", "--json", file]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    (lab,) = json.loads(file.read_text())["labs"]
    assert [case["best"] for case in lab["cases"]] == [
        {"measured": how, "predicted": how} for how in ("padded", "alltoallv")
    ]


@needs_lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quick_synthesized_stages(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = ["benchmarks.spmd.synthesized_stages", "--quick", "--steps", "1", "--json", str(out)]
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (lab,) = json.loads(out.read_text())["labs"]
    plans = lab["plans"]
    assert {"ours", "pipeline", "program"} <= {*plans}
    assert all(one["shares"] == [1] for one in plans["pipeline"]["groups"]) and len(plans["program"]["groups"]) == 1
    assert plans["ours"]["predicted_s"] <= min(one["predicted_s"] for one in plans.values()) * (1 + 1e-6)
    assert all(one["measured_s"] > lab["bound_s"] / 2 for one in plans.values())


def test_pipelines_of_programs_beat_both_rivals_as_committed_and_quoted() -> None:
    (lab,) = json.loads((BENCHMARKS / "results" / "synthesized_stages.json").read_text())["labs"]
    plans, text = lab["plans"], (ROOT / "docs" / "results" / "results.md").read_text()
    assert lab["reached"] and all(plan["valid"] for plan in plans.values())
    assert len(plans["ours"]["groups"]) > 1 and all(len({*one["shares"]}) > 1 for one in plans["ours"]["groups"])
    assert lab["bound_s"] < plans["ours"]["measured_s"] < plans["pipeline"]["measured_s"] / 1.15
    assert plans["ours"]["measured_s"] < plans["program"]["measured_s"] / 1.5
    for title, name in (("the free choice", "ours"), ("the best without groups", "pipeline"),
                        ("the best with one stage", "program"), ("groups of even shares", "even")):  # fmt: skip
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {title} |"))
        assert f"| {plans[name]['measured_s']:.3f} s | {plans[name]['predicted_s']:.3f} s |" in line
        assert name not in lab["gains"] or f"| {lab['gains'][name]:.2f}x |" in line
