"""The placement benchmark runs, and what it compares with is what it says: Pipette's cost and moves, and the bests."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_quick_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.placement.search", "--quick", "--json", out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["seconds_pipette"] == 10 * result["seconds_ours"]
    lab, skewed = result["cases"]
    assert lab["optimum_s"] == pytest.approx(min(lab["step_s"]["ours"]), rel=1e-9), (
        "the optimum of eight hosts is found"
    )
    for case in (lab, skewed):
        assert case["not_worse"] and case["excess"]["ours"] <= case["excess"]["random"]
        assert min(case["step_s"]["ours"]) >= case["best_known_s"] * (1 - 1e-12) > case["compute_s"]
    assert {"commit", "date", "machine", "packages", "command", "python"} <= set(result["provenance"])
    assert "simulated iteration over the best known" in done.stdout


def test_pipettes_cost_is_its_formula() -> None:
    from benchmarks.placement.pipette import mapping_cost

    random = np.random.default_rng(3)
    bandwidth = random.uniform(1.0, 5.0, (6, 6))
    symmetric = (bandwidth + bandwidth.T) / 2
    servers = random.permutation(6)
    pipelines = servers.reshape(2, 3)
    sums = [sum(2 * 10.0 / symmetric[a, b] for a, b in pairwise(row)) for row in pipelines]
    ring = 2 * 1 / 2 * 7.0 / symmetric[pipelines[0, 0], pipelines[1, 0]]
    assert mapping_cost(servers, 2, 3, symmetric, 10.0, 7.0) == pytest.approx(max(sums) + ring)
    assert mapping_cost(servers, 1, 6, symmetric, 10.0, 7.0) == pytest.approx(
        sum(2 * 10.0 / symmetric[a, b] for a, b in pairwise(servers))
    )


def test_pipettes_moves_are_permutations_of_all_five_kinds() -> None:
    from benchmarks.placement.pipette import changed, seed_numba

    seed_numba(1)
    servers, other = np.arange(9), np.zeros(9, dtype=np.int64)
    seen: set[str] = set()
    for _ in range(2_000):
        changed(servers, other)
        assert sorted(other.tolist()) == list(range(9))
        moved = np.flatnonzero(other != servers)
        if len(moved):
            part = other[moved[0] : moved[-1] + 1]
            backwards = (np.diff(part) == -1).all()
            seen.add("swap" if len(moved) == 2 else "backwards" if backwards else "moved")
    assert seen == {"swap", "backwards", "moved"}


def test_the_best_known_placements_are_permutations_that_take_what_they_say() -> None:
    from benchmarks.placement.instances import LARGE, SMALL

    kept = json.loads((ROOT / "benchmarks" / "data" / "placement_best.json").read_text())
    instances = {one.name: one for one in (*SMALL, *LARGE)}
    assert kept and kept.keys() <= instances.keys()
    for name, best in kept.items():
        instance = instances[name]
        assert sorted(best["devices"]) == list(range(instance.hosts)) and len(best["by"]) > 10
        if instance.hosts <= 64:
            assert instance.step_s(best["devices"]) == pytest.approx(best["step_s"], rel=1e-9)


def test_instances_are_the_same_every_time() -> None:
    from benchmarks.placement.instances import LARGE, SMALL, regions, skewed

    assert (skewed(16, 4, 11).bandwidth == LARGE[0].bandwidth).all()
    assert regions(2).latency_s.max() == pytest.approx(0.265) and (np.diag(regions(2).latency_s) == 0).all()
    assert sorted({one.hosts for one in (*SMALL, *LARGE)}) == [8, 10, 16, 64, 128, 1024]
