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
