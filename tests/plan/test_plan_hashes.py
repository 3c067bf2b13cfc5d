"""Plans are the same everywhere, to the last bit of their predictions: against committed hashes, with compiled loops
and without, and with the arithmetic of other processors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import introspect
from tests.support.hash_requests import FILE, REQUESTS, compensated_sum, hashes_of

from pipefit.cluster import LocalMachine, local_cluster
from pipefit.cost.portable import geometric_mean, portable_exp, portable_log, portable_power, whole_power
from pipefit.plan.placement.eigen import symmetric_eigenvectors

ROOT = Path(__file__).parents[2]
QUICK = (
    "llama local free", "qwen3 searched shards", "mixtral shards", "toy fit", "toy measured shards", "toy mixed kinds",
    "toy tied", "three modules disjoint", "built interleaved", "built v-half", "built v-min", "built v-zb",
    "built zb-v", "built fit",
)  # fmt: skip
"""The requests, one of each kind, that are planned in less than a second."""

OLD = {"OPENBLAS_CORETYPE": "Nehalem", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F"}
"""What makes OpenBLAS and the C library take what they have for processors without wide vectors and fused products."""


def committed() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


def elsewhere(environment: Mapping[str, str], names: list[str]) -> dict[str, dict[str, str]]:
    """The hashes of these requests in a process with more environment variables."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hash_requests", *names],
        cwd=ROOT, capture_output=True, text=True, timeout=560, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    table: dict[str, dict[str, str]] = json.loads(done.stdout)
    return table


def narrow_vectors() -> dict[str, str]:
    """Environment in which numpy takes none of the vector units that it found beyond its least ones."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    found = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
    return {"NPY_DISABLE_CPU_FEATURES": " ".join(found)} if found else {}


def test_there_are_forty_requests_with_hashes() -> None:
    assert list(committed()) == list(REQUESTS) and len(REQUESTS) == 40


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in REQUESTS]
)
def test_a_plan_is_the_committed_one(name: str) -> None:
    assert hashes_of(name) == committed()[name]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_plans_are_the_same_without_compiled_loops_on_other_processors_and_with_the_sums_of_later_pythons() -> None:
    """All three at once: plans that are equal to the committed ones depend on none of them."""
    environment = {"NUMBA_DISABLE_JIT": "1", **OLD, **narrow_vectors()}
    assert elsewhere(environment, ["--compensate", *REQUESTS]) == committed()


def test_plans_without_compiled_loops_are_the_same_on_every_commit() -> None:
    names = ["toy fit", "toy measured shards", "three modules disjoint"]
    assert elsewhere({"NUMBA_DISABLE_JIT": "1"}, names) == {name: committed()[name] for name in names}


@pytest.mark.slow
def test_plans_with_loops_compiled_for_another_processor_are_the_same(tmp_path: Path) -> None:
    names = ["toy fit", "toy uneven links"]
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    assert elsewhere(generic, names) == {name: committed()[name] for name in names}


def test_a_local_cluster_follows_from_its_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = LocalMachine(cores=2, frequency_hz=2.5e9, memory_bytes=8 * 2**30)
    before = local_cluster(2, machine)
    monkeypatch.setattr("pipefit.cluster.spec.detect_machine", lambda: pytest.fail("the machine was read"))
    assert local_cluster(2, machine) == before
    faster = LocalMachine(cores=2, frequency_hz=2.6e9, memory_bytes=8 * 2**30)
    monkeypatch.setattr("pipefit.cluster.spec.detect_machine", lambda: faster)
    assert local_cluster(2) == local_cluster(2, faster) != before


def test_portable_arithmetic_is_right() -> None:
    random = np.random.default_rng(0)
    values = random.lognormal(0.0, 8.0, 2000)
    assert portable_log(values) == pytest.approx(np.log(values), rel=1e-15, abs=1e-15)
    for value in np.linspace(-40.0, 40.0, 401).tolist():
        assert portable_exp(value) == pytest.approx(float(np.exp(value)), rel=1e-15)
    assert portable_power(0.3, 2.5) == pytest.approx(0.3**2.5, rel=1e-14)
    assert whole_power(np.array([0.3, 0.9, 2.0]), np.array([5, 0, 10])) == pytest.approx([0.3**5, 1.0, 1024.0])
    assert geometric_mean([1.9]) == 1.9 and geometric_mean([2.0, 8.0]) == pytest.approx(4.0, rel=1e-15)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 40])
def test_eigenvectors_are_those_of_the_matrix(count: int) -> None:
    matrix = np.random.default_rng(count).random((count, count))
    if count == 8:  # alike, as racks are
        matrix = np.kron(np.eye(2), np.ones((4, 4)))
    matrix = matrix + matrix.T
    values, vectors = symmetric_eigenvectors(matrix)
    assert values == pytest.approx(np.linalg.eigvalsh(matrix), abs=1e-12 * count)
    assert vectors.T @ vectors == pytest.approx(np.eye(count), abs=1e-12)
    assert vectors @ np.diag(values) @ vectors.T == pytest.approx(matrix, abs=1e-12 * count)


def test_sums_of_later_pythons_are_compensated() -> None:
    tenths = [0.1] * 10
    assert compensated_sum(tenths) == 1.0 != sum(tenths, 0.0) or sys.version_info >= (3, 12)
    assert compensated_sum([1, 2, 3]) == 6 and type(compensated_sum([1, 2])) is int


def test_the_variants_change_what_they_are_meant_to() -> None:
    """Else the tests above would hold for nothing: numpy tells what it dispatches to."""
    words = (
        "import json; from numpy.lib import introspect; print(json.dumps(introspect.opt_func_info('add', 'float64')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, env={**os.environ, **narrow_vectors()}
    )
    now, then = introspect.opt_func_info("add", "float64"), json.loads(done.stdout)
    names = [[one["current"] for many in table.values() for one in many.values()] for table in (now, then)]
    assert (names[0] != names[1]) == bool(narrow_vectors())
