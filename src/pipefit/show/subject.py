"""The subject of a report: a plan or run with its model, its cluster, and a new simulation.

A plan holds its model by description and its cluster by name and hash. The planner's own evaluator simulates timeline,
memory curves and traffic from both, and the result is compared with the prediction in the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from pipefit import cluster as clusters
from pipefit.cluster.types import Cluster
from pipefit.codec import load_file
from pipefit.cost.comm.network import Network
from pipefit.errors import FormatError
from pipefit.model.graph import Model
from pipefit.model.registry import open_family, open_model
from pipefit.plan.assemble.predict import PlanSimulation, add_prediction, simulate_plan
from pipefit.plan.check.rules import check_plan, check_staleness
from pipefit.plan.types import Plan, PlanPrediction
from pipefit.show.record import CLUSTER, RunRecord, read_run


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSubject:
    """A simulated plan, with its run if there was one."""

    plan: Plan
    "The plan with its prediction."
    plan_hash: str
    "Hash of the plan as given."
    model: Model
    cluster: Cluster
    network: Network
    simulation: PlanSimulation
    record: RunRecord | None = None

    @property
    def prediction(self) -> PlanPrediction:
        assert self.plan.prediction is not None, "a subject's plan has its prediction"
        return self.plan.prediction


def open_plan_or_run(path: Path) -> tuple[Plan, RunRecord | None]:
    """Open a plan file, or a run directory's plan and record. Raises FormatError if the path is neither."""
    if path.is_dir():
        record = read_run(path)
        return record.plan, record
    if not path.exists():
        raise FormatError("There is no such file or directory.", where=str(path), allowed="a plan file or RUN_DIR")
    return load_file(Plan, path), None


def open_subject(path: Path, cluster: str = "", model: str = "") -> ReportSubject:
    """Open the subject at `path`. `cluster` and `model` override the names in the plan, unless ''.

    Raises FormatError for files that cannot be read, and StalePlanError if the cluster or the model is not the one that
    the plan was made for.
    """
    plan, record = open_plan_or_run(path)
    return resolve_subject(plan, record, path, cluster, model)


def resolve_subject(
    plan: Plan, record: RunRecord | None, path: Path, cluster: str = "", model: str = ""
) -> ReportSubject:
    """Return the subject of a plan and run opened from `path`. The other arguments and the errors are those of
    `open_subject`."""
    opened_cluster = find_cluster(plan, path, cluster)
    opened = find_model(plan, model)
    check_plan(plan, opened, opened_cluster)
    return make_subject(plan, opened, opened_cluster, record)


def make_subject(plan: Plan, model: Model, cluster: Cluster, record: RunRecord | None = None) -> ReportSubject:
    """Build the subject from a plan, its model and its cluster. A plan without prediction (written by hand) gets one
    here."""
    network = Network(cluster)
    simulation, plan_hash = simulate_plan(plan, model, cluster, network=network), plan.content_hash
    if plan.prediction is None:
        plan = replace(plan, prediction=add_prediction(plan, model, simulation).prediction)
    return ReportSubject(
        plan=plan,
        plan_hash=plan_hash,
        model=model,
        cluster=cluster,
        network=network,
        simulation=simulation,
        record=record,
    )


def find_cluster(plan: Plan, path: Path, named: str) -> Cluster:
    """Return the plan's cluster: the named one, else `cluster.json` in the run directory, else the one the plan
    names."""
    file = path / CLUSTER
    if named:
        cluster = clusters.open_cluster(named)
    elif file.is_file():
        cluster = clusters.load_cluster(file)
    elif plan.cluster:
        cluster = clusters.open_cluster(plan.cluster)
    else:
        raise FormatError(
            "The plan does not say which cluster it is for, and the timeline needs its links and devices.",
            where=str(path),
            next_step="give the cluster that the plan was made with: --cluster FILE.json or --cluster local:4",
        )
    check_staleness(plan, cluster=cluster)
    return cluster


def find_model(plan: Plan, named: str) -> Model:
    """Return the plan's model, captured from its description, or read from the user's override."""
    if named:
        model = open_model(named, plan.job.sequence, plan.model.config)
    else:
        model = open_family(plan.model.family, plan.model.config)
    check_staleness(plan, model=model)
    return model


def prediction_drift(subject: ReportSubject) -> float:
    """Return the relative difference between the step simulated now and the prediction in the plan; 0 if equal."""
    promised = subject.prediction.step_s
    return abs(subject.simulation.timeline.makespan_s / promised - 1.0) if promised else math.nan
