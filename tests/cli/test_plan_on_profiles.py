"""What the planner does with a measured cluster: uses its curves, and refuses one from other software or units."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipefit.cli.plan import command as plan_command
from pipefit.cluster import load_cluster, local_cluster, open_cluster, parse_spec, save_cluster_file
from pipefit.cluster.types import Cluster, Provenance
from pipefit.errors import ClusterError
from pipefit.profile.environment import machine_fingerprint


def measured(path: Path, **changes: str) -> Path:
    cluster: Cluster = local_cluster(2)
    provenance = Provenance(
        source="measured", when="2026-01-01", where="here", environment=machine_fingerprint() | changes
    )
    save_cluster_file(replace(cluster, provenance=provenance), path)
    return path


def plan(cluster: Path, allow: bool = False) -> None:
    plan_command(
        model="tiny-llama", cluster=str(cluster), local=None, batch=4, seq=32, precision="float32", seed=0, top=1,
        fix=["schedule=gpipe"], allow_other_environment=allow, as_json=True, output=None, quiet=True,
    )  # fmt: skip


def test_a_profile_of_other_software_is_refused_unless_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = measured(tmp_path / "cluster.json", torch="2.0.1")
    with pytest.raises(ClusterError, match="other software than is running now"):
        plan(cluster)
    plan(cluster, allow=True)
    assert "torch 2.0.1 then" in capsys.readouterr().err
    plan(measured(tmp_path / "same.json", cpu="Another CPU"))
    assert capsys.readouterr().err == "", "planning for another machine is no mistake"


def test_a_cluster_file_in_mistaken_units_is_refused(tmp_path: Path) -> None:
    good = parse_spec("2x8xA100-80:200Gbit/s")
    rail = good.rails[0]
    wrong = replace(
        rail, bandwidth_bytes_per_s=tuple(tuple(value * 1e3 for value in row) for row in rail.bandwidth_bytes_per_s)
    )
    path = tmp_path / "cluster.json"
    save_cluster_file(replace(good, rails=(wrong,)), path)
    assert load_cluster(path).rails == (wrong,)
    with pytest.raises(ClusterError, match="Every bandwidth between hosts is about 1,000 times too large"):
        open_cluster(str(path))
