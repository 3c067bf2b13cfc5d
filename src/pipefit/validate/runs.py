"""Runs with a measured step time, and their plans with the same degrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from pipefit.cluster.types import Cluster
from pipefit.errors import PipefitError
from pipefit.model.graph import Model
from pipefit.model.registry import open_model
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.assemble.shard_programs import ProgramCache
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.types import Job, Plan

MEMORY_FACTOR = 3
"""Multiple of their memory that devices get, since the time of every run counts, also of those predicted not to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run that somebody measured."""

    name: str
    set: str = ""
    "The set of published runs that it belongs to."
    group: str = ""
    "The part of its set with the same device."
    model: str
    "Name of the model."
    source: str
    "The model as `open_model` takes it."
    cluster: Cluster
    job: Job
    fix: tuple[str, ...]
    "The `--fix` options that fix its degrees."
    step_s: float
    is_fitted: bool = False
    "Whether the constants of data sheets are fitted to this run."


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run and the plan with its degrees."""

    name: str
    measured_s: float
    plan: Plan
    model: Model
    cluster: Cluster

    def predict_step(self, change: Callable[[Cluster], Cluster] | None = None) -> float:
        """Return the predicted step time in seconds; with `change`, for the same plan on the changed
        cluster."""
        cluster = self.cluster if change is None else change(self.cluster)
        return simulate_plan(self.plan, self.model, cluster, programs=self._programs).timeline.makespan_s

    @cached_property
    def _programs(self) -> ProgramCache:
        """The shard programs, which do not depend on the cluster."""
        return ProgramCache(self.model, self.plan.recipes)


def plan_run(run: MeasuredRun, model: Model) -> PlannedRun:
    """Return the plan of a run. Raises PipefitError if its degrees cannot be planned."""
    kinds = {
        name: replace(kind, memory_bytes=MEMORY_FACTOR * kind.memory_bytes) for name, kind in run.cluster.kinds.items()
    }
    cluster = replace(run.cluster, kinds=kinds)
    constraints = parse_constraints(run.fix, run.job.batch)
    plan = make_plan(model, cluster, run.job, constraints, tolerance=0.0, name=run.model)
    return PlannedRun(name=run.name, measured_s=run.step_s, plan=plan, model=model, cluster=cluster)


def plan_runs(
    runs: Iterable[MeasuredRun], refuse: Callable[[MeasuredRun, PipefitError], None]
) -> Iterator[tuple[MeasuredRun, PlannedRun]]:
    """Yield runs with their plans. `refuse` is called with runs that cannot be planned. Neighbours with the same model
    and length share it."""
    models: dict[tuple[str, int], Model] = {}
    for run in runs:
        key = (run.source, run.job.sequence)
        try:
            if key not in models:
                models = {key: open_model(*key)}
            planned = plan_run(run, models[key])
        except PipefitError as error:
            refuse(run, error)
            continue
        yield run, planned
