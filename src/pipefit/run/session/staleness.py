"""Checks before a run that a plan's cluster and model have not changed since planning.

Clusters of this machine (`local:N`) are not compared: their figures are estimates that follow the clock rate and the
current memory limit, and a plan for N processes runs on any machine that can start N processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pipefit import codec
from pipefit.cluster import LOCAL, Cluster, looks_like_spec, open_cluster
from pipefit.cluster.calibration import add_calibration, split_calibration
from pipefit.errors import StalePlanError
from pipefit.model.families import without_tuning
from pipefit.model.families.multimodal.processor import PIXEL_FIELDS
from pipefit.model.graph import Model
from pipefit.model.registry import ModelDescription, builtin_names, open_family, resolve_model
from pipefit.plan.check.rules import check_staleness
from pipefit.plan.types import Plan


def check_cluster(plan: Plan, plan_file: str | Path, named: str = "") -> Cluster | None:
    """Return the current cluster if it matches the plan; None if there is nothing to compare.

    `named` is the user's replacement for the plan's own name of the cluster. The name is looked up as given, then as a
    file beside the plan. Raises StalePlanError if the cluster changed or its file is not found, FormatError or
    ClusterError if it cannot be read.
    """
    text = named or plan.cluster
    if not text or not plan.hashes.cluster:
        return None
    plain, calibration = split_calibration(text)
    if not plain.startswith(LOCAL) and not looks_like_spec(plain):
        plain = _find_file(plain, plan_file, named)
    if calibration is not None:
        plain = add_calibration(plain, Path(_find_file(str(calibration), plan_file, named)))
    cluster = open_cluster(plain)
    if not text.startswith(LOCAL):
        check_staleness(plan, cluster=cluster)
    return cluster


def _find_file(name: str, plan_file: str | Path, named: str) -> str:
    """Return the file of a cluster or calibration: as named, or beside the plan unless the user named it. Raises
    StalePlanError if there is none."""
    beside = Path(plan_file).parent / Path(name).name
    if Path(name).exists():
        return name
    if named or not beside.exists():
        raise StalePlanError(
            "The plan's cluster file was not found, so the plan cannot be checked against the current cluster.",
            where="--cluster" if named else "cluster",
            seen=name if named else f"{name}, and no {Path(name).name} beside the plan",
            next_step="pass the file with --cluster FILE, or put it beside the plan, or make the plan again",
        )
    return str(beside)


def check_model(plan: Plan, weights: str = "") -> None:
    """Check the model's directory or file, and the config.json of the weights, against the model of the plan.

    Files that are not on this host are skipped: the plan describes the model completely. Raises StalePlanError naming
    the fields that differ, ModelError or FormatError if a configuration cannot be read.
    """
    path = Path(plan.model.name)
    if plan.model.name not in builtin_names() and (path.is_file() or (path / "config.json").is_file()):
        _compare_description(
            plan,
            resolve_model(plan.model.name, plan.job.sequence),
            "The plan is stale: the model changed since it was made.",
            str(path),
        )
    if weights and (Path(weights) / "config.json").is_file():
        _compare_description(
            plan,
            resolve_model(weights, plan.job.sequence),
            "The weights are of another model than the plan.",
            f"--weights {weights}",
            without=PIXEL_FIELDS,
        )


def planned_model(plan: Plan) -> Model:
    """Return the plan's model as operator graphs. Raises StalePlanError if it is not the planned model."""
    model = open_family(plan.model.family, plan.model.config)
    if plan.hashes.model and model.hash != plan.hashes.model:
        raise StalePlanError(
            "The plan was made for a different version of this model.",
            where=f"model {plan.model.name!r}",
            seen=f"{model.hash} here, {plan.hashes.model} in the plan",
            next_step="make the plan again with this version",
        )
    return model


def _compare_description(
    plan: Plan, description: ModelDescription, what: str, where: str, without: Collection[str] = ()
) -> None:
    """Raise StalePlanError if a model is not the plan's, apart from some fields of its configuration."""
    then, now = (
        {"family": model.family, **_named_fields(codec.to_data(without_tuning(model.config)), without)}
        for model in (plan.model, description)
    )
    names = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    if names:
        raise StalePlanError(
            what,
            where=where,
            seen=", ".join(f"{name} {now.get(name)}" for name in names[:4]),
            allowed=", ".join(f"{name} {then.get(name)}" for name in names[:4]) + ", as in the plan",
            next_step="make the plan again with `pipefit plan`, or give the model that it was made for",
        )


def _named_fields(config: Mapping[str, Any], without: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return the fields of a configuration by their names, `text_config.vocab_size` for those of an object in it."""
    fields = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            fields |= _named_fields(value, without, f"{prefix}{name}.")
        elif name not in without:
            fields[f"{prefix}{name}"] = value
    return fields
